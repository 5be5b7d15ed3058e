#!/usr/bin/env bash
# The plug-ins in the Python of real vLLM and SGLang versions, on a machine without a GPU: one environment with torch
# and what importing them misses, the Python files of each version's wheel in a folder, and the tests that
# scripts/test.sh skips without them. About 4 GB of downloads the first time, most of which is not kept.
#
#   bash scripts/test_engines.sh                            test every version that the plug-ins name as tested
#   bash scripts/test_engines.sh vllm==0.33.0 ...           test these
#   bash scripts/test_engines.sh install [vllm==0.33.0 ...] only install what is not there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=.venv-engines
python=$folder/bin/python

if [[ ! $folder/installed -nt ${BASH_SOURCE[0]} ]]; then
    command -v uv >/dev/null || {
        echo 'error: needs uv, which installs these wheels in a tenth of the time that pip takes: pip install uv' >&2
        exit 1
    }
    [ -x "$python" ] || uv venv --quiet "$folder"
    install() { uv pip install --quiet --python "$python" "$@"; }
    # torch by exact version first: a bare requirement would bring another build.
    install torch==2.13.0
    install aiohttp blake3 cachetools cbor2 cloudpickle depyf einops fastapi gguf ijson IPython jsonschema llguidance \
        msgspec openai openai-harmony opentelemetry-api orjson partial-json-parser pillow pip prometheus_client \
        prometheus-fastapi-instrumentator protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq \
        regex requests sentencepiece setproctitle 'setuptools<81' tiktoken tqdm 'transformers>=5.16.1,<5.21' uvloop \
        watchfiles xgrammar filelock ml_dtypes numpy pytest rich 'cupy-cuda13x>=14' 'cuda-bindings>=13,<14'
    touch "$folder/installed"
fi

# unpack REQUIREMENT FOLDER: the Python files and the metadata of a wheel, whatever machine it is for.
unpack() {
    local wheels
    wheels=$(mktemp -d)
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest "$wheels" \
        --platform manylinux_2_35_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any "$1"
    "$python" - "$wheels"/*.whl "$2" <<'EOF'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name])
EOF
    rm -r "$wheels"
}

only_install=no
[[ ${1:-} == install ]] && only_install=yes && shift
versions=("$@")
if [[ ${#versions[@]} == 0 ]]; then
    mapfile -t versions < <("$python" -c '
from rawmla.engines import sglang, vllm
for engine in (vllm.ENGINE, sglang.ENGINE):
    print(*(f"{engine.distribution}=={version}" for version in engine.tested), sep="\n")')
fi
for version in "${versions[@]}"; do
    place=$folder/${version/==//}
    if [[ ! -e $place ]]; then
        rm -rf "$place.part"
        unpack "$version" "$place.part"
        # SGLang calls the kernels' package of one version.
        kernels=$(sed -n 's/^Requires-Dist: \(sglang-kernel==[^ ;]*\).*/\1/p' "$place.part"/*.dist-info/METADATA)
        [[ -z $kernels ]] || unpack "$kernels" "$place.part"
        mv "$place.part" "$place"
    fi
    if [[ $only_install == no ]]; then
        echo "$version"
        PYTHONPATH=$PWD/$place "$python" -m pytest -q "tests/test_${version%%==*}.py"
    fi
done
