"""Looks at the real vLLM with the plug-in in it; run by tests/test_vllm.py, one function per process,
most of them in a process where vLLM is imported already.

vLLM is imported on the CPU as tests/contracts/record.py does it. Prints what it found as JSON.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("tests", "tests/gpu")]

import torch  # noqa: E402
from contracts import record  # noqa: E402

from rawmla.engines import source  # noqa: E402

IMPORTERS = (  # what imports FlashMLA's names, in one version or another
    "vllm.v1.attention.backends.mla.flashmla",
    "vllm.v1.attention.backends.mla.flashmla_sparse",
    "vllm.v1.attention.backends.mla.sparse_swa",
    "vllm.models.deepseek_v4.nvidia.flashmla",
    "vllm.models.deepseek_v41.nvidia.flashmla",
    "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn",
    "vllm.models.hy_v4.nvidia.flashmla_sparse",
    "vllm.model_executor.layers.deepseek_v4_attention",
)
FLASH_ATTN_IMPORTERS = (  # some of what imports FlashAttention's, in one version or another
    "vllm.v1.attention.backends.fa_utils",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.mla.flashattn_mla",
    "vllm.v1.attention.backends.flash_attn_diffkv",
    "vllm.v1.attention.backends.mla.flashattn_mla_sparse",
    "vllm.v1.attention.backends.mla.prefill.flash_attn",
)


def importers(names: tuple[str, ...] = IMPORTERS) -> list[str]:
    """What this version has of them."""
    return [name for name in names if source.file_of(name)]


def names() -> dict[str, list[str]]:
    """Per module of vLLM, which of the replaced names are rawmla's there."""
    from rawmla.engines.vllm import ENGINE

    described, _ = ENGINE.modules
    found = {}
    for module in (*described.paths, *importers()):
        values = vars(import_module(module))
        there = [name for name in described.replaced if name in values]
        found[module] = [name for name in there if values[name].__module__.startswith("rawmla.")]
        kept = [name for name in there if name not in found[module]]
        assert not kept, (module, kept)
    return found


def before() -> Any:
    """The plug-in, as vLLM itself finds and loads it, before vLLM's attention is imported."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert "vllm.v1.attention.ops.flashmla" not in sys.modules
    record.vllm_without_gpu()
    return names()


def after() -> Any:
    """The plug-in after all importers have bound vLLM's own names."""
    record.vllm_without_gpu()
    for module in importers():
        import_module(module)
    from rawmla.engines.vllm import register

    register()
    return names()


def flash_attn() -> Any:
    """The same of FlashAttention's names: half of the importers came before the plug-in."""
    from rawmla.engines.vllm import ENGINE, register

    _, module_of_names = ENGINE.modules
    record.vllm_without_gpu("vllm.vllm_flash_attn._vllm_fa3_C")
    modules = importers(FLASH_ATTN_IMPORTERS)
    for number, module in enumerate(modules):
        if number == len(modules) // 2:
            register()
        import_module(module)
    found = {}
    for module in (str(module_of_names.path), *modules):
        values = [vars(import_module(module)).get(name) for name in module_of_names.replaced]
        found[module] = [value.__module__ for value in values if value is not None]
    return found


def recorded_flash_attn() -> Any:
    """Calls of FlashAttention recorded anew."""
    from contracts import record_flash_attn

    return record_flash_attn.record_vllm().calls


def fp8() -> Any:
    """What stays vLLM's: on this build without FlashMLA, its own error."""
    interface = record.vllm_without_gpu()
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
    record.vllm_without_gpu()
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rawmla.engines.vllm import register

    register()
    members = {name: AttentionBackendEnum[name] for name in ("FLASHMLA", "FLASHMLA_SPARSE", "CUSTOM")}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_paths, args=(queue, members))
    process.start()
    paths = queue.get(timeout=240)
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
    recorder = record.record_vllm if sys.argv[2] == "vllm" else record.record_vllm_backend
    return recorder().calls


