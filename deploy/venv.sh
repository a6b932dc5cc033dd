#!/usr/bin/env bash
# Make or renew a virtual environment and install this project into it, editable.   venv.sh VENV REQUIREMENT
set -euo pipefail
venv=$1 requirement=$2

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.12 python3.11 python3; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
    echo "pdserve needs Python 3.11 or 3.12; none of python3.12, python3.11, python3 is one (name another with PYTHON=...)" >&2
    exit 2
}

make_venv() {
    local python=$1 package
    "$python" -m venv "$venv" >/dev/null 2>&1 && return
    package=$("$python" -c 'import sys; print("python{}.{}-venv".format(*sys.version_info))')
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "$python cannot make a virtual environment: apt-get install $package" >&2
        exit 2
    fi
    echo "installing $package with apt-get"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null
    "$python" -m venv --clear "$venv"
}

if ! usable "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    make_venv "$(find_python)"
fi
# pip without its thousand lines, but with a sign of life: quiet twice hides warnings too, errors stay.
echo "installing $requirement into $venv ($("$venv/bin/python" --version)); the first time takes minutes"
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable "$requirement" &
pip=$!
trap 'kill $pip 2>/dev/null; exit 130' INT TERM
started_s=$SECONDS due_s=15
while sleep 1; kill -0 $pip 2>/dev/null; do
    took_s=$((SECONDS - started_s))
    if ((took_s >= due_s)); then
        echo "  ${took_s} s, $(du -sm "$venv" | cut -f1) MB installed"
        due_s=$((took_s + 15))
    fi
done
wait $pip
