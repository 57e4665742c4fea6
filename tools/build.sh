#!/bin/bash
# Configures and builds everything in build/release, then installs the Python package into .venv from the same build.
#   tools/build.sh            library, module, tests, examples, benchmarks, package
#   tools/build.sh train      what `make train` needs: library, module, examples, package
#   tools/build.sh sanitize   the torch-free tests under ThreadSanitizer and AddressSanitizer (build/thread, build/address)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
export PATH="$(realpath -m "$venv")/bin:$PATH"
what=${1:-all}

has() { echo "#include <$1>" | "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null && echo ON || echo OFF; }

configure() {  # configure FOLDER OPTIONS...
  local folder=$1
  shift
  cmake -S . -B "$folder" -G Ninja --log-level=ERROR "$@"
}

if [ "$what" = sanitize ]; then
  [ "$(has gtest/gtest.h)" = ON ] || { echo "build: no GoogleTest, so no sanitizer tests"; exit 0; }
  for sanitizer in thread address; do
    configure build/$sanitizer -DUNISONO_TORCH=OFF -DUNISONO_TESTS=ON -DUNISONO_SANITIZE=$sanitizer
    cmake --build build/$sanitizer --target core_tests
  done
  exit 0
fi

python=$(command -v python)
configure build/release -DUNISONO_PYTHON=ON -DUNISONO_EXAMPLES=ON -DUNISONO_BENCH=ON \
  -DUNISONO_TESTS="$(has gtest/gtest.h)" -DPython3_EXECUTABLE="$python" -DCMAKE_INSTALL_LIBDIR=lib \
  -DCMAKE_INSTALL_INCLUDEDIR=include -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')"
if [ "$what" = train ]; then
  cmake --build build/release --target unisono _C examples
else
  cmake --build build/release
fi

# The package, from the same build: installed over itself only when something changed.
package=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/unisono
stamp=build/release/.package-installed
if [ ! -e "$stamp" ] || [ ! -d "$package" ] ||
   [ -n "$(find python include pyproject.toml build/release/libunisono.so build/release/python/unisono cmake -newer "$stamp" \
           -not -path '*/__pycache__*' -type f -print -quit)" ]; then
  python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
    --config-settings build-dir=build/release .
  touch "$stamp"
fi
