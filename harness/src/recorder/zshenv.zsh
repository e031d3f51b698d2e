# Read by every zsh of an agent (ZDOTDIR): the person's own start file first, then one JSON line per command to $SPHYNX_TRACE_LOG.
if [[ -r ${HOME-}/.zshenv ]]; then source "$HOME/.zshenv"; fi
# Login and interactive shells read more start files: the person's own ones.
if [[ -o login || -o interactive ]]; then ZDOTDIR=${HOME-}; fi
if [[ -n ${SPHYNX_TRACE_LOG-} && ! -o interactive ]]; then
  zmodload zsh/datetime 2>/dev/null
  typeset -gi __sphynx_left=20000 # commands that one shell records; a loop must not fill the disk
  __sphynx_trace() {
    emulate -L zsh
    setopt localoptions no_xtrace no_err_exit no_err_return extended_glob
    (( __sphynx_left > 0 )) || return 0
    (( __sphynx_left -= 1 ))
    local text=${1[1,16384]} cwd=${PWD-} i char code
    local at=${EPOCHREALTIME-0}
    at=${at/./}; at=${at[1,13]}
    for i in {1..31}; do
      [[ $text$cwd == *[[:cntrl:]\\\"]* ]] || break
      if (( i == 1 )); then
        text=${text//\\/\\\\}; cwd=${cwd//\\/\\\\}
        text=${text//\"/\\\"}; cwd=${cwd//\"/\\\"}
      fi
      printf -v char "\\x$(( [##16] i ))"
      printf -v code '\\u%04x' $i
      text=${text//$char/$code}; cwd=${cwd//$char/$code}
    done
    print -r -- "{\"at\":$at,\"cwd\":\"$cwd\",\"argv\":[\"$text\"],\"source\":\"trap\"}" >> $SPHYNX_TRACE_LOG
    return 0
  }
  setopt debug_before_cmd
  trap '{ __sphynx_trace "$ZSH_DEBUG_CMD" } 2>/dev/null' DEBUG
fi
