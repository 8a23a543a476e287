#!/bin/sh
# Measures which lines the test suite runs, also in the programs that it starts: coverage.sh [PYTEST ARGUMENTS]
#
# Prints a table of files; the lines are in .cache/coverage/html. Coverage is pinned in .ci/coverage.lock.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

folder=$PWD/.cache/coverage
wanted=$(sha256sum <.ci/coverage.lock)
if [ "$(cat "$folder/.locked" 2>/dev/null || :)" != "$wanted" ]; then
    rm -rf "$folder"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --require-hashes --target "$folder" -r .ci/coverage.lock
    echo 'import coverage; coverage.process_startup()' >"$folder/sitecustomize.py"
    printf '[run]\nparallel = true\nsource = kvstore, kvstore_gc\nomit = */kvstore/v1/*\ndata_file = %s/data\nsigterm = true\n' "$folder" >"$folder/settings"
    echo "$wanted" >"$folder/.locked"
fi
rm -rf "$folder"/data* "$folder/html"
export COVERAGE_PROCESS_START="$folder/settings" PYTHONPATH="$folder"
failed=0
make test ARGS="$*" || failed=$?
COVERAGE_PROCESS_START=
coverage() { .venv/bin/python -m coverage "$@" --rcfile="$folder/settings"; }
coverage combine --quiet
coverage report --skip-covered --sort=cover
coverage html --quiet --directory="$folder/html"
exit $failed
