#!/bin/sh
# Everything that must hold before a change goes in, in the order of how fast it tells.
set -eu
cd "$(dirname "$0")/.."
bin="${RLFLAME_BIN:-$PWD/.venv/bin}"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
# Many tests wait for other processes, so a small machine runs two tests per core.
cores=$(getconf _NPROCESSORS_ONLN)
exec "$bin/python" -m pytest -n "$((cores < 8 ? 2 * cores : cores))" --dist worksteal "$@"
