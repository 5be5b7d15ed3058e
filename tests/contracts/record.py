"""Record what an engine passes to FlashMLA: python tests/contracts/record.py ENGINE [--sources DIR]

ENGINE is vllm, sglang, or vllm-backend (rawmla's own attention backends in vLLM). Needs the engine's Python
and torch, but no GPU and no compiled extension. The engine's own code is driven on the CPU with small
metadata, and FlashMLA's functions are replaced by ones that write down shape, dtype, strides and storage
offset of every tensor, and every other argument. tests/gpu/test_engine_contracts.py repeats the calls on a
GPU with exactly those views. The files are tests/contracts/ENGINE.json, which hold every call once and, for
each version, the numbers of its calls; docs/engines.md says more.

vLLM is imported: what it would load from CUDA extensions is replaced by empty modules, and the platform says
that the GPU is an H200. Kernels around attention (index conversion, gathering) are replaced by functions
whose results have the same shapes. Of SGLang (--sources: its unpacked wheel) the interface module is
imported, and the methods that call it are compiled alone from their files, since the modules around them need
a GPU build.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from rawmla.engines import sglang, source

CONTRACTS = Path(__file__).resolve().parent
PAGE = 64
TOPK = 2048


# ---- recording


class Plan:
    """Stands for FlashMLASchedMeta: empty, or with the arrays that an engine put into it."""

    def __init__(self, tile_scheduler_metadata: Any = None, num_splits: Any = None) -> None:
        self.have_initialized = False
        self.config = None
        self.tile_scheduler_metadata = tile_scheduler_metadata
        self.num_splits = num_splits


class Recorder:
    """The calls of one engine, as they go into the file."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._place = {"site": "", "case": "", "source": ""}

    def at(self, site: str, case: str, source: str = "recorded") -> None:
        """The next calls come from this file and function of the engine, in this situation.

        `source` is "recorded" when that function was run, "read" when its lines were written again here.
        """
        self._place = {"site": site, "case": case, "source": source}

    def function(self, name: str, parameters: Iterable[str] | None, answer: Callable[..., Any]) -> Any:
        """A function of FlashMLA that records its arguments by the names of its parameters, then answers.
        Without names, as Python hands them over: `args` and `kwargs`.
        """
        names = None if parameters is None else tuple(parameters)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if names is None:
                arguments = {key: one for key, one in (("args", args), ("kwargs", kwargs)) if one}
            else:
                given = dict(zip(names[: len(args)], args, strict=True)) | kwargs
                assert given.keys() <= set(names), f"{name}: other parameters than {names}: {list(given)}"
                arguments = {key: given[key] for key in names if key in given}
            call: dict[str, Any] = {**self._place, "function": name, "positional": len(args)}
            call["arguments"] = {key: describe(value) for key, value in arguments.items()}
            self.calls.append(call)
            return answer(arguments)

        return recorded


def describe(value: Any) -> Any:
    """An argument as JSON: a tensor as its view, a plan as what it holds, anything else as itself."""
    if isinstance(value, torch.Tensor):
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "strides": list(value.stride()),
            "offset": value.storage_offset(),
            "elements": value.untyped_storage().nbytes() // value.element_size(),
        }
    if isinstance(value, Plan):
        filled = value.tile_scheduler_metadata is not None
        return {"plan": "filled by the engine" if filled else "empty"}
    if isinstance(value, (tuple, list)):
        return [describe(one) for one in value]
    if isinstance(value, dict):
        return {key: describe(one) for key, one in value.items()}
    return value


