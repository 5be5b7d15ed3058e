"""Looks at the real vLLM with the plug-in in it; run by tests/test_vllm.py, one function per process,
most of them in a process where vLLM is imported already.

vLLM is imported on the CPU as tests/contracts/record.py does it. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("tests", "tests/gpu")]

import torch  # noqa: E402
from contracts import record as record_contracts  # noqa: E402

IMPORTERS = (  # what imports FlashMLA's names, in vLLM 0.33.0
    "vllm.v1.attention.backends.mla.flashmla",
    "vllm.v1.attention.backends.mla.flashmla_sparse",
    "vllm.v1.attention.backends.mla.sparse_swa",
    "vllm.models.deepseek_v4.nvidia.flashmla",
    "vllm.models.deepseek_v41.nvidia.flashmla",
    "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn",
    "vllm.models.hy_v4.nvidia.flashmla_sparse",
)


def names() -> dict[str, list[str]]:
    """Per module of vLLM, which of the replaced names are rawmla's there."""
    from rawmla.engines.vllm import ENGINE

    found = {}
    for module in (ENGINE.module, *IMPORTERS):
        values = vars(import_module(module))
        found[module] = [
            name
            for name in ENGINE.replaced
            if name in values and values[name].__module__.startswith("rawmla.")
        ]
        kept = [name for name in ENGINE.replaced if name in values and name not in found[module]]
        assert not kept, (module, kept)
    return found


def before() -> Any:
    """The plug-in, as vLLM itself finds and loads it, before vLLM's attention is imported."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert "vllm.v1.attention.ops.flashmla" not in sys.modules
    record_contracts.vllm_without_gpu()
    return names()


def after() -> Any:
    """The plug-in after all importers have bound vLLM's own names."""
    record_contracts.vllm_without_gpu()
    for module in IMPORTERS:
        import_module(module)
    from rawmla.engines.vllm import register

    register()
    return names()


def fp8() -> Any:
    """What stays vLLM's: on this build without FlashMLA, its own error."""
    interface = record_contracts.vllm_without_gpu()
    from rawmla.engines.vllm import register

    register()
    try:
        interface.get_mla_metadata_dense_fp8(None, 1, 1)
    except RuntimeError as error:
        return str(error)
    return None


def _paths(queue: Any, members: dict[str, Any]) -> None:
    from rawmla.engines.vllm import register

    register()
    queue.put({name: member.get_path() for name, member in members.items()})


def backends() -> Any:
    """Selection by name on Hopper and on another GPU, and the members sent to a spawned worker."""
    record_contracts.vllm_without_gpu()
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rawmla.engines.vllm import register

    register()
    members = {name: AttentionBackendEnum[name] for name in ("FLASHMLA", "FLASHMLA_SPARSE", "CUSTOM")}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_paths, args=(queue, members))
    process.start()
    paths = queue.get(timeout=120)
    process.join()
    found = {}
    for name, member in members.items():
        backend = member.get_class()
        sparse = backend.is_sparse()
        reasons = {}
        for major in (9, 10):
            for invariant in (False, True):
                os.environ["VLLM_BATCH_INVARIANT"] = str(int(invariant))
                reasons[f"{major} {invariant}"] = backend.validate_configuration(
                    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True,
                    has_sink=False, use_sparse=sparse, use_mm_prefix=False, use_per_head_quant_scales=False,
                    device_capability=DeviceCapability(major, 0), attn_type="decoder",
                    use_batch_invariant=invariant,
                )  # fmt: skip
        found[name] = {
            "class": f"{backend.__module__}.{backend.__qualname__}",
            "name": backend.get_name(),
            "builder": backend.get_builder_cls().__name__,
            "impl": backend.get_impl_cls().__name__,
            "reasons": reasons,
            "in a worker": paths[name],
        }
    return found


def recorded() -> Any:
    """Calls recorded anew, by engine."""
    engine = sys.argv[2]
    recorder = record_contracts.record_vllm if engine == "vllm" else record_contracts.record_vllm_backend
    return recorder().calls


