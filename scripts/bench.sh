#!/usr/bin/env bash
# Makes .venv in the repository, installs rawmla with what this machine can use, and runs scripts/bench.py with the
# arguments given. PyTorch, which the timing needs, and nvidia-ml-py, which reads power and clock, are installed only
# where an NVIDIA driver answers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=cu12
tools=()
if driver=$(nvidia-smi 2>/dev/null); then
    case "$driver" in
    *"CUDA Version: 13."*) extras=cu13,torch ;;
    *) extras=cu12,torch ;;
    esac
    tools=(nvidia-ml-py)
fi
python3 -m venv .venv
.venv/bin/python -m pip install --quiet --editable ".[$extras,plot]" "${tools[@]}"
exec .venv/bin/python scripts/bench.py "$@"
