# Sourced by bench.sh and test.sh, which share .venv: both install what this machine can use.
#
#   has_driver                    whether there is an NVIDIA driver
#   install EXTRA [PACKAGE ...]   makes .venv in the repository if there is none, and installs rawmla with CUDA
#                                 libraries for the driver, torch, and the extra named unless it is empty
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Else each of some hundred processes compiles the modules that it imports.
unset PYTHONDONTWRITEBYTECODE

has_driver() { nvidia-smi >/dev/null 2>&1; }

cuda_extra() {
    if has_driver && ! [[ $(nvidia-smi) =~ CUDA[A-Za-z\ ]*Version:\ *1[3-9] ]]; then
        echo cu12
    else
        echo cu13 # also without a driver: kernels are compiled then, and torch of this release needs CUDA 13
    fi
}

install() {
    local cuda extras packages size="about 4 GB, some minutes"
    cuda=$(cuda_extra)
    extras=$cuda,torch${1:+,$1}
    packages=("${@:2}")
    if ! has_driver; then
        # A build for CPUs is enough. pip takes one where it finds it, and only of the release that is named.
        packages+=(torch==2.13.0)
        size="about 4 GB, or 500 MB if pip's index has a build of PyTorch for CPUs"
    fi
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python3 -m venv --clear .venv || {
            echo "error: python3 cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
            return 1
        }
    fi
    local other=cupy-cuda13x
    [[ $cuda == cu13 ]] && other=cupy-cuda12x
    if .venv/bin/python -m pip show --quiet "$other" 2>/dev/null; then
        echo "error: .venv has $other, and this machine needs the extra $cuda: rm -rf .venv, then again" >&2
        return 1
    fi
    echo "Installing rawmla[$extras] ${packages[*]} into .venv. The first time it downloads $size; later it takes seconds." >&2
    # Python compiles what is imported; pip would compile all of torch, which takes longer.
    .venv/bin/python -m pip install --no-compile --disable-pip-version-check --editable ".[$extras]" \
        "${packages[@]}" >&2
}
