#!/usr/bin/env bash
# Install the gateway as a systemd service: a virtual environment, a user, a unit, and a first configuration with a key.
# It can be run again at any time. A configuration is never overwritten. Each version of the program has its own folder. A new version
# replaces the running one only after it has accepted the configuration, and the old one is started again if the new one is not ready.
set -euo pipefail

usage() {
  cat <<'END'
Usage: install.sh [--wheel FILE] [--prefix DIR] [--dry-run]
       install.sh --uninstall [--purge] [--prefix DIR] [--dry-run]

  --wheel FILE   the gateway's wheel; default: the wheel in dist/, from `make dist`
  --prefix DIR   install everything below DIR, to inspect it: creates no user and does not use this machine's systemd
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
version='' previous=''

# Does something, or only says so.
run() {
  if [[ -n $dry ]]; then
    echo "+ ${*@Q}"
  else
    "$@"
  fi
}

has_systemd() {
  [[ -d $prefix/run/systemd/system ]]
}

# Installs a file, with the prefix in its paths.
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

# Sets the folder of the version to install, and that of the active one. A version is named after everything that is in it.
name_versions() {
  local of=("$lock" "$here/$name" "$here/$name.service")
  [[ ! -f $wheel ]] || of+=("$wheel") # a dry run does without one
  version=$home/versions/$({
    "$python" -c 'import os, sys; print(os.path.realpath(sys.base_prefix), sys.version_info[:2])'
    cat "${of[@]}"
  } | sha256sum | cut -c 1-12)
  [[ ! -L $home/bin ]] || previous=$(dirname "$(readlink "$home/bin")")
}

# Installs the program, exactly as locked, into the version's folder. `complete` is written last.
install_program() {
  [[ ! -f $version/complete ]] || return 0
  run "$python" -m venv --clear "$version"
  local pip=("$version/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)
  run "${pip[@]}" --only-binary :all: --require-hashes --requirement "$lock"
  run "${pip[@]}" "$wheel"
  run cp "$here/$name" "$here/$name.service" "$version/"
  run touch "$version/complete"
}

# Makes a version the active one: its program, command and unit. A running gateway still has all files of its version.
activate() {
  local from=$1
  if [[ $(readlink "$home/bin") != "$from/bin" ]]; then
    changed=yes
    [[ -L $home/bin ]] || run rm -rf -- "$home"/{bin,include,lib,lib64,pyvenv.cfg,.installed} # of an installation without versions
    run ln -sfn "$from/bin" "$home/bin.new"
    run mv -T "$home/bin.new" "$home/bin"
  fi
  [[ -z $dry ]] || from=$here
  place "$from/$name" "$command" 0755
  place "$from/$name.service" "$unit" 0644
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
  "$version/bin/$name" keys new --id admin --config "$fresh" 2>/dev/null
  mv "$fresh" "$config"
}

# Checks the configuration with the new version, as the service's user, with the variables of the running service.
check_config() {
  local user=() variables=() pid=0
  if [[ -n $dry ]]; then
    echo "+ check $config with $version"
    return
  fi
  [[ -n $prefix ]] || user=(runuser --user "$name" --)
  if has_systemd; then
    pid=$(systemctl show --property MainPID --value "$name")
  fi
  if ((pid)); then
    mapfile -d '' -t variables <"/proc/$pid/environ"
  fi
  (
    PATH=/opt/vllm/bin:$version/bin:$PATH
    ((!pid)) || export -- "${variables[@]}"
    unset NOTIFY_SOCKET WATCHDOG_USEC
    cd /
    "${user[@]}" "$version/bin/$name" check "$config"
  ) || fail "the new version does not accept $config: nothing was changed, and the installed version stays. Correct a copy of the file," \
    "check it with \`$version/bin/$name check COPY\`, put it in place, and run this again"
}

# Starts the active version. Starts the previous one again if it is not ready.
start() {
  if ! has_systemd; then
    run echo "$name is installed without systemd: $home/bin/$name serve $config"
    return
  fi
  run systemctl daemon-reload
  run systemctl enable --quiet "$name"
  if run systemctl restart "$name"; then # it returns when the gateway is ready
    run echo "$name runs: systemctl status $name"
    return
  fi
  [[ -n $previous && $previous != "$version" ]] || fail "the gateway does not become ready; the reason: journalctl --unit $name"
  activate "$previous"
  systemctl daemon-reload
  systemctl restart "$name" || fail "neither the new version nor the previous one becomes ready; the reason: journalctl --unit $name"
  fail "the new version did not become ready, so the previous one runs again; the reason: journalctl --unit $name"
}

# Removes every version but the active one and the one before it.
remove_old_versions() {
  local folder
  for folder in "$home"/versions/*; do
    [[ ! -d $folder || $folder == "$version" || $folder == "$previous" ]] || run rm -rf -- "$folder"
  done
}

install_all() {
  find_wheel
  check_python
  [[ -n $prefix ]] || make_user
  name_versions
  install_program
  [[ -f $config ]] || write_config
  [[ $version == "$previous" ]] || check_config
  activate "$version"
  if [[ -n $changed ]]; then
    start
    remove_old_versions
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
