#!/bin/sh
# Makes .venv: the locked dependencies, each checked against its hash, and this checkout installed in editable form.
#
# Called by the Makefile when requirements.lock or pyproject.toml is newer than .venv/.ready. The environment is made
# anew only when the lock or the interpreter changed; otherwise installing the checkout again is enough.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

mkdir -p .cache
if command -v flock >/dev/null 2>&1; then
    # Two makes at once: the second waits here, then finds the work done.
    exec 9>.cache/venv.lock
    flock 9
fi
# The sources that an installation compiles count too.
sources="requirements.lock pyproject.toml .ci/build_native.py kvstore/native/*.[ch]"
# shellcheck disable=SC2086
if [ -f .venv/.ready ] && [ -z "$(find $sources -newer .venv/.ready)" ]; then
    exit 0
fi

python=$(find_python)
wanted="$python $("$python" -c 'import platform; print(platform.python_version())') $(sha256sum <requirements.lock)"
if [ "$(cat .venv/.locked 2>/dev/null || :)" != "$wanted" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    count=$(grep -c '==' requirements.lock)
    echo "kvstore: making .venv with $python; installing $count locked packages (about a minute)"
    make_venv "$python" .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --require-hashes -r requirements.lock
    echo "$wanted" >.venv/.locked
fi
echo "kvstore: installing this checkout in .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
touch .venv/.ready
echo "kvstore: .venv is ready"
