#!/usr/bin/env bash
# Installs rawmla with what this machine can use into .venv, and runs the tests with the arguments given. Tests that
# need a Hopper GPU are skipped without one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install test
exec .venv/bin/python -m pytest -q "$@"
