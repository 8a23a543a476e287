#!/bin/sh
# Makes .cache/engines/ENGINE from the exact versions in tests/engines/ENGINE/requirements.txt: engines-pinned.sh ENGINE.
#
# Made anew only when these or the interpreter changed. Without resolving, as an engine's own ranges ask for CUDA builds.
# This checkout is found by PYTHONPATH: no build, and always the code as it is.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

engine=$1
venv=.cache/engines/$engine
wants=tests/engines/$engine/requirements.txt
mkdir -p .cache/engines
if command -v flock >/dev/null 2>&1; then
    exec 9>".cache/engines/$engine.lock"
    flock 9
fi
python=$(find_python)
wanted="$python $("$python" -c 'import platform; print(platform.python_version())') $(sha256sum <"$wants")"
if [ "$(cat "$venv/.ready" 2>/dev/null || :)" != "$wanted" ]; then
    echo "kvstore: making $venv ($(grep -c '==' "$wants") packages, about two minutes)"
    make_venv "$python" "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r "$wants"
    echo "$wanted" >"$venv/.ready"
fi
