#!/usr/bin/env bash
# The plug-ins in the real vLLM and SGLang, on a machine without a GPU: their wheels without what these require,
# torch, what importing them misses, then the tests that scripts/test.sh skips without them. About 1 GB of downloads
# the first time.
#
#   bash scripts/test_engines.sh            install what is not there, and test
#   bash scripts/test_engines.sh install    only install
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=.venv-engines

if [[ ! $folder/installed -nt ${BASH_SOURCE[0]} ]]; then
    command -v uv >/dev/null || {
        echo 'error: needs uv, which installs these wheels in a tenth of the time that pip takes: pip install uv' >&2
        exit 1
    }
    [ -x "$folder/bin/python" ] || uv venv --quiet "$folder"
    install() { uv pip install --quiet --python "$folder/bin/python" "$@"; }
    # torch by exact version first: a bare requirement would bring another build.
    install torch==2.13.0
    install aiohttp blake3 cachetools cbor2 cloudpickle depyf einops fastapi ijson IPython jsonschema llguidance msgspec \
        openai openai-harmony opentelemetry-api orjson partial-json-parser pillow prometheus_client \
        prometheus-fastapi-instrumentator protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq \
        regex requests sentencepiece setproctitle 'setuptools<81' tiktoken tqdm 'transformers>=5.16.1,<5.21' uvloop \
        watchfiles xgrammar filelock ml_dtypes numpy pytest rich
    # Last: a later package would be resolved with what the engines miss.
    install --no-deps vllm==0.33.0 sglang==0.5.23
    touch "$folder/installed"
fi
[[ ${1:-} == install ]] || exec "$folder/bin/python" -m pytest -q tests/test_vllm.py tests/test_sglang.py
