#!/bin/bash
# Prepares a machine and this checkout: compiler, Python environment .venv, test libraries. Run by make; safe to repeat.
# What it may install it installs (apt packages only as root on a Debian); what it may not, it names.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
apt_updated=
apt_install() {
  can_apt || return 1
  export DEBIAN_FRONTEND=noninteractive
  [ -n "$apt_updated" ] || apt-get update -qq || true
  apt_updated=yes
  say "installing $*"
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

compiles() {  # compiles STDIN with a C++20 compiler
  "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
}

find_python() {
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

echo '#include <concepts>
int main() {}' | compiles || apt_install g++ || true
echo '#include <concepts>
int main() {}' | compiles || fail "no C++20 compiler; install one (Debian: apt-get install g++) or set CXX"

python=$(find_python) || { apt_install python3 python3-venv python3-dev && python=$(find_python); } ||
  fail "no Python 3.10 to 3.13; install one or set PYTHON"

has_pip() { [ -x "$venv/bin/python" ] && { "$venv/bin/python" -m pip --version || "$venv/bin/python" -m ensurepip; } >/dev/null 2>&1; }
if ! has_pip; then
  say "Python environment $venv"
  [ ! -e "$venv" ] || [ -f "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv")" ] || [ "$venv" = .venv ] ||
    fail "VENV=$venv is no Python environment and not empty; name another folder"
  rm -rf "$venv"
  "$python" -m venv "$venv" 2>/dev/null || { apt_install python3-venv && "$python" -m venv "$venv"; } ||
    fail "'$python -m venv' does not work; install it (Debian: apt-get install python3-venv)"
fi
headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] || apt_install python3-dev || true
[ -f "$headers/Python.h" ] || fail "$headers/Python.h is missing (Debian: apt-get install python3-dev)"

say "Python packages"
"$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check -r tools/requirements.txt ||
  fail "pip could not install tools/requirements.txt; is there a network and a package index?"

# Nice to have: without them the rest works.
echo '#include <gtest/gtest.h>' | compiles || apt_install libgtest-dev ||
  say "GoogleTest is missing, so the C++ tests are left out (Debian: apt-get install libgtest-dev)"
compiles_mpi() { command -v mpicxx >/dev/null && echo '#include <mpi.h>' | mpicxx -x c++ -fsyntax-only - 2>/dev/null; }
compiles_mpi || apt_install libopenmpi-dev openmpi-bin ||
  say "MPI is missing, so the transport mpi is left out (Debian: apt-get install libopenmpi-dev openmpi-bin)"
echo '#include <gloo/algorithm.h>' | compiles || apt_install libgloo-dev ||
  say "Gloo's headers are missing, so the transport gloo is left out of C++ (Debian: apt-get install libgloo-dev)"
if [ ! -x "$venv/mpich/bin/mpicxx" ]; then
  { "$python" -m venv "$venv/mpich" && "$venv/mpich/bin/python" -m pip install --quiet --disable-pip-version-check -r tools/requirements-mpi.txt; } 2>/dev/null ||
    say "MPICH could not be installed, so its tests are left out"
fi
# Where systemd runs, the packages would start services: there it is the user's to install them.
type -P slurmctld slurmd srun munged >/dev/null ||
  { [ ! -d /run/systemd/system ] && apt_install slurmctld slurmd slurm-client munge; } ||
  say "Slurm is missing, so its tests are left out (Debian: apt-get install slurmctld slurmd slurm-client munge)"
say "done"
