#!/bin/sh
# Runs the quick part of the suite under other versions of Python, as far as they are installed.
# usage: other_pythons.sh VERSION...
set -eu
for version in "$@"; do
    python=$(command -v "python$version" || ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null | tail -n 1)
    # A launcher may be on the path though the version behind it is not selected.
    if [ -z "$python" ] || ! "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
        python=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null | tail -n 1)
    fi
    if [ -z "$python" ]; then
        echo "Python $version is not installed here: not tested"
        continue
    fi
    venv=.venv-py$version
    if [ ! -e "$venv/.ready" ] || [ constraints.txt -nt "$venv/.ready" ] || [ pyproject.toml -nt "$venv/.ready" ]; then
        "$python" -m venv --clear "$venv"
        "$venv/bin/python" -m pip install --quiet --no-compile --no-deps -c constraints.txt torch==2.13.0
        sh tests/install.sh "$venv/bin/python" -c constraints.txt -e '.[dev]'
        sh tests/install.sh "$venv/bin/python" -c constraints.txt --no-deps llama-models
        touch "$venv/.ready"
    fi
    "$venv/bin/python" --version
    "$venv/bin/python" -m pytest --quiet tests/prompts tests/tables tests/tasks/test_repeated.py tests/hooks/test_probes.py \
        tests/run/test_evaluation.py tests/heads/test_score.py tests/models/test_loading.py
done
