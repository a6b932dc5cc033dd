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

# As root on a Debian-like system, install; else say what to install, and why.   apt_install REASON PACKAGE...
apt_install() {
    local reason=$1
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "$reason: apt-get install $*" >&2
        exit 2
    fi
    echo "installing $* with apt-get"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

make_venv() {
    local python=$1
    "$python" -m venv "$venv" >/dev/null 2>&1 && return
    apt_install "$python cannot make a virtual environment" "$("$python" -c 'import sys; print("python{}.{}-venv".format(*sys.version_info))')"
    "$python" -m venv --clear "$venv"
}

# The tests run the transfer backend mooncake, whose wheel links to libraries that it does not bring.
need_mooncake_libraries() {
    "$venv/bin/python" -c 'import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]' \
        libibverbs.so.1 librdmacm.so.1 libnuma.so.1 libcurl.so.4 2>/dev/null && return
    apt_install "the tests of the transfer backend mooncake need system libraries" libibverbs1 librdmacm1 libnuma1 libcurl4
}

if ! usable "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    make_venv "$(find_python)"
fi
case $requirement in *'[test]'*) need_mooncake_libraries ;; esac
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
