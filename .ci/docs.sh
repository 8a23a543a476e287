#!/bin/sh
# Builds the site of the documents in .cache/docs/site:  .ci/docs.sh [mkdocs' arguments]
#
# mkdocs, its theme and the reader of docstrings are pinned in .ci/docs.lock and live in an environment of their own
# under .cache: no test and nothing that users install needs them.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

locked_venv docs "mkdocs"
.venv/bin/python .ci/commands.py
.venv/bin/python .ci/api.py
.venv/bin/python .ci/stage_docs.py .cache/docs/pages
# The theme warns of its end of life in May 2027 at each build.
NO_MKDOCS_2_WARNING=1 $venv/bin/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.yml "$@"
echo "kvstore: the site is in .cache/docs/site: open .cache/docs/site/index.html"
