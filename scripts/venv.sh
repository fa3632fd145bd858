#!/bin/sh
# Makes a virtual environment with this package in it, or brings one up to date.
#
#   scripts/venv.sh FOLDER PIP-ARGUMENT...     e.g.  scripts/venv.sh .venv -c constraints.txt -e '.[dev]'
#
# The Python is $PYTHON if that is set, else the first that is at least 3.12 on PATH, then among
# pyenv's versions. An installation that was interrupted is done anew.
set -eu

folder=$1
shift

# At least 3.12, with what a virtual environment needs, and with the GIL: the wheels expect one.
suits() {
    "$1" -c '
import sys, sysconfig
assert sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
import ensurepip, ssl, venv
' >/dev/null 2>&1
}

candidates() {
    # The versions that the pinned packages are tested with come first.
    for name in python3.12 python3.13 python3.14 python3 python; do
        command -v "$name" || true
    done
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [ -d "$root/versions" ] || continue
        for minor in 12 13 14 '1[5-9]' '[2-9][0-9]'; do
            find "$root/versions" -maxdepth 1 -name "3.$minor.*" | sort -rV | sed 's|$|/bin/python|'
        done
    done
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if ! suits "$PYTHON"; then
            echo "error: PYTHON=$PYTHON is not a Python >= 3.12 that can make a virtual environment" >&2
            return 1
        fi
        command -v "$PYTHON"
        return
    fi
    candidates | {
        while IFS= read -r candidate; do
            if suits "$candidate"; then
                echo "$candidate"
                return
            fi
        done
        echo "error: no Python >= 3.12 (with venv and pip) on PATH or among pyenv's versions;" \
            "install one or name it: make PYTHON=/path/to/python3.12" >&2
        return 1
    }
}

unfinished=$folder/.unfinished
if [ -e "$unfinished" ] || ! suits "$folder/bin/python" ||
    ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "making $folder with $("$python" --version) ($python)" >&2
    "$python" -m venv --clear "$folder"
fi

: >"$unfinished"
echo "installing into $folder" >&2
if ! "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; then
    echo "error: the installation into $folder failed (see above); run the command again once" \
        "the package index can be reached" >&2
    exit 1
fi
rm -f "$unfinished"
