# A coding agent in plain bash. It speaks the documented lines of the command harness: one JSON object per line on stdout.
#
# Two models share it: "careful" thinks a little longer and reports its tokens, "hasty" takes a short cut that goes wrong on one case.
# Neither knows how to count words.
set -u

# $1 as a JSON string.
json() {
  local text=$1 backslash='\' quote='"'
  text=${text//"$backslash"/"$backslash$backslash"}
  text=${text//"$quote"/"$backslash$quote"}
  text=${text//$'\n'/"${backslash}n"}
  text=${text//$'\t'/"${backslash}t"}
  printf '"%s"' "$text"
}

message() {
  printf '{"_tag":"Message","role":"assistant","text":%s}\n' "$(json "$1")"
}

# Runs a command line, and tells of it.
run() {
  local output status
  output=$(bash -c "$1" 2>&1)
  status=$?
  printf '{"_tag":"Command","command":%s,"exitCode":%d,"output":%s}\n' "$(json "$1")" "$status" "$(json "$output")"
}

wrote() {
  printf '{"_tag":"FileChange","paths":[%s]}\n' "$(json "$SPHYNX_WORKSPACE/$1")"
}

finish() {
  if [ "$SPHYNX_MODEL" = careful ]; then
    printf '{"_tag":"Usage","inputTokens":%d,"outputTokens":%d}\n' "$((800 + ${#SPHYNX_PROMPT}))" 40
  fi
  printf '{"_tag":"Finished","reason":"done"}\n'
  exit 0
}

# A conversation goes on in a process of its own for each turn; the session id is what ties them together.
session=${SPHYNX_SESSION_ID:-door-$$}
printf '{"_tag":"Started","sessionId":%s,"model":%s}\n' "$(json "$session")" "$(json "$SPHYNX_MODEL")"
case $SPHYNX_MODEL in
  careful) sleep 0.3 ;;
  *) sleep 0.1 ;;
esac

if [ -n "${SPHYNX_SESSION_ID:-}" ]; then
  case $SPHYNX_PROMPT in
    *dark*) colour='dark blue' ;;
    *) colour=blue ;;
  esac
  run "printf '%s\n' '$colour' > door.txt"
  wrote door.txt
  message "The door is $colour now."
  finish
fi

case $SPHYNX_PROMPT in
  *'Paint the door'*)
    message 'Which colour should the door have?'
    ;;
  *'Greet'*)
    run "printf 'Hello, World!\n' > hello.txt"
    wrote hello.txt
    message 'The greeting is in hello.txt.'
    ;;
  *'Add up'*)
    if [ "$SPHYNX_MODEL" = careful ]; then
      # The last line has no newline at its end; this reads it all the same.
      run 'sum=0; while read -r n || [ -n "$n" ]; do sum=$((sum + n)); done < numbers.txt; echo "$sum" | tee total.txt'
    else
      run 'sum=0; while read -r n; do sum=$((sum + n)); done < numbers.txt; echo "$sum" | tee total.txt'
    fi
    wrote total.txt
    message "The total is $(cat total.txt)."
    ;;
  *'Count the words'*)
    run 'wc -l < poem.txt | tee words.txt'
    wrote words.txt
    message "The poem has $(cat words.txt) words."
    ;;
  *)
    message 'I do not know how to do that.'
    ;;
esac
finish
