#!/bin/sh
# Looks the versions in constraints.txt up among known vulnerabilities, if their list can be reached.
# usage: known_vulnerabilities.sh BIN
set -eu
if ! timeout 20 "$1/python" -c "import socket; socket.create_connection(('api.osv.dev', 443), timeout=5)" 2>/dev/null; then
    echo "known vulnerabilities: skipped, no network (api.osv.dev cannot be reached)"
    exit 0
fi
timeout 300 "$1/pip-audit" --vulnerability-service osv --timeout 10 --progress-spinner off \
    --no-deps --disable-pip --requirement constraints.txt
