#!/bin/sh
# Makes .cache/engines/sglang, where tests/engines/sglang runs; called by .ci/engines.sh.
set -eu
exec "$(dirname "$0")/engines-pinned.sh" sglang
