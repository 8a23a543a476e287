#!/bin/sh
# Tests the connectors against the real engines, each in an environment of its own below .cache/engines.
#
# engines.sh [--setup] [ENGINE...] [-- PYTEST ARGUMENTS]: all engines by default; --setup only makes the environments.
# One after the other, because an engine takes both cores and gigabytes. The tests of vLLM, and those of events with
# Dynamo's indexer, run in .venv and start engines as children; those of the
# others run in the engine's environment, which they import. Those of LMCache with its client in a vLLM need vLLM's too.
set -eu
cd "$(dirname "$0")/.."

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

failed=
for engine in ${engines:-vllm lmcache sglang transformers events}; do
    [ -d "tests/engines/$engine" ] || continue
    ".ci/engines-$engine.sh"
    [ "$tests" = yes ] || continue
    echo "== $engine"
    case $engine in
    vllm | events) python=".venv/bin/python" ;;
    *) python=.cache/engines/$engine/bin/python ;;
    esac
    KVSTORE_TEST_ENGINES=1 PYTHONPATH=".:gc" "$python" -m pytest -q --timeout 600 "tests/engines/$engine" "$@" \
        || failed="$failed $engine"
done
if [ -n "$failed" ]; then
    echo "kvstore: failed:$failed" >&2
    exit 1
fi
