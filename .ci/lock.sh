#!/bin/sh
# Writes requirements.lock and .ci/docs.lock from pyproject.toml, the other locks of .ci from what is below.
#
# One lock for Python 3.11 to 3.13, with hashes and without the address of any package index, so that each installs
# from whichever index its pip is set up for. Needs .venv only for a Python; the resolver is pinned under .cache.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

venv=.cache/lock-venv
if [ ! -x $venv/bin/uv ]; then
    mkdir -p .cache
    python=$(find_python)
    make_venv "$python" $venv
    $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input 'uv>=0.8'
fi
compile() {
    $venv/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --fork-strategy fewest \
        --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
        --custom-compile-command 'make lock' "$@"
}
# shellcheck disable=SC2086  # LOCK_FLAGS is a list of flags, such as --upgrade
compile ${LOCK_FLAGS:-} --all-extras --group dev --group bench --output-file requirements.lock pyproject.toml
compile --group docs --output-file .ci/docs.lock
printf '%s\n' 'grpcio-tools==1.72.1' 'grpcio==1.72.1' 'protobuf==6.30.0' >.cache/proto.in
compile --output-file .ci/proto.lock .cache/proto.in
printf '%s\n' 'helm-python-sdk>=0.2' 'kubernetes-validate>=1.31' 'pyyaml>=6' >.cache/deploy.in
compile --output-file .ci/deploy.lock .cache/deploy.in
echo 'coverage>=7.10' >.cache/coverage.in
compile --output-file .ci/coverage.lock .cache/coverage.in
echo "kvstore: wrote requirements.lock and the locks of .ci"