def same_results() -> Any:
    """rawmla's implementations and their parents on the same layers, both computed by the reference: the
    largest differences of out and lse for every case, without and with batch invariance.
    """
    interface = record.vllm_without_gpu()
    import rawmla
    from rawmla import reference

    def decode(**given: Any) -> Any:
        if given.get("indices") is not None:  # vLLM has a table and lengths for it that nobody reads
            given |= {"block_table": None, "cache_seqlens": None}
        return reference.flash_mla_with_kvcache(**given)

    interface.get_mla_metadata = lambda *args, **kwargs: (None, None)
    interface.flash_mla_with_kvcache = decode
    interface.flash_mla_sparse_fwd = partial(reference.flash_mla_sparse_fwd, log_base="e")
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        setattr(rawmla, name, getattr(reference, name))
    from vllm.v1.attention.backends.mla.flashmla import FlashMLAImpl
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    from rawmla.engines.vllm_backend import RawMLAImpl, RawMLASparseImpl

    dense = record.DENSE_CASES | {"no RoPE columns": (3, 1, 6, 1, False, torch.bfloat16, 0)}
    sparse = record.sparse_cases()
    if "q_head_size" in inspect.getsource(FlashMLASparseImpl):  # which is 512 without RoPE columns
        sparse |= {f"no RoPE columns, {kind}": (6, 2, 1, 3, kind, 0) for kind in ("auto", "fp8_ds_mla")}
    record.numbers, record.TOPK = random_numbers, 64
    differences = {}
    for layer, theirs, ours, cases in (
        (record.vllm_dense, FlashMLAImpl, RawMLAImpl, dense),
        (record.vllm_sparse, FlashMLASparseImpl, RawMLASparseImpl, sparse),
    ):
        for name, case in cases.items():
            results = []
            for kind, invariant in ((theirs, "0"), (ours, "0"), (ours, "1")):
                os.environ["VLLM_BATCH_INVARIANT"] = invariant
                torch.manual_seed(0)
                results.append(layer(record.Recorder(), kind, name, *case))
            want, *others = results
            differences[name] = [_difference(x, y) for got in others for x, y in zip(want, got, strict=True)]
    return differences


def random_numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of integers, pages, slots and lengths in any cache; of bytes, those that are no NaN in FP8 records."""
    limits = {torch.int32: 40, torch.uint8: 64}
    if dtype in limits:
        return torch.randint(0, limits[dtype], shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


def _difference(one: Any, other: Any) -> float:
    """vLLM asks for lse only under context parallelism."""
    if one is None and other is None:
        return 0.0
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())


def preparation() -> Any:
    """What the builders load and what the layers reserve: calls of `warmup`, and bytes."""
    record.vllm_without_gpu()
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    import rawmla
    from rawmla.engines import vllm_backend
    from rawmla.kernels.operations import specs_of

    loaded = []

    def warmup(*operations: str, device: Any, **options: Any) -> None:
        names = ("dtypes", "d_qk", "page_block_sizes", "sparse_formats", "prefill_formats")
        specs = specs_of(operations, **{name: options.get(name) for name in names})
        loaded.append([list(operations), options, len(specs)])

    setattr(rawmla, "warmup", warmup)  # noqa: B010
    vllm_backend.device_info = lambda device: SimpleNamespace(sm_count=132)
    torch.cuda.current_device = lambda: 0
    reserved = []
    empty = torch.empty
    torch.empty = lambda size, **options: reserved.append(size) if "device" in options else empty(size)
    # A layer in vLLM's profile run.
    some = torch.zeros(1)
    layer = SimpleNamespace(chunked_prefill_workspace_size=1, num_heads=1, qk_nope_head_dim=1, v_head_dim=1)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=65536), speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192),
    )  # fmt: skip
    thresholds = []
    for kind, name in (("RawMLA", "is_fp8_kvcache"), ("RawMLASparse", "use_fp8_kv_cache")):
        for fp8 in (False, True):
            builder_class = getattr(vllm_backend, f"{kind}MetadataBuilder")
            parent = builder_class.__mro__[1]
            made = {name: fp8, "vllm_config": config, "reorder_batch_threshold": 128}
            parent.__init__ = lambda self, *_, _made=made: vars(self).update(_made)
            builder = builder_class(SimpleNamespace(head_size=576), [], config, torch.device("cuda:0"))
            thresholds.append(builder.reorder_batch_threshold)
            impl = object.__new__(getattr(vllm_backend, f"{kind}Impl"))
            impl.num_heads, impl.dcp_world_size, impl._vllm_config = 16, 1, config
            impl.kv_cache_dtype = "fp8" if fp8 else "auto"
            impl.topk_indices_buffer = empty(1, 2048)
            layer.impl = impl
            MLAAttention.forward_impl(layer, some, some, some, some, None, output=some)
    ours = [size for size in reserved if isinstance(size, int)]  # vLLM's own have three dimensions
    return {"loaded": loaded, "reserved": ours, "thresholds": thresholds}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
