#!/usr/bin/env bash
# Installs rawmla with what this machine can use into .venv, and runs the tests with the arguments given. Tests that
# need a Hopper GPU are skipped without one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install test
if has_driver; then
    exec .venv/bin/python -m pytest -q "$@"
fi
# One process a core, and one thread in each: thread pools of processes side by side wait for each other.
# A -n among the arguments counts instead.
export OMP_NUM_THREADS=1
echo "Running the tests that need no GPU: about 4 minutes on two cores." >&2
exec .venv/bin/python -m pytest -q -n auto --dist worksteal "$@"
