#!/bin/sh
# Makes certificates for a closed deployment: an authority, made once, and a certificate for each name, made at each run.
#
#   docker/make_certificates.sh DIR NAME...
#
# Each NAME gets DIR/NAME.pem and DIR/NAME.key, good for 90 days as server and as client, under the names NAME,
# localhost and 127.0.0.1; more names are given as NAME,ALIAS,10.0.0.7. DIR/ca.pem is what both sides check against.
# DIR/ca.key signs: keep it off the machines that serve. Keys are readable by this user and group alone.
set -eu

if [ "$#" -lt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
directory=$1
shift
umask 027
mkdir -p "$directory"

if [ ! -e "$directory/ca.key" ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=tq_service authority" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout "$directory/ca.key" -out "$directory/ca.pem" 2>/dev/null
    chmod 600 "$directory/ca.key"
fi

for names in "$@"; do
    name=${names%%,*}
    alternatives="DNS:localhost,IP:127.0.0.1"
    for each in $(printf '%s' "$names" | tr ',' ' '); do
        case $each in
            *[!0-9.]*) alternatives="$alternatives,DNS:$each" ;;
            *) alternatives="$alternatives,IP:$each" ;;
        esac
    done
    work=$(mktemp -d "$directory/.new.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$name" \
        -keyout "$work/key" -out "$work/request" 2>/dev/null
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n' \
        "$alternatives" > "$work/extensions"
    openssl x509 -req -in "$work/request" -CA "$directory/ca.pem" -CAkey "$directory/ca.key" -CAcreateserial \
        -CAserial "$directory/ca.serial" -days 90 -extfile "$work/extensions" -out "$work/pem" 2>/dev/null
    chmod 640 "$work/key"
    # Services that watch the files see the two change one after the other, and take the pair once it fits.
    mv "$work/key" "$directory/$name.key"
    mv "$work/pem" "$directory/$name.pem"
    rm -rf "$work"
    echo "made $directory/$name.pem and $directory/$name.key for $alternatives"
done
