# Sourced by bench.sh and test.sh, which share .venv: both install what this machine's driver can use.
#
#   install EXTRA [PACKAGE ...]   makes .venv in the repository if there is none, and installs rawmla with the
#                                 extra named, CUDA libraries for the driver, and torch where there is a driver
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cuda_extras() {
    local driver
    if ! driver=$(nvidia-smi 2>/dev/null); then
        echo cu12 # no driver: kernels are compiled and not run, by the CUDA with the smaller download
    elif [[ $driver =~ CUDA[A-Za-z\ ]*Version:\ *1[3-9] ]]; then
        echo cu13,torch
    else
        echo cu12,torch
    fi
}

install() {
    local extras
    extras=$(cuda_extras),$1
    shift
    local size="about 300 MB, a minute or two"
    [[ $extras == *torch* ]] && size="with PyTorch about 4 GB, some minutes"
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python3 -m venv --clear .venv || {
            echo "error: python3 cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
            return 1
        }
    fi
    local other=cupy-cuda13x
    [[ $extras == cu13* ]] && other=cupy-cuda12x
    if .venv/bin/python -m pip show --quiet "$other" 2>/dev/null; then
        echo "error: .venv has $other, which is for another driver than this machine's: rm -rf .venv, then again" >&2
        return 1
    fi
    echo "Installing rawmla[$extras] $* into .venv. The first time it downloads $size; later it takes seconds." >&2
    .venv/bin/python -m pip install --disable-pip-version-check --editable ".[$extras]" "$@" >&2
}
