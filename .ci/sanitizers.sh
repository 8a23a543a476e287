#!/bin/sh
# Tests the native library built with the address and undefined behaviour sanitizers: sanitizers.sh [PYTEST ARGUMENTS]
#
# In a copy of the checkout, so that .venv keeps its own library. Leaks are not looked for: Python keeps memory to its end.
set -eu
cd "$(dirname "$0")/.."

bin=$PWD/.venv/bin copy=.cache/sanitizers
rm -rf $copy
mkdir -p $copy
git ls-files -z --cached --others --exclude-standard | tar --null --files-from - --ignore-failed-read -cf - | tar -xf - -C $copy
cd $copy
gcc -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
    -std=gnu11 -fPIC -shared -fvisibility=hidden -ffp-contract=off \
    -o kvstore/native/libkvstore.so kvstore/native/*.c
[ $# -gt 0 ] || set -- tests/native tests/root tests/node tests/test_smoke.py
export PYTHONPATH=.:gc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
LD_PRELOAD=$(gcc -print-file-name=libasan.so) exec "$bin/python" -m pytest -q -n 2 --dist loadfile "$@"
