#!/bin/sh
# Builds the site of the documents in .cache/docs/site:  .ci/docs.sh [mkdocs' arguments]
#
# mkdocs, its theme and the reader of docstrings are pinned in .ci/docs.lock and live in an environment of their own
# under .cache: no test and nothing that users install needs them.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

venv=.cache/docs/venv
mkdir -p .cache/docs
if command -v flock >/dev/null 2>&1; then
    exec 9>.cache/docs.lock
    flock 9
fi
wanted=$(sha256sum <.ci/docs.lock)
if [ "$(cat $venv/.locked 2>/dev/null || :)" != "$wanted" ]; then
    echo "kvstore: installing mkdocs in $venv"
    python=$(find_python)
    make_venv "$python" $venv
    $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --require-hashes -r .ci/docs.lock
    echo "$wanted" >$venv/.locked
fi
.venv/bin/python .ci/commands.py
.venv/bin/python .ci/stage_docs.py .cache/docs/pages
# The theme warns of its end of life in May 2027 at each build.
NO_MKDOCS_2_WARNING=1 $venv/bin/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.yml "$@"
echo "kvstore: the site is in .cache/docs/site: open .cache/docs/site/index.html"
