#!/bin/sh
# Makes what compose.secure.yaml needs, in DIR; run again with the same names, it renews the certificates and keeps
# the tokens.
#
#   docker/make_credentials.sh DIR [NAME...]
#
# NAME            a further name or address under which clients reach this machine, such as tq.example or 10.0.0.7
# DIR/authority   the key that signs certificates: for no container
# DIR/services    what the services mount: their certificates and keys, the digests of the tokens, their own token
# DIR/clients     what a client mounts or copies: a certificate and key, and a token each for load, produce and consume
# DIR/compose.env the group that may read the keys, for docker compose --env-file
#
# It takes openssl and tq-service (or TQ_SERVICE names another command).
set -eu

if [ "$#" -lt 1 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
directory=$1
shift
names=$(printf ',%s' "$@")
names=${names%,}
here=$(dirname "$0")
command=${TQ_SERVICE:-tq-service}
umask 027
mkdir -p "$directory/services" "$directory/clients"

sh "$here/make_certificates.sh" "$directory/authority" "controller$names" "storage$names" client

# Services see a directory whose files are replaced one by one, each whole.
renew() {
    cp "$directory/authority/$1" "$2/.$1.new"
    chmod 640 "$2/.$1.new"
    mv "$2/.$1.new" "$2/$1"
}
for file in ca.pem controller.pem controller.key storage.pem storage.key; do
    renew "$file" "$directory/services"
done
for file in ca.pem client.pem client.key; do
    renew "$file" "$directory/clients"
done

token() {
    if [ ! -e "$2" ]; then
        path=$2
        name=$1
        shift 2
        $command token new --name "$name" --file "$directory/services/tokens.toml" --output "$path" "$@"
        chmod 640 "$path" "$directory/services/tokens.toml"
    fi
}
token services "$directory/services/service.token" --role service
token load "$directory/clients/load.token" --role produce --role consume --prefix bench-
token produce "$directory/clients/produce.token" --role produce
token consume "$directory/clients/consume.token" --role consume

echo "TQ_CREDENTIALS_GROUP=$(id -g)" > "$directory/compose.env"
