#!/usr/bin/env bash
# Install the gateway as a systemd service: a virtual environment, a user, a unit, and a first configuration with a key.
# It can be run again at any time. Existing files stay, and a configuration is never overwritten.
set -euo pipefail

usage() {
  cat <<'END'
Usage: install.sh [--wheel FILE] [--prefix DIR] [--dry-run]
       install.sh --uninstall [--purge] [--prefix DIR] [--dry-run]

  --wheel FILE   the gateway's wheel; default: the wheel in dist/, from `make dist`
  --prefix DIR   install everything below DIR, to inspect it: creates no user and does not use systemd
  --dry-run      print the steps only
  --uninstall    remove the program and the service; configuration and data stay
  --purge        remove these too, and the user

PYTHON names the interpreter, 3.11 or newer; default: python3.
END
}

fail() {
  echo "install.sh: $*" >&2
  exit 1
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(cd "$here/../.." && pwd)
lock=$tree/deploy/docker/runtime.lock
python=${PYTHON:-python3}
name=vllm-gateway
prefix='' wheel='' dry='' uninstall='' purge='' changed=''

while (($#)); do
  case $1 in
    --wheel | --prefix)
      (($# > 1)) || fail "$1 needs a value"
      [[ $1 == --wheel ]] && wheel=$2 || prefix=$2
      shift
      ;;
    --dry-run) dry=yes ;;
    --uninstall) uninstall=yes ;;
    --purge) purge=yes ;;
    -h | --help)
      usage
      exit
      ;;
    *) fail "unknown: $1 (--help tells what there is)" ;;
  esac
  shift
done
[[ -z $purge || -n $uninstall ]] || fail "--purge goes with --uninstall"
if [[ -n $prefix ]]; then
  [[ $prefix =~ ^/[A-Za-z0-9/._-]*[A-Za-z0-9._-]$ ]] || fail "--prefix: an absolute path of plain characters is needed"
fi

home=$prefix/opt/$name
etc=$prefix/etc/$name
config=$etc/gateway.yaml
unit=$prefix/etc/systemd/system/$name.service
command=$prefix/usr/local/bin/$name
kept=("$etc" "$prefix/var/lib/$name" "$prefix/var/cache/$name" "$unit.d") # the last has what `systemctl edit` writes
mark=$home/.installed

# Does something, or only says so.
run() {
  if [[ -n $dry ]]; then
    echo "+ ${*@Q}"
  else
    "$@"
  fi
}

has_systemd() {
  [[ -z $prefix && -d /run/systemd/system ]]
}

# A file of this folder, with the prefix in its paths.
place() {
  local from=$1 to=$2 mode=$3 text
  text=$(sed -E "s#/(opt|etc|run|var/cache)/$name|/var/lib#$prefix&#g" "$from")
  [[ ! -f $to || $(<"$to") != "$text" ]] || return 0
  changed=yes
  if [[ -n $dry ]]; then
    echo "+ write $to"
  else
    mkdir -p "$(dirname "$to")"
    printf '%s\n' "$text" >"$to.new"
    chmod "$mode" "$to.new"
    mv "$to.new" "$to"
  fi
}

