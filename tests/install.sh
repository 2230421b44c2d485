#!/bin/sh
# Installs packages: with uv in seconds, or with pip where there is no uv or uv fails (perhaps only pip is told where packages
# lie).
# usage: install.sh PYTHON ARGUMENT...    Arguments that uv and pip share; where they need PyTorch, it must be installed.
set -eu
python=$1
shift
bin=$(dirname "$0")/../.venv/bin
if ! [ -x "$bin/uv" ]; then
    echo "uv could not be installed: pip installs the rest, which takes a minute longer"
elif "$bin/uv" pip install --quiet --system-certs --python "$python" "$@"; then
    exit 0
else
    echo "uv failed: pip installs this instead, which takes a minute longer"
fi
"$bin/python" -m pip --python "$python" install --quiet --no-compile "$@"
