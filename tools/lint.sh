#!/bin/bash
# Formatting and style; the same by hand and in CI. `tools/lint.sh --fix` mends what can be mended.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
status=0
mapfile -t cpp < <(git ls-files --cached --others --exclude-standard '*.cc' '*.h')
if [ "${1:-}" = --fix ]; then
  "$bin/clang-format" -i "${cpp[@]}" || status=1
  "$bin/ruff" check --quiet --fix . || status=1
else
  "$bin/clang-format" --dry-run --Werror "${cpp[@]}" || status=1
  "$bin/ruff" check --quiet . || status=1
fi
[ -f tools/check_layers.py ] && { "$bin/python" tools/check_layers.py || status=1; }
exit $status
