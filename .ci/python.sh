# Finds a Python interpreter and makes virtual environments; the other scripts here source it.
#
# A name on PATH proves nothing: a version manager's shim may exist and still refuse to run, so each candidate is
# started once.

# python_is MINIMUM MAXIMUM COMMAND: COMMAND runs and its version lies between both, inclusive ("3 11" style).
python_is() {
    "$3" -c "import sys; sys.exit(not ($1) <= sys.version_info[:2] <= ($2))" >/dev/null 2>&1
}

# find_python: print the path of the interpreter to use, or explain and fail. $PYTHON wins over the search.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if python_is "3, 11" "3, 99" "$PYTHON"; then
            "$PYTHON" -c 'import sys; print(sys.executable)'
            return 0
        fi
        echo "kvstore: PYTHON=$PYTHON is not a Python of version 3.11 or newer" >&2
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if python_is "3, 11" "3, 13" "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    if python_is "3, 14" "3, 99" python3; then
        echo "kvstore: only a Python newer than 3.13 was found; it should work but is not tested" >&2
        python3 -c 'import sys; print(sys.executable)'
        return 0
    fi
    echo "kvstore: Python 3.11 or newer is needed and was not found." >&2
    echo "kvstore: on Debian or Ubuntu: apt-get install python3 python3-venv; or name one: make PYTHON=/path/to/python3.12" >&2
    return 1
}

# make_venv PYTHON FOLDER: an empty virtual environment with pip in it; an old one there is replaced.
# Debian's python3 comes without ensurepip, which `venv` needs to install pip; a pip outside can stand in for it.
make_venv() {
    if "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        "$1" -m venv --clear "$2"
    elif "$1" -c 'import venv, pip' >/dev/null 2>&1 && "$1" -m venv --clear --without-pip "$2" >/dev/null 2>&1 \
        && "$1" -m pip --python "$2/bin/python" install --quiet --disable-pip-version-check --no-input pip; then
        :
    else
        version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        echo "kvstore: $1 cannot make virtual environments: its venv or ensurepip module is missing." >&2
        echo "kvstore: on Debian or Ubuntu: apt-get install python$version-venv (or python3-venv), then run make again" >&2
        return 1
    fi
}

# locked_venv NAME CONTENT: .cache/NAME/venv with all that .ci/NAME.lock pins, each package checked against its hash.
# Sets $venv. Of two scripts at once the second waits until the first ends.
locked_venv() {
    venv=.cache/$1/venv
    mkdir -p ".cache/$1"
    if command -v flock >/dev/null 2>&1; then
        exec 9>".cache/$1.lock"
        flock 9
    fi
    wanted=$(sha256sum <".ci/$1.lock")
    if [ "$(cat "$venv/.locked" 2>/dev/null || :)" != "$wanted" ]; then
        echo "kvstore: installing $2 in $venv"
        python=$(find_python)
        make_venv "$python" "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --require-hashes -r ".ci/$1.lock"
        echo "$wanted" >"$venv/.locked"
    fi
}
