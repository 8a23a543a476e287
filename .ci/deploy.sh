#!/bin/sh
# Runs the tests of deploy/ that need tools:  .ci/deploy.sh [pytest's arguments]
#
# Helm (its own code, as the Python package helm-python-sdk carries it), the schemas of Kubernetes and a YAML reader are
# pinned in .ci/deploy.lock and live under .cache: nothing that users or other tests install needs them. systemd-analyze
# comes from the system; if it is missing, its tests are skipped.
set -eu
cd "$(dirname "$0")/.."

folder=.cache/deploy
wanted=$(sha256sum <.ci/deploy.lock)
if [ "$(cat $folder/.locked 2>/dev/null || :)" != "$wanted" ]; then
    echo "kvstore: installing the libraries of Helm and Kubernetes in $folder"
    rm -rf $folder
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --require-hashes --target $folder -r .ci/deploy.lock
    echo "$wanted" >$folder/.locked
fi
PYTHONPATH=$folder exec .venv/bin/python -m pytest -q -m deploy tests/deploy "$@"
