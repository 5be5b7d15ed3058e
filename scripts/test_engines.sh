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
    [ -x "$folder/bin/python" ] || python3 -m venv "$folder"
    pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
    # torch by exact version first: a bare requirement would bring another build.
    pip torch==2.13.0
    pip aiohttp blake3 cachetools cbor2 cloudpickle depyf einops fastapi ijson IPython jsonschema llguidance msgspec \
        openai openai-harmony opentelemetry-api orjson partial-json-parser pillow prometheus_client \
        prometheus-fastapi-instrumentator protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq \
        regex requests sentencepiece setproctitle 'setuptools<81' tiktoken tqdm 'transformers>=5.16.1,<5.21' uvloop \
        watchfiles xgrammar filelock ml_dtypes numpy pytest rich
    # Last: pip would say at each later package what the engines miss.
    pip --no-deps vllm==0.33.0 sglang==0.5.23
    touch "$folder/installed"
fi
[[ ${1:-} == install ]] || exec "$folder/bin/python" -m pytest -q tests/test_vllm.py tests/test_sglang.py
