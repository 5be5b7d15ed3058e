#!/usr/bin/env bash
# The plug-ins in the real vLLM and SGLang, on a machine without a GPU: their wheels without what these require,
# torch, what importing them misses, then the tests. About 1 GB of downloads. bash scripts/test_engines.sh [FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.venv-engines}

[ -x "$folder/bin/python" ] || python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
# torch by exact version first: a bare requirement would bring another build.
pip torch==2.13.0
pip --no-deps vllm==0.33.0 sglang==0.5.23
pip aiohttp blake3 cachetools cbor2 cloudpickle depyf einops fastapi ijson IPython jsonschema llguidance msgspec \
    openai openai-harmony opentelemetry-api orjson partial-json-parser pillow prometheus_client \
    prometheus-fastapi-instrumentator protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq \
    regex requests sentencepiece setproctitle 'setuptools<81' tiktoken tqdm 'transformers>=5.16.1,<5.21' uvloop \
    watchfiles xgrammar
pip filelock ml_dtypes numpy pytest rich

"$folder/bin/python" -m pytest tests/test_vllm.py tests/test_sglang.py tests/test_engines.py \
    tests/test_recorded_calls.py tests/test_doctor.py
