#!/bin/sh
# Makes .cache/engines/transformers, where tests/engines/transformers runs: torch for the CPU and the pinned transformers.
#
# Called by .ci/engines.sh. Made anew only when the requirements or the interpreter changed. This checkout is found by
# PYTHONPATH: no build, and always the code as it is.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

venv=.cache/engines/transformers
wants=tests/engines/transformers/requirements.txt
mkdir -p .cache/engines
if command -v flock >/dev/null 2>&1; then
    exec 9>.cache/engines/transformers.lock
    flock 9
fi
python=$(find_python)
wanted="$python $("$python" -c 'import platform; print(platform.python_version())') $(sha256sum <"$wants")"
if [ "$(cat "$venv/.ready" 2>/dev/null || :)" != "$wanted" ]; then
    echo "kvstore: making $venv (torch and transformers, about two minutes)"
    make_venv "$python" "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "$wants"
    echo "$wanted" >"$venv/.ready"
fi
