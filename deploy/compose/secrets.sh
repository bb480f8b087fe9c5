#!/bin/sh
# Create the missing secrets of compose.yaml in the folder "secrets" beside this file, and print the gateway's first key.
# Other users cannot read the folder. The files in it are readable, because each container reads them as a different user.
set -eu
cd "$(dirname "$0")"
umask 022
mkdir -p secrets/keys
chmod 700 secrets

random() {
  head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'
}

# made FILE: write standard input to FILE, unless it exists
made() {
  if [ -e "secrets/$1" ]; then cat > /dev/null; else cat > "secrets/$1.new" && mv "secrets/$1.new" "secrets/$1"; fi
}

random | made engine_key
random | made postgres_password
random | made grafana_password
echo "requirepass $(random)" | made redis_conf
echo "postgresql://gateway:$(cat secrets/postgres_password)@postgres:5432/gateway" | made ledger_url
echo "redis://:$(sed -n 's/^requirepass //p' secrets/redis_conf)@redis:6379/0" | made limits_url
if [ ! -e secrets/keys/keys.yaml ]; then
  key="sk-$(random)"
  printf 'keys:\n  - id: admin\n    hash: sha256:%s\n' "$(printf %s "$key" | sha256sum | cut -d ' ' -f 1)" | made keys/keys.yaml
  echo "The key of admin, which is not stored: $key"
fi
