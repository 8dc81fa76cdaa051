#!/bin/sh
# Certificates for tls.yaml, in compose/certificates: an authority, and one certificate for both
# servers. Arguments are more names or addresses by which drivers call them:
#   sh compose/certificates.sh cluster.example.org 10.0.0.5
# The authority's own key is not kept: run this again for new certificates, then restart the cluster.
set -eu
umask 077
here=$(cd "$(dirname "$0")" && pwd)
folder=$here/certificates
days=${RLFLAME_CERTIFICATE_DAYS:-365}
network=${RLFLAME_NETWORK:-172.30.83}

# References to objects carry the cache's address, so the certificate must name it.
names="DNS:session-manager,DNS:object-cache,DNS:localhost,IP:127.0.0.1,IP:$network.10"
for name in "$@"; do
    case $name in
        *[!0-9.]*) names="$names,DNS:$name" ;;
        *) names="$names,IP:$name" ;;
    esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/openssl.cnf" <<END
[req]
distinguished_name = name
prompt = no
[name]
CN = rlflame
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $names
END

new_key() {
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null
}

new_key "$work/ca.key"
openssl req -x509 -new -config "$work/openssl.cnf" -extensions authority -subj "/CN=rlflame authority" \
    -key "$work/ca.key" -days "$days" -out "$work/ca.crt"
new_key "$work/server.key"
openssl req -new -config "$work/openssl.cnf" -key "$work/server.key" -out "$work/server.csr"
openssl x509 -req -in "$work/server.csr" -CA "$work/ca.crt" -CAkey "$work/ca.key" \
    -set_serial "0x$(openssl rand -hex 16)" -days "$days" \
    -extfile "$work/openssl.cnf" -extensions server -out "$work/server.crt" 2>/dev/null

if [ -d "$folder/ca.crt" ] || { [ -d "$folder" ] && [ ! -w "$folder" ]; }; then
    echo "$folder was made by a cluster that found no certificates: stop it and remove that folder" >&2
    exit 1
fi
mkdir -p "$folder"
chmod 755 "$folder"
cp "$work/ca.crt" "$work/server.crt" "$work/server.key" "$folder"
chmod 644 "$folder/ca.crt" "$folder/server.crt"
openssl verify -CAfile "$folder/ca.crt" "$folder/server.crt"
echo "for $names"
echo "a driver on this machine: FLAME_CA_FILE=$folder/ca.crt"
