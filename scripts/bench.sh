#!/usr/bin/env bash
# Installs rawmla with what this machine can use into .venv, and runs scripts/bench with the arguments given.
# nvidia-ml-py reads power and clock where there is a driver; the emulated device of other machines imports pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install "" nvidia-ml-py pytest
exec .venv/bin/python scripts/bench "$@"