check_python() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is not Python 3.11 or newer; name one with PYTHON=..."
  "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module (Debian: python3-venv)"
  local root
  root=$("$python" -c 'import os, sys; print(os.path.realpath(sys.base_prefix))')
  case $root/ in # ProtectHome= of the unit
    /home/* | /root/* | /run/user/*)
      [[ -n $prefix ]] || fail "$python lives in $root, and the service sees no home folder; name another with PYTHON=/usr/bin/python3"
      ;;
    *) ;;
  esac
}

find_wheel() {
  local found=("$tree"/dist/vllm_gateway-*.whl)
  if [[ -z $wheel ]]; then
    if [[ -n $dry && ! -f ${found[0]} ]]; then
      echo "no wheel yet: \`make dist\` builds it"
      wheel=$tree/dist/vllm_gateway-VERSION-py3-none-any.whl
      return
    fi
    [[ ${#found[@]} == 1 && -f ${found[0]} ]] || fail "name the gateway with --wheel FILE, or build it with \`make dist\`"
    wheel=${found[0]}
  fi
  [[ -f $wheel ]] || fail "$wheel: no such file"
  [[ -f $lock ]] || fail "$lock: no such file"
}

make_user() {
  id -u "$name" >/dev/null 2>&1 ||
    run useradd --system --user-group --no-create-home --home-dir "/var/lib/$name" --shell /usr/sbin/nologin "$name"
  local group
  for group in video render; do # who may use a GPU
    if getent group "$group" >/dev/null; then
      run usermod --append --groups "$group" "$name"
    fi
  done
}

# The program, exactly as locked. The mark says by which interpreter and of what it is made, and is written last.
install_program() {
  local interpreter wanted before=''
  interpreter=$("$python" -c 'import os, sys; print(os.path.realpath(sys.base_prefix), sys.version_info[:2])')
  wanted=$interpreter
  [[ ! -f $wheel ]] || wanted="$interpreter $(cat "$wheel" "$lock" | sha256sum)" # a dry run does without one
  [[ ! -f $mark ]] || before=$(<"$mark")
  [[ $before != "$wanted" ]] || return 0
  changed=yes
  [[ $before == "$interpreter "* ]] || run "$python" -m venv --clear "$home"
  run rm -f "$mark"
  local pip=("$home/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)
  run "${pip[@]}" --only-binary :all: --require-hashes --requirement "$lock"
  run "${pip[@]}" --force-reinstall "$wheel"
  [[ -n $dry ]] || echo "$wanted" >"$mark"
}

# The first configuration. Its key is shown here, and nowhere again.
write_config() {
  local fresh=$etc/.gateway.yaml.new
  if [[ -n $dry ]]; then
    echo "+ write $config, with a new key that is printed"
    return
  fi
  mkdir -p "$etc"
  rm -f "$fresh"
  place "$here/gateway.yaml" "$fresh" 0640
  if [[ -z $prefix ]]; then
    chown "root:$name" "$etc" "$fresh"
  fi
  chmod 0750 "$etc"
  echo "The key of this gateway, in clear for this once:"
  "$home/bin/$name" keys new --id admin --config "$fresh" 2>/dev/null
  mv "$fresh" "$config"
}

start() {
  if has_systemd; then
    run systemctl daemon-reload
    run systemctl enable --quiet "$name"
    run systemctl restart "$name" # it returns when the gateway is ready
    run echo "$name runs: systemctl status $name"
  else
    run echo "$name is installed without systemd: $home/bin/$name serve $config"
  fi
}

install_all() {
  find_wheel
  check_python
  [[ -n $prefix ]] || make_user
  install_program
  [[ -f $config ]] || write_config
  place "$here/$name" "$command" 0755
  place "$here/$name.service" "$unit" 0644
  if [[ -n $changed ]]; then
    start
  else
    echo "$name is installed already, as it is here"
  fi
}

uninstall_all() {
  if has_systemd && [[ -f $unit ]]; then
    run systemctl disable --now --quiet "$name"
  fi
  run rm -rf -- "$home" "$unit" "$command"
  if [[ -n $purge ]]; then
    run rm -rf -- "${kept[@]}"
    if [[ -z $prefix ]] && id -u "$name" >/dev/null 2>&1; then
      run userdel "$name"
    fi
  else
    echo "left in place: ${kept[*]} (--purge takes them away)"
  fi
  if has_systemd; then
    run systemctl daemon-reload
  fi
  [[ -z $prefix || -n $dry || ! -d $prefix ]] || find "$prefix" -mindepth 1 -type d -empty -delete
}

umask 022
[[ -n $prefix || -n $dry || $EUID == 0 ]] || fail "this needs root; --prefix DIR is for a look without"
if [[ -n $uninstall ]]; then
  uninstall_all
else
  install_all
fi
