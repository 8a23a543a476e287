#!/bin/sh
# Makes .cache/engines/vllm, where tests/engines/vllm starts its engines; called by .ci/engines.sh.
set -eu
exec "$(dirname "$0")/engines-pinned.sh" vllm
