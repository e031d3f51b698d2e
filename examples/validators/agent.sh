# An agent that reads numbers/list.txt, adds it up, and tells what it did in the lines of the command harness.
total=$(( $(paste -sd+ numbers/list.txt) ))
printf '{"_tag":"Command","command":"paste -sd+ numbers/list.txt","exitCode":0,"output":"%s"}\n' "$total"
echo "$total" > total.txt
printf '{"_tag":"FileChange","paths":["%s/total.txt"]}\n' "$SPHYNX_WORKSPACE"
printf '{"_tag":"Message","role":"assistant","text":"The total is %s."}\n' "$total"
