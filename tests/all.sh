#!/bin/sh
# Everything that must hold before a change goes in, in the order of how fast it tells.
set -eu
cd "$(dirname "$0")/.."
bin="${RLFLAME_BIN:-$PWD/.venv/bin}"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
exec "$bin/python" -m pytest -n auto --dist worksteal "$@"
