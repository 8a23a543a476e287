#!/bin/sh
# Tests the connectors against the real engines, each in an environment of its own below .cache/engines.
#
# engines.sh [--setup] [ENGINE...] [-- PYTEST ARGUMENTS]: all engines by default; --setup only makes the environments.
# One after the other, because an engine takes both cores and gigabytes. The tests of vLLM and events run in .venv and
# start engines as children; those of the other engines run in the environment of their engine, which they import.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

# environment ENGINE: makes .cache/engines/ENGINE from tests/engines/ENGINE/requirements.txt, if these or the interpreter
# changed. The checkout is found by PYTHONPATH: no build, and always the code as it is.
environment() {
    venv=.cache/engines/$1
    wants=tests/engines/$1/requirements.txt
    wanted="$python $("$python" -c 'import platform; print(platform.python_version())') $(sha256sum <"$wants")"
    [ "$(cat "$venv/.ready" 2>/dev/null || :)" != "$wanted" ] || return 0
    case $1 in
    transformers) resolve= ;;
    *) resolve=--no-deps ;; # all versions are exact, because the ranges of these engines ask for CUDA builds
    esac
    echo "kvstore: making $venv (about two minutes)"
    make_venv "$python" "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input $resolve -r "$wants"
    echo "$wanted" >"$venv/.ready"
}

tests=yes engines=
while [ $# -gt 0 ]; do
    case $1 in
    --setup) tests=no ;;
    --) shift; break ;;
    vllm | lmcache | sglang | transformers | events) engines="$engines $1" ;;
    *) echo "kvstore: unknown engine $1: expected vllm, lmcache, sglang, transformers or events" >&2; exit 2 ;;
    esac
    shift
done

mkdir -p .cache/engines
if command -v flock >/dev/null 2>&1; then
    exec 9>.cache/engines/lock
    flock 9
fi
python=$(find_python)
engines=${engines:-vllm lmcache sglang transformers events}
for engine in $engines; do
    environment "$engine" & # all at once: each pip takes one core
done
wait
failed=
for engine in $engines; do
    environment "$engine"
    [ "$tests" = yes ] || continue
    echo "== $engine"
    case $engine in
    vllm | events) runner=.venv/bin/python ;;
    *) runner=.cache/engines/$engine/bin/python ;;
    esac
    KVSTORE_TEST_ENGINES=1 PYTHONPATH=".:gc" "$runner" -m pytest -q --timeout 600 "tests/engines/$engine" "$@" 9>&- \
        || failed="$failed $engine"
done
if [ -n "$failed" ]; then
    echo "kvstore: failed:$failed" >&2
    exit 1
fi