def same_results() -> Any:
    """rawmla's implementations and their parents on the same layers, both computed by the reference: the
    largest difference of out and lse for every case, and how many cases.
    """
    interface = record_contracts.vllm_without_gpu()
    import rawmla
    from rawmla import reference

    def decode(**arguments: Any) -> Any:
        q = arguments["q"]
        arguments["q"] = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        arguments["tile_scheduler_metadata"] = None
        if arguments.get("indices") is not None:
            arguments["block_table"] = arguments["cache_seqlens"] = None
        return reference.flash_mla_with_kvcache(**arguments)

    def ours_decode(q: Any, k_cache: Any, table: Any, lengths: Any, d_v: int, plan: Any, **rest: Any) -> Any:
        assert isinstance(q, tuple) or q.is_contiguous()
        return decode(q=q, k_cache=k_cache, block_table=table, cache_seqlens=lengths, head_dim_v=d_v, **rest)

    def ours_prefill(q: Any, kv: Any, indices: Any, scale: float, **rest: Any) -> Any:
        rest.pop("enable_batch_invariant")
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        return reference.flash_mla_sparse_fwd(q, kv, indices, scale, **rest)

    interface.get_mla_metadata = lambda *args, **kwargs: (object(), None)
    interface.flash_mla_with_kvcache = decode
    interface.flash_mla_sparse_fwd = lambda *values, **rest: reference.flash_mla_sparse_fwd(
        *values, **rest, log_base="e"
    )
    setattr(rawmla, "flash_mla_with_kvcache", ours_decode)  # noqa: B010
    setattr(rawmla, "flash_mla_sparse_fwd", ours_prefill)  # noqa: B010
    from vllm.v1.attention.backends.mla import flashmla, flashmla_sparse

    from rawmla.engines import vllm_backend

    dense = {
        "one token": {}, "two tokens": {"s_q": 2}, "lse": {"lse": True}, "a tensor": {"whole": True},
        "no RoPE columns": {"rope": 0},
    }  # fmt: skip
    sparse = {
        "whole batch as one request": {"mixed": True}, "decode": {"prefill": 0},
        "two tokens": {"s_q": 2, "prefill": 0}, "decode and prefill": {}, "bf16 cache": {"fp8": False},
        "no RoPE columns": {"fp8": False, "rope": 0}, "no RoPE columns, FP8": {"rope": 0, "mixed": True},
    }  # fmt: skip
    layers: list[tuple[str, Any, Any, Any, Any]] = [
        (f"dense, {name}", _dense, flashmla.FlashMLAImpl, vllm_backend.RawMLAImpl, options)
        for name, options in dense.items()
    ]
    kinds = flashmla_sparse.FlashMLASparseImpl, vllm_backend.RawMLASparseImpl
    layers += [(f"sparse, {name}", _sparse, *kinds, options) for name, options in sparse.items()]
    differences = {}
    for name, layer, theirs, ours, options in layers:
        want = layer(theirs, **options)
        differences[name] = _difference(want, layer(ours, **options))
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        differences[f"{name}, batch-invariant"] = _difference(want, layer(ours, **options))
        os.environ["VLLM_BATCH_INVARIANT"] = "0"
    return differences


def _difference(one: Any, other: Any) -> list[float]:
    result = []
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is None:  # vLLM asks for lse only under context parallelism
            continue
        assert a.shape == b.shape
        result.append(float((a.double() - b.double()).abs().max()))
    return result


def preparation() -> Any:
    """What the builders load and what the layers reserve: calls of `warmup`, and bytes."""
    record_contracts.vllm_without_gpu()
    import rawmla
    from rawmla.engines import vllm_backend
    from rawmla.kernels.operations import specs_of

    loaded = []

    def warmup(*operations: str, device: Any, **options: Any) -> None:
        loaded.append([list(operations), options, len(specs_of(operations, **_all_options(options)))])

    setattr(rawmla, "warmup", warmup)  # noqa: B010
    vllm_backend.device_info = lambda device: SimpleNamespace(sm_count=132)
    torch.cuda.current_device = lambda: 0
    reserved = []
    empty = torch.empty
    torch.empty = lambda size, **options: reserved.append(size) if "device" in options else empty(size)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=65536), speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192),
    )  # fmt: skip
    thresholds = []
    for kind, name in (("RawMLA", "is_fp8_kvcache"), ("RawMLASparse", "use_fp8_kv_cache")):
        for fp8 in (False, True):
            builder_class = getattr(vllm_backend, f"{kind}MetadataBuilder")
            parent = builder_class.__mro__[1]
            parent.__init__ = lambda self, *_, _name=name, _fp8=fp8: setattr(self, _name, _fp8)
            builder = builder_class(SimpleNamespace(head_size=576), [], config, torch.device("cuda:0"))
            thresholds.append(builder.reorder_batch_threshold)
            impl = object.__new__(getattr(vllm_backend, f"{kind}Impl"))
            impl.num_heads, impl.dcp_world_size, impl._vllm_config = 16, 1, config
            impl.kv_cache_dtype = "fp8" if fp8 else "auto"
            impl.topk_indices_buffer = empty(1, 2048)
            impl.reserve_workspace()
    return {"loaded": loaded, "reserved": reserved, "thresholds": thresholds}


