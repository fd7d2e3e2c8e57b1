#!/bin/sh
# Make what the services need to know and the image does not hold, in deploy/secrets: tokens of a
# bidder, of an operator and of Prometheus, Grafana's password, and a self-signed certificate.
# What is there is kept: put the certificate of your own name in secrets/nginx before or after.
#
#   deploy/secrets.sh [NAME OF THE HOST, localhost] [FOLDER, deploy/secrets]
set -eu
host=${1:-localhost}
folder=${2:-$(dirname "$0")/secrets}

# The services have users of their own, so that files are readable to all; this folder is not.
umask 022
mkdir -p "$folder/server" "$folder/nginx" "$folder/prometheus" "$folder/grafana"
chmod 700 "$folder"

digest() {
  printf %s "$1" | openssl dgst -sha256 -r | cut -d ' ' -f 1
}

if [ ! -e "$folder/server/tokens.toml" ]; then
  bidder=$(openssl rand -hex 32)
  operator=$(openssl rand -hex 32)
  prometheus=$(openssl rand -hex 32)
  printf %s "$prometheus" >"$folder/prometheus/token"
  printf %s "$bidder" >"$folder/bidder.token"
  printf %s "$operator" >"$folder/operator.token"
  cat >"$folder/server/tokens.toml" <<TOML
[bidder]
sha256 = "$(digest "$bidder")"
rights = ["bid", "read"]

[operator]
sha256 = "$(digest "$operator")"
rights = ["bid", "read", "operate"]

[prometheus]
sha256 = "$(digest "$prometheus")"
rights = ["read"]
TOML
fi

[ -e "$folder/grafana/password" ] || openssl rand -hex 16 >"$folder/grafana/password"

if [ ! -e "$folder/nginx/certificate.pem" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 \
    -subj "/CN=$host" -addext "subjectAltName=DNS:$host,DNS:localhost,IP:127.0.0.1" \
    -keyout "$folder/nginx/key.pem" -out "$folder/nginx/certificate.pem" 2>/dev/null
  chmod 644 "$folder/nginx/key.pem"
fi
echo "$folder"
