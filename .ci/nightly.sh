#!/bin/sh
# Runs parts of the nightly tests, one after the other: nightly.sh PART...; without one it lists them.
#
# A part takes 25 minutes at most on two cores; `engines` is the four engines in a row. Tests whose programs are missing
# are skipped, with the reason.
set -eu
cd "$(dirname "$0")/.."

if [ $# -eq 0 ]; then
    echo "make nightly PART=..., one or more of:"
    echo "  engines (or vllm, lmcache, sglang, transformers), events, compat, bench, docs, coverage, sanitizers,"
    echo "  model, mutants, simulation, chaos, browser, deploy;"
    echo "  as root: alerts, hosts, crash, guide"
fi
for part in "$@"; do
    echo "== nightly: $part"
    case $part in
    engines) make engines-test ENGINES="vllm lmcache sglang transformers" ;;
    vllm | lmcache | sglang | transformers) make engines-test ENGINES="$part" ;;
    compat | docs | coverage | model | mutants) make "$part" ;;
    simulation) make sim ;;
    events | bench | sanitizers | chaos | browser | deploy | alerts | hosts | crash | guide) make "$part-test" ;;
    *) echo "kvstore: unknown part $part: make nightly lists them" >&2; exit 2 ;;
    esac
done