def _all_options(options: dict[str, Any]) -> dict[str, Any]:
    names = ("dtypes", "d_qk", "page_block_sizes", "sparse_formats", "prefill_formats")
    return {name: options.get(name) for name in names}


HEADS = 6


def _query(tokens: int, rope: int, whole: bool) -> Any:
    torch.manual_seed(tokens)
    parts = tuple(torch.randn(tokens, HEADS, n).bfloat16() for n in (512, rope))
    return torch.cat(parts, -1) if whole else parts


def _dense(kind: Any, s_q: int = 1, lse: bool = False, whole: bool = False, rope: int = 64) -> Any:
    b = 3
    q = _query(b * s_q, rope, whole)
    impl = object.__new__(kind)
    impl.kv_cache_dtype, impl.kv_lora_rank, impl.scale = "auto", 512, 0.05
    impl.need_to_return_lse_for_decode = lse
    cache = torch.randn(8, 64, 512 + rope).bfloat16()
    decode = SimpleNamespace(
        block_table=torch.arange(6, dtype=torch.int32).view(3, 2), scheduler_metadata=None,
        seq_lens=torch.tensor([5, 128, 70], dtype=torch.int32),
    )  # fmt: skip
    out, statistics = impl.forward_mqa(q, cache, SimpleNamespace(decode=decode, num_decodes=b), None)
    return out, statistics if lse else None


def _sparse(
    kind: Any, s_q: int = 1, prefill: int = 3, mixed: bool = False, fp8: bool = True, rope: int = 64
) -> Any:
    from vllm.v1.attention.backends.mla import flashmla_sparse

    from rawmla import reference

    decodes, topk, heads = 2, 24, HEADS
    decode_tokens = decodes * s_q
    tokens = decode_tokens + prefill
    q = _query(tokens, rope, False)
    indices = torch.randint(-1, 64, (tokens, topk), dtype=torch.int32)
    lengths = torch.randint(0, topk + 1, (tokens,), dtype=torch.int32)

    def convert(*_: Any, return_valid_counts: bool = False, **__: Any) -> Any:
        return (indices, lengths) if return_valid_counts else indices

    def concat(nope: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
        out[:, : nope.shape[1]].copy_(torch.cat((nope, other), -1))

    def gather(cache: Any, workspace: torch.Tensor, *_: Any) -> None:
        workspace.copy_(torch.randn(workspace.shape, generator=torch.Generator().manual_seed(0)))

    flashmla_sparse.triton_convert_req_index_to_global_index = convert
    flashmla_sparse.ops = SimpleNamespace(concat_mla_q=concat, cp_gather_and_upconvert_fp8_kv_cache=gather)
    impl = object.__new__(kind)
    impl.num_heads, impl.kv_lora_rank = heads, 512
    impl.kv_cache_dtype = "fp8_ds_mla" if fp8 else "auto"
    impl.q_head_size = 576 if fp8 else 512 + rope
    impl.softmax_scale, impl.prefill_padding, impl.fp8_decode_padded_heads = 0.05, 64, 64
    impl.topk_indices_buffer = indices
    impl.need_to_return_lse_for_decode = impl.pcp_dcp_kv_gather = False
    impl.dcp_world_size, impl.index_group, impl.index_group_index = 1, None, 0
    impl._convert_logical_to_physical_topk = lambda *_, **options: convert(**options)
    wide = (32, heads if fp8 else 64, impl.q_head_size)
    shapes = [wide, (64, 576), (32, 64, 576), (32, 64, 512), (32, heads, 512)]
    impl.workspace_specs = [(shape, torch.bfloat16) for shape in shapes[: 5 if fp8 else 1]]
    cache = torch.randn(2, 64, 1, impl.q_head_size).bfloat16()
    if fp8:
        cache = reference.quantize_k_cache(cache, "v32")
    batch = SimpleNamespace(
        block_table=None, req_id_per_token=torch.zeros(tokens), block_size=64,
        num_decode_tokens=decode_tokens, num_actual_tokens=tokens, fp8_use_mixed_batch=mixed,
    )  # fmt: skip
    builder = SimpleNamespace(
        max_model_len_tensor=torch.zeros(8), dummy_block_table=torch.zeros(8, 1), pcp_dcp_kv_gather=False
    )
    kinds = flashmla_sparse.FlashMLASparseMetadata
    if mixed:
        batch.fp8_extra_metadata = kinds.FP8KernelMetadata(None, None, None)
    elif fp8:
        batch.fp8_extra_metadata = record_contracts._separate(flashmla_sparse, builder, decodes, s_q, prefill)
        if prefill:
            batch.fp8_extra_metadata.prefill.chunks[0].chunk_tot_seqlen = 64
    out, _ = impl.forward_mqa(q, cache.squeeze(2), batch, None)
    return (out,)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
