#!/bin/sh
# Makes .cache/engines/lmcache, where tests/engines/lmcache runs; called by .ci/engines.sh.
set -eu
exec "$(dirname "$0")/engines-pinned.sh" lmcache
