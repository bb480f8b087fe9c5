# Actions of a reader between the commands of a page, and stand-ins for missing programs. Read by the script of a page.

# A command that stays in its terminal runs in the background here; the next one replaces it, as after Ctrl-C.
vllm-gateway() {
  case "${1-}" in
    serve | demo) in_another_terminal vllm-gateway "$@" ;;
    *) command vllm-gateway "$@" ;;
  esac
}

in_another_terminal() {
  stopped
  PYTHONUNBUFFERED=1 command "$@" </dev/null >>"$STAGE/terminal" 2>&1 &
  echo $! >"$STAGE/running"
  until curl --disable --fail --output /dev/null --max-time 5 http://127.0.0.1:9090/readyz 2>/dev/null; do
    kill -0 $! || { cat "$STAGE/terminal" >&2; return 1; }
    sleep 0.1
  done
}

stopped() {
  [[ -s "$STAGE/running" ]] || return 0
  kill -TERM "$(<"$STAGE/running")" 2>/dev/null || true
  while kill -0 "$(<"$STAGE/running")" 2>/dev/null; do sleep 0.05; done
  rm "$STAGE/running"
}

# The environment is there already: what is run is the recipe. Anything else takes minutes, and is to be marked.
make() {
  [[ "$*" == run ]] || { echo "make $* is not run here" >&2; return 1; }
  in_another_terminal make --silent --old-file .venv/.ready BIN="$STAGE/bin" run
}

# The project is built and installed aside; what else a page installs has to be here already. Nothing is fetched.
pip() {
  local aside=()
  [[ "${2-}" == . ]] && aside=(--no-deps --no-build-isolation --target "$STAGE/installed")
  "$PYTHON" -m pip "$1" --quiet --no-index "${aside[@]}" "${@:2}"
}

trap stopped EXIT
