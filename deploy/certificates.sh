#!/bin/sh
# Makes the authorities and certificates of a cluster, with the openssl command:
#
#   certificates.sh authorities FOLDER
#   certificates.sh worker FOLDER NAME HOST-OR-ADDRESS...    a worker: NAME is its identity, cert:NAME
#   certificates.sh client FOLDER NAME                       an engine, a tool, a person: identity cert:NAME
#   certificates.sh etcd-member FOLDER NAME HOST-OR-ADDRESS...
#   certificates.sh etcd-client FOLDER NAME
#
# Two authorities, because etcd lets in whoever its authority signed: with one for both, every client of kvstore could
# write to etcd. Keys are for whoever runs this alone (umask 077). An authority lasts ten years, a certificate DAYS
# (default 397); to renew one, run its line again. Where you have an authority of your own (cert-manager, Vault, step-ca),
# use that, and let these lines say what a certificate must have.
set -eu
umask 077

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[ $# -ge 2 ] || usage
kind=$1
folder=$2
shift 2
days=${DAYS:-397}

# key FILE: a fresh key on the curve P-256.
key() {
    openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"
}

# authority NAME: NAME.crt and NAME.key; one that is there already stays.
authority() {
    if [ -e "$folder/$1.key" ]; then
        echo "$folder/$1.key is there already: kept"
        return
    fi
    key "$folder/$1.key"
    openssl req -x509 -new -key "$folder/$1.key" -days 3650 -subj "/CN=$1" -out "$folder/$1.crt" \
        -addext basicConstraints=critical,CA:TRUE,pathlen:0 -addext keyUsage=critical,keyCertSign,cRLSign
}

# names HOST-OR-ADDRESS...: a subjectAltName.
names() {
    line=
    for name in "$@"; do
        case $name in
        *:* | *[0-9].[0-9]*.[0-9]*.[0-9]*) line="$line,IP:$name" ;;
        *) line="$line,DNS:$name" ;;
        esac
    done
    echo "${line#,}"
}

# issue AUTHORITY NAME USAGE [SUBJECT-ALT-NAME]: tls.crt, tls.key and ca.crt in FOLDER/NAME.
issue() {
    [ -e "$folder/$1.key" ] || { echo "no $folder/$1.key: run $0 authorities $folder first" >&2; exit 2; }
    mkdir -p "$folder/$2"
    extensions=$(mktemp "$folder/extensions.XXXXXX")
    {
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature"
        echo "extendedKeyUsage=$3"
        [ -z "${4:-}" ] || echo "subjectAltName=$4"
    } >"$extensions"
    # Into place by renaming: a service that watches its files must never see half of one, or a key without its certificate
    # for longer than between two renames.
    key "$folder/$2/tls.key.new"
    openssl req -new -key "$folder/$2/tls.key.new" -subj "/CN=$2" |
        openssl x509 -req -CA "$folder/$1.crt" -CAkey "$folder/$1.key" -set_serial "0x$(openssl rand -hex 16)" \
            -days "$days" -extfile "$extensions" -out "$folder/$2/tls.crt.new" 2>"$extensions.said" ||
        { cat "$extensions.said" >&2; rm -f "$extensions" "$extensions.said"; exit 1; }
    rm -f "$extensions" "$extensions.said"
    cp "$folder/$1.crt" "$folder/$2/ca.crt"
    mv "$folder/$2/tls.key.new" "$folder/$2/tls.key"
    mv "$folder/$2/tls.crt.new" "$folder/$2/tls.crt"
    echo "wrote $folder/$2/tls.crt, tls.key and ca.crt, for $days days"
}

case $kind in
authorities)
    mkdir -p "$folder"
    authority kvstore-ca
    authority etcd-ca
    ;;
worker | client | etcd-member | etcd-client)
    [ $# -ge 1 ] || usage
    name=$1
    shift
    case $kind in
    # Every worker can be called kvstore-worker (--tls-server-name), whatever its address.
    worker) issue kvstore-ca "$name" serverAuth,clientAuth "$(names kvstore-worker "$@")" ;;
    client) issue kvstore-ca "$name" clientAuth ;;
    etcd-member) issue etcd-ca "$name" serverAuth,clientAuth "$(names localhost 127.0.0.1 "$@")" ;;
    etcd-client) issue etcd-ca "$name" clientAuth ;;
    esac
    ;;
*) usage ;;
esac