def results_of(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Results of the right shapes: of decoding out and lse, of sparse prefill out, max_logits and lse."""
    q, out = arguments["q"], arguments.get("out")
    *tokens, h_q, _ = (q[0] if isinstance(q, tuple) else q).shape
    if out is None:
        out = torch.zeros(*tokens, h_q, 512, dtype=torch.bfloat16)
    if len(tokens) == 2:
        b, s_q = tokens
        return out, torch.zeros(b, h_q, s_q)
    return out, torch.zeros(*tokens, h_q), torch.zeros(*tokens, h_q)


def stub_module(name: str, **names: Any) -> ModuleType:
    """An importable module; a name that it was not given is a function that does nothing."""

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *args, **kwargs: None

    module = ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    vars(module).update(names, __getattr__=missing)
    sys.modules[name] = module
    return module


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """An array of a call. Only its view is recorded; tests/vllm_probe.py puts random numbers into it."""
    return torch.zeros(shape, dtype=dtype)


def int32(*shape: int) -> torch.Tensor:
    """What an engine's kernel would have written."""
    return numbers(*shape, dtype=torch.int32)


def paged(num_blocks: int, page: int, row: int, dtype: torch.dtype, block_stride: int | None = None) -> Any:
    """A cache `[num_blocks, page, row]`; `block_stride` in elements, when other pages lie between blocks."""
    stride = page * row if block_stride is None else block_stride
    return numbers(num_blocks, stride, dtype=dtype)[:, : page * row].view(num_blocks, page, row)


def call(function: Callable[..., Any], /, **values: Any) -> Any:
    """Call an engine's function with the values that this version takes; the others are left out."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})


def first_module(*names: str) -> Any:
    """The first of these modules that this version of vLLM has; None: it has none of them."""
    return next((importlib.import_module(name) for name in names if source.file_of(name)), None)


def file_of(kind: type) -> str:
    """The file of a class, from its package on."""
    return kind.__module__.replace(".", "/") + ".py"


# ---- parameters of FlashMLA's functions in the engines

COMMON_DECODE = (
    "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
    "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length"
)
VLLM_DECODE = f"{COMMON_DECODE} out enable_batch_invariant".split()
VLLM_PREFILL = "q kv indices sm_scale d_v attn_sink topk_length out".split()
SGLANG_DECODE = f"{COMMON_DECODE} enable_batch_invariant use_legacy kv_format descale_q descale_k".split()
SGLANG_PREFILL = "q kv indices sm_scale d_v attn_sink topk_length use_legacy return_log2_lse".split()
SGLANG_PLAN = "seqlens_k num_q_tokens_per_head_k h_k h_q is_fp8_kvcache topk use_legacy".split()


# ---- vLLM


def vllm_without_gpu(flash_attn: str = "vllm.vllm_flash_attn") -> Any:
    """Make vLLM importable on a CPU, as if its GPU was an H200; returns its FlashMLA module.

    `flash_attn` is the module that is empty instead of loading FlashAttention's extension.
    """
    for extension in ("_C", "_C_stable_libtorch"):
        stub_module(f"vllm.{extension}")
    stub_module(flash_attn)
    import vllm._custom_ops
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

    vllm.platforms._current_platform = Hopper()
    vars(torch.ops)["_C"] = stub_module("torch.ops._C")
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.accelerator.empty_cache = lambda: None  # which vLLM's workspace calls when it grows
    init_workspace_manager(torch.device("cpu"))
    import vllm.v1.attention.ops.flashmla as interface

    return interface


def record_vllm() -> Recorder:
    """Drive vLLM's attention layers."""
    interface = vllm_without_gpu()
    recorder = Recorder()
    interface.FlashMLASchedMeta = Plan
    interface.get_mla_metadata = recorder.function("get_mla_metadata", None, lambda arguments: (Plan(), None))
    for name, parameters in (("flash_mla_with_kvcache", VLLM_DECODE), ("flash_mla_sparse_fwd", VLLM_PREFILL)):
        setattr(interface, name, recorder.function(name, parameters, results_of))
    from vllm.v1.attention.backends.mla import flashmla, flashmla_sparse

    for name, case in DENSE_CASES.items():
        vllm_dense(recorder, flashmla.FlashMLAImpl, name, *case)
    for name, sparse_case in (sparse_cases() | ({} if first_module(HY_V4) is None else HY_V4_CASES)).items():
        vllm_sparse(recorder, flashmla_sparse.FlashMLASparseImpl, name, *sparse_case)
    vllm_v4(recorder)
    return recorder


def record_vllm_backend() -> Recorder:
    """Drive rawmla's attention backends in vLLM: the calls are those of rawmla's own functions."""
    interface = vllm_without_gpu()
    interface.get_mla_metadata = lambda *args, **kwargs: (Plan(), None)
    import rawmla

    recorder = Recorder()
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        parameters = inspect.signature(getattr(rawmla, name)).parameters
        setattr(rawmla, name, recorder.function(name, parameters, results_of))
    from rawmla.engines import vllm_backend

    for name, case in DENSE_CASES.items():
        vllm_dense(recorder, vllm_backend.RawMLAImpl, name, *case)
    for name, sparse_case in sparse_cases().items():
        vllm_sparse(recorder, vllm_backend.RawMLASparseImpl, name, *sparse_case)
    return recorder


DENSE_CASES: dict[str, tuple[Any, ...]] = {
    # name: (requests, tokens of each, heads, ranks to gather from, blocks apart, dtype)
    "decode, 128 heads": (4, 1, 128, 1, False, torch.bfloat16),
    "decode, 16 heads, float16": (3, 1, 16, 1, False, torch.float16),
    "two tokens a request (MTP), 16 heads": (4, 2, 16, 1, False, torch.bfloat16),
    "short prefills decoded, 17 tokens a request": (2, 17, 16, 1, False, torch.bfloat16),
    "hybrid model, pages of other layers between blocks": (3, 1, 32, 1, True, torch.bfloat16),
    "context parallelism, heads of 4 ranks": (3, 1, 32, 4, False, torch.bfloat16),
}
SPARSE_CASES: dict[str, tuple[Any, ...]] = {
    # name: (heads, decodes, tokens of each, prefill tokens, cache)
    "FP8 cache, 16 heads, whole batch as one request": (16, 5, 1, 7, "fp8_ds_mla"),
    "FP8 cache, 16 heads, decode only": (16, 6, 1, 0, "fp8_ds_mla"),
    "FP8 cache, 128 heads, decode": (128, 3, 1, 0, "fp8_ds_mla"),
    "FP8 cache, 64 heads, two tokens a request (MTP)": (64, 3, 2, 0, "fp8_ds_mla"),
    "FP8 cache, 32 heads, decode and prefill": (32, 2, 1, 9, "fp8_ds_mla"),
    "bf16 cache, 16 heads": (16, 4, 1, 5, "auto"),
    "bf16 cache, 128 heads": (128, 4, 1, 0, "auto"),
    "bf16 cache, pages of other layers between blocks": (64, 4, 1, 0, "hybrid"),
}
HY_V4 = "vllm.models.hy_v4.nvidia.flashmla_sparse"
HY_V4_CASES = {
    "HY-V4, FP8 cache, 16 heads, sinks": (16, 3, 1, 2, "fp8_ds_mla"),
    "HY-V4, bf16 cache, 16 heads, sinks": (16, 3, 1, 2, "auto"),
}


def sparse_cases() -> dict[str, tuple[Any, ...]]:
    """Cases of sparse models that this version has: before 0.29 it took no bf16 cache with gaps."""
    from vllm.v1.attention.backends.mla import flashmla_sparse

    gaps = hasattr(flashmla_sparse, "flat_kv_row_view")
    return {name: case for name, case in SPARSE_CASES.items() if gaps or case[-1] != "hybrid"}


def vllm_dense(
    recorder: Recorder,
    impl_class: Any,
    name: str,
    b: int,
    s_q: int,
    heads: int,
    ranks: int,
    padded: bool,
    dtype: torch.dtype,
    rope: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FlashMLAMetadataBuilder._build_decode and forward_mqa of an implementation; returns out and lse."""
    from vllm.v1.attention.backends.mla import flashmla

    builder = object.__new__(flashmla.FlashMLAMetadataBuilder)
    builder.num_q_heads, builder.dcp_world_size, builder.is_fp8_kvcache = heads, ranks, False
    starts = torch.arange(b + 1, dtype=torch.int32) * s_q
    recorder.at("vllm/v1/attention/backends/mla/flashmla.py FlashMLAMetadataBuilder._build_decode", name)
    table = int32(32, 16)[:b]
    decode = call(
        builder._build_decode, block_table_tensor=table, seq_lens_device=int32(32)[:b], max_seq_len=1024,
        query_start_loc_cpu=starts, query_start_loc_device=starts, num_decode_tokens=b * s_q,
        max_query_len=s_q, dcp_tot_seq_lens_device=None,
    )  # fmt: skip
    impl = object.__new__(impl_class)
    impl.kv_cache_dtype, impl.kv_lora_rank, impl.scale = "auto", 512, 0.1147
    impl.need_to_return_lse_for_decode = ranks > 1
    parts = [numbers(b * s_q, heads * ranks, d, dtype=dtype) for d in (512, 192)]
    query = parts[0], parts[1][..., 192 - rope :]
    row = 512 + rope
    cache = paged(40, PAGE, row, dtype, PAGE * row + 4096 if padded else None)
    recorder.at(f"{file_of(impl_class)} {impl_class.__name__}.forward_mqa", name)
    batch = SimpleNamespace(decode=decode, num_decodes=b)
    out, lse = impl.forward_mqa(query if ranks == 1 else torch.cat(query, -1), cache, batch, None)
    return out, lse.reshape(out.shape[:2]) if ranks > 1 else None


def vllm_sparse(
    recorder: Recorder,
    impl_class: Any,
    name: str,
    heads: int,
    decodes: int,
    s_q: int,
    prefill: int,
    kind: str,
    rope: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """forward_mqa of an implementation, or of HY-V4's with sinks; returns out and lse."""
    from vllm.v1.attention.backends.mla import flashmla_sparse

    def concat(nope: torch.Tensor, rope: torch.Tensor, out: torch.Tensor) -> None:
        out[:, : nope.shape[1]].copy_(torch.cat((nope, rope), -1))

    def gather(cache: Any, workspace: torch.Tensor, *_: Any) -> None:
        workspace.copy_(numbers(*workspace.shape))

    def convert(
        requests: Any, table: Any, indices: torch.Tensor, *, return_valid_counts: bool = False, **_: Any
    ) -> Any:
        slots = int32(*indices.shape)
        return (slots, int32(len(indices))) if return_valid_counts else slots

    flashmla_sparse.ops = SimpleNamespace(concat_mla_q=concat, cp_gather_and_upconvert_fp8_kv_cache=gather)
    flashmla_sparse.triton_convert_req_index_to_global_index = convert
    decode_tokens, fp8 = decodes * s_q, kind == "fp8_ds_mla"
    tokens, padded = decode_tokens + prefill, -(-heads // 64) * 64
    kind_of_impl = first_module(HY_V4).HYV4FlashMLASparseImpl if name in HY_V4_CASES else impl_class
    impl = object.__new__(kind_of_impl)
    impl.num_heads, impl.kv_cache_dtype = heads, kind if fp8 else "auto"
    impl.kv_lora_rank, impl.q_head_size = 512, 576 if fp8 else 512 + rope
    impl.softmax_scale, impl.prefill_padding = 0.1147, 64
    impl.fp8_decode_padded_heads = impl_class._compute_fp8_decode_padded_heads(heads)
    impl.topk_indices_buffer = int32(64, TOPK)
    impl.need_to_return_lse_for_decode = impl.pcp_dcp_kv_gather = False
    impl.dcp_world_size, impl.index_group, impl.index_group_index = 1, None, 0
    impl._convert_logical_to_physical_topk = lambda indices, batch, **options: convert(
        None, None, indices, **options
    )
    impl.sinks = numbers(heads, dtype=torch.float32)  # which HY-V4's alone looks at
    shapes = [(64, heads if fp8 else padded, impl.q_head_size)]
    if fp8:
        shapes += [(256, 576), (64, padded, 576), (64, padded, 512), (64, heads, 512)]
    impl.workspace_specs = [(shape, torch.bfloat16) for shape in shapes]
    # Older versions keep the workspaces.
    impl.q_concat_buffer = torch.zeros(64, heads, impl.q_head_size, dtype=torch.bfloat16)
    impl.prefill_bf16_workspace = torch.zeros(256, 576, dtype=torch.bfloat16)
    row, dtype = (656, torch.uint8) if fp8 else (impl.q_head_size, torch.bfloat16)
    cache = paged(40, PAGE, row, dtype, (PAGE + 16) * row if kind == "hybrid" else None)

    builder = object.__new__(flashmla_sparse.FlashMLASparseMetadataBuilder)
    builder.max_model_len_tensor, builder.dummy_block_table = int32(32), int32(32, 1)
    builder.pcp_dcp_kv_gather = False
    builder.fp8_decode_padded_heads, builder.topk_tokens = impl.fp8_decode_padded_heads, TOPK
    builder.topk_tokens_tensor = int32(32)
    file = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
    recorder.at(f"{file} FlashMLASparseMetadataBuilder.build", name)
    mixed = heads < flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL
    batch = SimpleNamespace(
        block_table=int32(decodes + 1, 16), req_id_per_token=int32(64), block_size=PAGE,
        num_decode_tokens=decode_tokens, num_actual_tokens=tokens, fp8_use_mixed_batch=mixed,
    )  # fmt: skip
    if fp8 and mixed:
        batch.fp8_extra_metadata = call(builder._build_fp8_mixed_decode_prefill, common_attn_metadata=batch)
    elif fp8:
        batch.fp8_extra_metadata = _separate(flashmla_sparse, builder, decodes, s_q, prefill)
    recorder.at(f"{file_of(kind_of_impl)} {kind_of_impl.__name__}.forward_mqa", name)
    parts = [numbers(tokens, heads, d) for d in (512, 192)]
    result: tuple[torch.Tensor, torch.Tensor | None] = impl.forward_mqa(
        (parts[0], parts[1][..., 192 - rope :]), cache, batch, None
    )
    return result


def _separate(module: Any, builder: Any, decodes: int, s_q: int, prefill: int) -> Any:
    """What the builder makes for prefill and decode apart; written out, since it pins host memory."""
    kinds = module.FlashMLASparseMetadata
    both = kinds.FP8SeparatePrefillDecode
    plan, _ = module.get_mla_metadata()
    kernel = kinds.FP8KernelMetadata(
        plan, builder.dummy_block_table[:decodes], builder.max_model_len_tensor[:decodes]
    )
    made = both(
        num_decodes=decodes, num_prefills=int(prefill > 0), num_prefill_tokens=prefill,
        num_decode_tokens=decodes * s_q, decode=both.Decode(int32(decodes), kernel, s_q),
    )  # fmt: skip
    if prefill:
        tokens = slice(decodes * s_q, decodes * s_q + prefill)
        starts = int32(1)
        chunk = call(
            both.Prefill.Chunk, tokens_slice=tokens, block_table=int32(1, 16), req_start_idx=0,
            workspace_starts=starts, chunk_tot_seqlen=200, seq_lens=None,
        )  # fmt: skip
        made.prefill = call(
            both.Prefill, request_ids=int32(64), workspace_starts=starts, chunks=[chunk], seq_lens=None
        )
    return made


def vllm_v4(recorder: Recorder) -> None:
    """_forward_decode and _forward_prefill of DeepSeek-V4's and V4.1's attention layers."""

    def combine(indices: torch.Tensor, *rest: Any, out: Any = None, **_: Any) -> Any:
        if out is None:
            *_, window, _, topk, _, _ = rest
            out = int32(len(indices), topk + window), int32(len(indices))
        return out

    v4 = first_module(
        "vllm.models.deepseek_v4.nvidia.flashmla", "vllm.model_executor.layers.deepseek_v4_attention"
    )
    v41 = first_module("vllm.models.deepseek_v41.nvidia.flashmla")
    cases = {  # name: (module, ratio, heads)
        "V4, window alone": (v4, 1, 64),
        "V4, ratio 4": (v4, 4, 64),
        "V4, ratio 128": (v4, 128, 128),
        "V4.1, window alone": (v41, 0, 64),
        "V4.1, ratio 2, 584-byte records": (v41, 2, 64),
    }
    kinds = ("DeepseekV4FlashMLAAttention", "DeepseekV4FlashMLASparseImpl", "DeepseekV4MLAAttention")
    for name, (module, ratio, heads) in cases.items():
        if module is not None:
            module.dequantize_and_gather_k_cache = lambda *args, **kwargs: None
            module.compute_global_topk_indices_and_lens = lambda indices, *rest: (
                torch.zeros_like(indices),
                int32(len(indices)),
            )
            module.combine_topk_swa_indices = combine
            kind = next(getattr(module, one) for one in kinds if hasattr(module, one))
            _v4_layer(recorder, kind, name, ratio, heads, alone="alone" in name)


def _v4_layer(recorder: Recorder, kind: Any, name: str, ratio: int, heads: int, *, alone: bool) -> None:
    decodes, prefill, window, alignment = 4, 6, 128, 576
    tokens = decodes + prefill
    page = 256 // max(ratio, 1)
    row = page * 584
    own = None if alone else paged(40 * 64 // page, page, 584, torch.uint8, -(-row // alignment) * alignment)
    swa = paged(8, 64, 584, torch.uint8, -(-64 * 584 // alignment) * alignment)
    layer = SimpleNamespace(
        compress_ratio=ratio, swa_cache_layer=SimpleNamespace(kv_cache=swa), scale=0.0442,
        attn_sink=torch.zeros(heads), topk_indices_buffer=int32(64, 512), window_size=window,
        max_image_tokens=0, max_num_batched_tokens=64, PREFILL_CHUNK_SIZE=4, max_model_len=96 * max(ratio, 1),
        _prefill_num_heads=min(heads, 16),
    )  # fmt: skip
    wide = int32(64, 256)  # of which the step needs 128 columns
    batch = SimpleNamespace(
        num_decodes=decodes, num_prefills=2, num_decode_tokens=decodes, num_prefill_tokens=prefill,
        is_valid_token=torch.ones(64, dtype=torch.bool), token_to_req_indices=int32(64),
        decode_swa_indices=int32(64, 1, window)[:decodes], decode_swa_lens=int32(64)[:decodes],
        prefill_seq_lens=int32(2), prefill_gather_lens=int32(2), block_size=64, block_table=int32(6, 16),
        query_start_loc=int32(7), query_start_loc_cpu=torch.tensor([0, 1, 2, 3, 4, 7, 10]),
        get_prefill_chunk_plan=lambda **options: [(0, 2, 0 if alone else 96, 256)],
        prefill_left_visible=None, prefill_right_visible=None,
    )  # fmt: skip
    for plan in ("swaonly", "c4a", "c128a", "c1a", "c2a"):
        setattr(batch, f"tile_sched_{plan}", Plan())
    attn = SimpleNamespace(
        block_size=256, block_table=int32(6, 16), c128a_global_decode_topk_indices=wide[:decodes, None, :128],
        c128a_decode_topk_lens=int32(64)[:decodes], c128a_prefill_topk_indices=wide[:prefill, :128],
    )  # fmt: skip
    site = f"{file_of(kind)} {kind.__name__}"
    q, output = (torch.zeros(tokens, heads, 512, dtype=torch.bfloat16) for _ in range(2))
    recorder.at(f"{site}._forward_decode", name)
    call(
        kind._forward_decode, self=layer, layer=layer, q=q[:decodes], kv_cache=own, swa_metadata=batch,
        swa_only=alone, attn_metadata=None if alone else attn, output=output[:decodes],
    )  # fmt: skip
    recorder.at(f"{site}._forward_prefill", name)
    call(
        kind._forward_prefill, self=layer, layer=layer, q=q[decodes:], positions=None, compressed_k_cache=own,
        swa_k_cache=swa, output=output[decodes:], attn_metadata=None if alone else attn, swa_metadata=batch,
    )  # fmt: skip


# ---- SGLang


def alone(file: Path, name: str, **names: Any) -> Callable[..., Any]:
    """A function or "Class.method" of a file, compiled without the modules around it. `names` is all that it
    finds as globals, besides torch.
    """
    body = ast.parse(file.read_text()).body
    *classes, last = name.split(".")
    for one in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == one)
    found = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == last)
    future = ast.parse("from __future__ import annotations").body
    scope: dict[str, Any] = {"torch": torch, **names}
    exec(compile(ast.Module([*future, found], []), str(file), "exec"), scope)
    made: Callable[..., Any] = scope[last]
    return made


def record_sglang(root: Path) -> Recorder:
    """Drive SGLang's attention backends as far as they go without a GPU build."""
    recorder = Recorder()
    answers = {
        "get_mla_decoding_metadata": (
            SGLANG_PLAN, lambda given: (int32(66, 8), int32(len(given["seqlens_k"]) + 1))
        ),
        "flash_mla_with_kvcache": (SGLANG_DECODE, results_of),
        "flash_mla_sparse_fwd": (SGLANG_PREFILL, results_of),
    }  # fmt: skip
    names = {name: recorder.function(name, *answer) for name, answer in answers.items()}
    names |= {
        "get_mla_metadata": lambda *args, **kwargs: (Plan(), None),
        "fused_norm_rope_attn_rope_cast": None,
    }
    stub_module("flash_mla", **names)
    stub_module("flash_mla.flash_mla_interface", FlashMLASchedMeta=Plan)
    module = sglang.ENGINE.modules[0]
    own, older = module.paths
    file = root / (own.replace(".", "/") + ".py")
    # Methods import it by this name. Its packages are not needed for that.
    for path in (own, older):
        for end in range(path.count(".")):
            stub_module(".".join(path.split(".")[: end + 1]), __path__=[])
    if file.exists():
        spec = importlib.util.spec_from_file_location(own, file)
        assert spec is not None and spec.loader is not None
        interface = importlib.util.module_from_spec(spec)
        sys.modules[own] = interface
        spec.loader.exec_module(interface)
    else:  # an extension, whose module the plug-in replaces
        from rawmla.compat import sgl_kernel as interface

        vars(interface).update(flash_mla_interface=SimpleNamespace(**names), FlashMLASchedMeta=Plan)
        sys.modules[older] = interface
    sglang_dense(recorder, root, interface)
    sglang_dsa(recorder, root)
    sglang_v4(recorder, interface)
    return recorder


def sglang_dense(recorder: Recorder, root: Path, interface: Any) -> None:
    """FlashMLABackend.forward_decode, and forward_extend where it verifies drafts."""
    file = "sglang/srt/layers/attention/flashmla_backend.py"
    view = root / "sglang/srt/mem_cache/layout/paged_view.py"
    pages = alone(view, "paged_view") if view.exists() else None
    names = {
        "PAGE_SIZE": PAGE, "paged_view": pages, "flash_mla_with_kvcache": interface.flash_mla_with_kvcache,
        "get_parallel": lambda: SimpleNamespace(dcp_enabled=False),
        "ForwardMode": SimpleNamespace(EXTEND="extend"),
    }  # fmt: skip
    cases = {  # name: (requests, tokens of each, heads)
        "decode, 16 heads": (3, 1, 16),
        "decode, 128 heads": (5, 1, 128),
        "verify 4 draft tokens, 16 heads": (3, 4, 16),
    }
    for name, (b, s_q, heads) in cases.items():
        # What the backend keeps for graphs: tables wider than the batch needs, plans of the largest batch.
        recorder.at(f"{file} FlashMLABackend._apply_decode_target_verify_metadata", name, "read")
        rows, splits = interface.get_mla_metadata(int32(b), s_q * heads, 1, is_fp8_kvcache=False)
        kept_rows, kept_splits = int32(132, 8), int32(64 + 1)
        metadata = SimpleNamespace(
            flashmla_metadata=kept_rows[: rows.shape[0]], num_splits=kept_splits[: len(splits)],
            block_kv_indices=int32(64, 64)[:b, :16],
        )  # fmt: skip
        cache = torch.zeros(40 * PAGE, 1, 576, dtype=torch.bfloat16)
        backend = SimpleNamespace(
            is_fp8_kvcache=False, forward_metadata=metadata, kv_lora_rank=512, num_draft_tokens=s_q,
            kv_cache_dim=576, dcp_world_size=1,
            token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda layer, cache=cache: cache),
        )  # fmt: skip
        layer = SimpleNamespace(tp_q_head_num=heads, head_dim=576, v_head_dim=512, scaling=0.1147, layer_id=0)
        mode = SimpleNamespace(is_draft_extend_v2=lambda: False)
        batch = SimpleNamespace(
            batch_size=b, seq_lens=torch.zeros(b, dtype=torch.int64), forward_mode=mode, out_cache_loc=None
        )
        method = "forward_decode" if s_q == 1 else "forward_extend"
        recorder.at(f"{file} FlashMLABackend.{method}", name)
        q = torch.zeros(b * s_q, heads * 576, dtype=torch.bfloat16)
        alone(root / file, f"FlashMLABackend.{method}", **names)(backend, q, None, None, layer, batch)


def sglang_dsa(recorder: Recorder, root: Path) -> None:
    """DeepseekSparseAttnBackend: its plan, decoding over an FP8 cache, sparse prefill."""
    file, kind = "sglang/srt/layers/attention/dsa_backend.py", "DeepseekSparseAttnBackend"
    fields = {"DSAFlashMLAMetadata": SimpleNamespace}
    make_plan = alone(root / file, f"{kind}._compute_flashmla_metadata", **fields)
    decode = alone(root / file, f"{kind}._forward_flashmla_kv")
    prefill = alone(root / file, f"{kind}._forward_flashmla_sparse")
    for heads in (16, 128):
        b, padded = 4, 64 if heads <= 64 else 128
        backend = SimpleNamespace(
            flashmla_kv_num_q_heads=padded, dsa_index_topk=2048, physical_page_size=PAGE, real_page_size=PAGE,
            kv_cache_dim=656, dsa_kv_cache_store_fp8=True, flashmla_kv_format=None, device_sm_major=9,
            _sink_pad_cache={},
        )  # fmt: skip
        name = f"FP8 cache, {heads} heads"
        recorder.at(f"{file} {kind}._compute_flashmla_metadata", name)
        lengths = int32(b)
        plan = make_plan(backend, lengths, 1)
        recorder.at(f"{file} {kind}._forward_flashmla_kv", name)
        q = torch.zeros(b, heads * 576, dtype=torch.bfloat16).view(b, heads, 576)
        cache = torch.zeros(40 * PAGE, 1, 656, dtype=torch.float8_e4m3fn)
        layer = SimpleNamespace(tp_q_head_num=heads, head_dim=576)
        metadata = SimpleNamespace(dsa_cache_seqlens_int32=lengths, flashmla_metadata=plan)
        decode(backend, q, cache, 512, 0.1147, layer, metadata, int32(b, 2048))
        recorder.at(f"{file} {kind}._forward_flashmla_sparse", f"bf16 rows, {heads} heads")
        rows = torch.zeros(600, 1, 576, dtype=torch.bfloat16)
        sink = torch.zeros(heads) if heads == 16 else None
        call(
            prefill, self=backend, q_all=q, kv_cache=rows, v_head_dim=512, page_table_1=int32(b, 2048),
            sm_scale=0.1147, topk_length=int32(b), attn_sink=sink,
        )  # fmt: skip


def sglang_v4(recorder: Recorder, interface: Any) -> None:
    """DeepseekV4Backend.forward and _forward_prefill_sparse: the lines around their calls, written again."""
    file = "sglang/srt/layers/attention/deepseek_v4_backend.py"
    b, heads = 4, 64
    # A page of 128 tokens or fewer, padded to 576 bytes.
    window_rows = torch.zeros(8, 37440, dtype=torch.uint8)
    for name, page in {"window alone": 0, "ratio 4": 64, "ratio 128": 2}.items():
        recorder.at(f"{file} DeepseekV4Backend.forward", f"V4, {name}", "read")
        q = torch.zeros(b, heads, 512, dtype=torch.bfloat16).unsqueeze(1)
        window = window_rows[:, : 64 * 584].view(8, 64, 1, 584)
        extra = None
        if page:
            stride = -(-page * 584 // 576) * 576
            extra = torch.zeros(640 // page, stride, dtype=torch.uint8)[:, : page * 584]
            extra = extra.view(640 // page, page, 1, 584)
        interface.flash_mla_with_kvcache(
            q=q, k_cache=window, head_dim_v=512, block_table=None, cache_seqlens=None,
            tile_scheduler_metadata=Plan(), softmax_scale=0.0442, is_fp8_kvcache=True,
            indices=int32(b, 128).unsqueeze(1), topk_length=int32(b), attn_sink=torch.zeros(heads),
            extra_k_cache=extra, extra_indices_in_kvcache=int32(b, 1, 512) if page else None,
            extra_topk_length=int32(b) if page else None,
        )  # fmt: skip
    recorder.at(f"{file} DeepseekV4Backend._forward_prefill_sparse", "V4", "read")
    interface.flash_mla_sparse_fwd(
        q=torch.zeros(9, 1, heads, 512, dtype=torch.bfloat16).squeeze(1),
        kv=torch.zeros(700, 1, 512, dtype=torch.bfloat16), indices=int32(9, 640).unsqueeze(1),
        sm_scale=0.0442, d_v=512, attn_sink=torch.zeros(heads), topk_length=int32(9),
    )  # fmt: skip


def main() -> int:
    """Record one engine."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("engine", choices=("vllm", "vllm-backend", "sglang"))
    parser.add_argument("--sources", type=Path, help="folder of SGLang's unpacked wheel")
    parser.add_argument("--out", type=Path, default=CONTRACTS, help="folder of the files; %(default)s")
    options = parser.parse_args()
    found = distribution_of(parser, options.engine.partition("-")[0], options.sources)
    recorders = {
        "vllm": record_vllm,
        "vllm-backend": record_vllm_backend,
        "sglang": lambda: record_sglang(Path(str(found.locate_file("")))),
    }
    record_into(options.out / f"{options.engine}.json", found.version, recorders[options.engine]())
    return 0


def distribution_of(
    parser: argparse.ArgumentParser, name: str, sources: Path | None
) -> metadata.Distribution:
    """The engine, installed or in the folder of an unpacked wheel."""
    path = sys.path if sources is None else [str(sources)]
    found = [one for one in metadata.distributions(path=path) if one.name == name]
    if not found:
        parser.error(f"{name} is not installed; for SGLang, --sources names its unpacked wheel")
    return found[0]


def record_into(file: Path, version: str, recorder: Recorder) -> None:
    """Store what was recorded, and say so."""
    store(file, version, recorder.calls)
    print(f"{len(recorder.calls)} calls of version {version} written to {file}")


def stored(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The calls of each version."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    return {name: [content["calls"][i] for i in numbers] for name, numbers in content["versions"].items()}


def store(file: Path, version: str, calls: list[dict[str, Any]]) -> None:
    """Replace the calls of a version in the file, or add them."""
    versions = {**stored(file), version: calls}
    lines: dict[str, int] = {}
    numbered = {
        name: [lines.setdefault(json.dumps(call), len(lines)) for call in versions[name]]
        for name in sorted(versions, key=lambda name: [int(part) for part in name.split(".")])
    }
    parts = ",\n".join(f"{json.dumps(name)}: {numbers}" for name, numbers in numbered.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{{"versions": {{\n{parts}\n}}, "calls": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    sys.exit(main())
