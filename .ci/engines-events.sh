#!/bin/sh
# Makes .cache/engines/events, where tests/engines/events starts Dynamo's indexer; called by .ci/engines.sh.
set -eu
exec "$(dirname "$0")/engines-pinned.sh" events
