#!/usr/bin/env bash
# SGLang for a GPU machine without a network: a folder for PYTHONPATH, small enough to be carried there.
#
#   bash scripts/engines/sglang_site.sh FOLDER     make FOLDER/site and FOLDER/site-sglang.tar.xz
#
# Needs python3 with pip, GNU tar, xz and fallocate, two minutes on two cores and 2 GB of disk.
#
# It is for Python 3.12 on x86-64 Linux with torch 2.11 for CUDA 13, transformers 5.17 and one H200, and
# for models of text in bfloat16, without quantization, on one GPU. That machine needs nvcc, ninja and c++ on
# its PATH, because SGLang and DeepGEMM compile some kernels at their first call. There:
#
#   mkdir site && tar -xJf site-sglang.tar.xz -C site
#   export PYTHONPATH=$PWD/site SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_ENABLE_JIT_DEEPGEMM=0
#
# What is left out:
#   - of FlashAttention 3, all but bfloat16 with heads of 64, 128, 256, 192/128, 64/256 and 64/512, without
#     softcap; of the other libraries, the code for other architectures;
#   - servers in Rust, diffusion models, tests, FlashInfer and CuTe DSL;
#   - packages that such runs import and do not call: see stubs below.
# So set sampling_backend="pytorch" and grammar_backend="none"; and because the backend flashmla uses
# FlashInfer to prefill, ask for prefill_attention_backend="fa3", decode_attention_backend="flashmla".
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [ $# -ne 1 ]; then
    echo 'usage: bash scripts/engines/sglang_site.sh FOLDER' >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
site=$folder/site

packages=(
    sglang==0.5.17 sglang-kernel==0.4.5 apache-tvm-ffi==0.1.11 sgl-deep-gemm==0.1.5.post1
    annotated-doc==0.0.7 annotated-types==0.8.0 compressed-tensors==0.20.1 dill==0.4.1 fastapi==0.136.3
    gguf==0.19.0 interegular==0.3.3 loguru==0.7.3 msgspec==0.23.0 orjson==3.13.0
    partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.4 pydantic-core==2.50.5
    python-multipart==0.0.34 pyzmq==27.3.0 setproctitle==1.3.8 starlette==1.10.0
    typing-inspection==0.4.5 uvicorn==0.54.0
)

# Imported, but not called: modules that have every name, each of which is an empty class.
transcription=conversation_item_input_audio_transcription
session=realtime_transcription_session
message=realtime_conversation_item_user_message
stubs=(
    IPython/display jsonschema soundfile xgrammar/structural_tag
    flashinfer/{prefill,sampling}
    openai/types/responses/response
    openai/types/realtime/{audio_transcription,realtime_audio_formats,realtime_error}
    openai/types/realtime/{"$message","$transcription"_{completed,delta,failed}_event}
    openai/types/realtime/"$session"_{audio,audio_input,create_request}
)

# Kernels of FlashAttention 3 by a part of their names, which is after the size of a head of K:
# size of a head of V, type, architecture, causal or not, window or not, no softcap.
attention='Li(64|128|256|512)EN\w{1,9}10bfloat16_tEfN\w{1,9}Sm90E(Lb[01]E){2}Lb0E'
attention+='|prepare_varlen_num_blocks|FlashAttnFwdCombine'

rm -rf "$site"
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile \
    --target "$site" --only-binary=:all: --implementation cp --python-version 3.12 \
    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 \
    "${packages[@]}"

cd "$site"
rm -rf bin tools sgl_kernel/{sm100,testing} sgl_kernel/infllm_ops.* tvm_ffi/testing \
    sglang/{benchmark,multimodal_gen,test} sglang/srt/{grpc,multimodal,server}/_core.*.so
python3 "$here/thin.py" sgl_kernel/flash_ops.abi3.so "$attention"
for library in sgl_kernel/{flashmla_ops,spatial_ops,sm90/common_ops}.abi3.so; do
    python3 "$here/thin.py" "$library"
done

for stub in "${stubs[@]}"; do
    mkdir -p "$stub"
    while [ "$stub" != . ]; do
        cat >"$stub/__init__.py" <<'EOF'
"""Stands in for a package that these runs import and do not call."""


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    schema = classmethod(lambda *_: {"type": "any"})  # fields of pydantic models have such types
    return type(name, (), {"__init__": lambda *_, **__: None, "__get_pydantic_core_schema__": schema})
EOF
        stub=$(dirname "$stub")
    done
done

# change FILE OLD NEW: a change of SGLang, which must be found.
change() {
    grep -q "$2" "$1" || { echo "error: $1 is not as expected: no $2" >&2; exit 1; }
    sed -i "s/$2/$3/" "$1"
}
# transformers 5.17 knows these models already.
change sglang/srt/configs/qwen3_asr.py '^\(AutoConfig.register(.*\))$' '\1, exist_ok=True)'
change sglang/srt/configs/unlimited_ocr.py '^\( *AutoConfig.register(.*\))$' '\1, exist_ok=True)'
# The backend flashmla makes FlashInfer's wrappers also when it is not to prefill: let it have the stubs.
change sglang/srt/layers/attention/flashinfer_mla_backend.py '^if is_flashinfer_available():' 'if True:'

# A gigabyte of zeros need not be written where this is unpacked.
fallocate --dig-holes sgl_kernel/flash_ops.abi3.so
tar --sparse --sort=name --owner=0 --group=0 --numeric-owner -C "$site" -c . |
    xz -T2 -9 >"$folder/site-sglang.tar.xz"
ls -l "$folder/site-sglang.tar.xz"
