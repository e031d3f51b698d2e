# Sourced by every non-interactive bash of an agent (BASH_ENV): appends one JSON line per command to $SPHYNX_TRACE_LOG.
# Builtins only, nothing of the shell's state is changed but the DEBUG trap: no functrace (RETURN traps of the agent would begin to be
# inherited), so the insides of functions and subshells are not seen. Must always succeed: under extdebug a failing trap skips the command.
__sphynx_left=20000 # commands that one shell records; a loop must not fill the disk
__sphynx_trace() {
  local __sphynx_text=${1:0:16384} __sphynx_cwd=${PWD-} __sphynx_at __sphynx_i __sphynx_octal __sphynx_char __sphynx_code
  # In an EXIT trap, bash shows the last command of this file instead of the trap's own.
  case $1 in *__sphynx_trace*) return 0 ;; esac
  if (( __sphynx_left <= 0 )); then return 0; fi
  (( __sphynx_left -= 1 )) || :
  case $__sphynx_text$__sphynx_cwd in
    *[\\\"[:cntrl:]]*)
      __sphynx_char=\\ __sphynx_code=\\\\
      __sphynx_text=${__sphynx_text//"$__sphynx_char"/"$__sphynx_code"} __sphynx_cwd=${__sphynx_cwd//"$__sphynx_char"/"$__sphynx_code"}
      __sphynx_char=\" __sphynx_code=\\\"
      __sphynx_text=${__sphynx_text//"$__sphynx_char"/"$__sphynx_code"} __sphynx_cwd=${__sphynx_cwd//"$__sphynx_char"/"$__sphynx_code"}
      __sphynx_char=$'\n' __sphynx_code=\\n
      __sphynx_text=${__sphynx_text//"$__sphynx_char"/"$__sphynx_code"} __sphynx_cwd=${__sphynx_cwd//"$__sphynx_char"/"$__sphynx_code"}
      __sphynx_char=$'\t' __sphynx_code=\\t
      __sphynx_text=${__sphynx_text//"$__sphynx_char"/"$__sphynx_code"} __sphynx_cwd=${__sphynx_cwd//"$__sphynx_char"/"$__sphynx_code"}
      case $__sphynx_text$__sphynx_cwd in
        *[[:cntrl:]]*)
          for (( __sphynx_i = 1; __sphynx_i < 32; __sphynx_i += 1 )); do
            printf -v __sphynx_octal '\\%03o' "$__sphynx_i"
            printf -v __sphynx_char "$__sphynx_octal"
            printf -v __sphynx_code '\\u%04x' "$__sphynx_i"
            __sphynx_text=${__sphynx_text//"$__sphynx_char"/"$__sphynx_code"}
            __sphynx_cwd=${__sphynx_cwd//"$__sphynx_char"/"$__sphynx_code"}
          done
          ;;
      esac
      ;;
  esac
  if [[ -n ${EPOCHREALTIME-} ]]; then
    __sphynx_at=${EPOCHREALTIME/[!0-9]/}
    __sphynx_at=${__sphynx_at%???}
  else
    printf -v __sphynx_at '%(%s)T000' -1
  fi
  printf '{"at":%s,"cwd":"%s","argv":["%s"],"source":"trap"}\n' "$__sphynx_at" "$__sphynx_cwd" "$__sphynx_text" >> "$SPHYNX_TRACE_LOG" || :
  return 0
}
# The second argument keeps $_ as it was. Stderr is put aside because of `set -x`, and of a log that cannot be written.
if [[ -n ${SPHYNX_TRACE_LOG-} ]]; then
  trap '{ __sphynx_trace "$BASH_COMMAND" "$_"; } 2>/dev/null || :' DEBUG
fi
