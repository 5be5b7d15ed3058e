"""Calls of other implementations on the same inputs, for --compare: whichever this environment can import."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cases import D_V, DecodeCase, PrefillCase, SparseCase
from .columns import CUDNN, FLASH_ATTENTION_4
from .flex_cases import FlexCase
from .mha_cases import MhaCase

FA3_SPLITS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Split counts tried for FlashAttention-3 (0: its own choice); the best one counts."""

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Peer:
    """Another implementation: its name, the modules it is imported from, and from a case and its inputs the
    calls to time. Of several calls the fastest counts. `calls_per_graph` is None for as many as ours.
    """

    name: str
    modules: str
    calls: Callable[[Any, Any], list[Call]]
    calls_per_graph: int | None = None


def _import_flash_mla() -> Any:
    import flash_mla

    if "rawmla" in getattr(flash_mla, "__version__", ""):
        raise ImportError("flash_mla is rawmla itself here")
    return flash_mla


def _flash_mla(case: DecodeCase, inputs: Any) -> list[Call]:
    flash_mla = _import_flash_mla()

    meta, num_splits = flash_mla.get_mla_metadata(
        inputs.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv
    )

    def call(_: int) -> None:
        flash_mla.flash_mla_with_kvcache(
            inputs.q,
            inputs.k_cache,
            inputs.block_tables[0],
            inputs.cache_seqlens,
            D_V,
            meta,
            num_splits,
            causal=case.causal,
        )

    return [call]


def _flash_attention_3(case: DecodeCase, inputs: Any) -> list[Call]:
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache
    q_nope, q_rope = inputs.q[..., :D_V], inputs.q[..., D_V:].contiguous()
    v_cache, k_rope = inputs.k_cache[..., :D_V], inputs.k_cache[..., D_V:]

    def with_splits(splits: int) -> Call:
        def call(_: int) -> None:
            flash_attn_with_kvcache(
                q=q_rope,
                k_cache=k_rope,
                v_cache=v_cache,
                qv=q_nope,
                cache_seqlens=inputs.cache_seqlens,
                page_table=inputs.block_tables[0],
                softmax_scale=case.d_qk**-0.5,
                causal=case.causal,
                num_splits=splits,
            )

        return call

    return [with_splits(splits) for splits in FA3_SPLITS]


def _torch_naive(case: DecodeCase, inputs: Any) -> list[Call]:
    from .measure import attention_of_request

    def call(_: int) -> None:
        for request in range(case.b):
            attention_of_request(case, inputs, request)

    return [call]


def _flash_mla_sparse(case: SparseCase, inputs: Any) -> list[Call]:
    flash_mla = _import_flash_mla()
    from torch.nn.functional import pad

    q = pad(inputs.q, (0, 0, 0, -case.h_q % 64))  # it has 64 and 128 heads; the caller pads
    meta, _ = flash_mla.get_mla_metadata()

    def call(_: int) -> None:
        flash_mla.flash_mla_with_kvcache(
            q, inputs.k_cache, None, None, D_V, meta, None, **inputs.keywords(case, 0)
        )

    return [call]


def _flash_mla_prefill(case: PrefillCase, inputs: Any) -> list[Call]:
    flash_mla = _import_flash_mla()
    from torch.nn.functional import pad

    q = pad(inputs.q, (0, 0, 0, -case.h_q % 64))  # as for decoding

    def call(_: int) -> None:
        flash_mla.flash_mla_sparse_fwd(q, inputs.kv_sets[0], inputs.indices, case.d_qk**-0.5)

    return [call]


def _cudnn(case: MhaCase, inputs: Any) -> list[Call]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if case.varlen or case.window is not None or case.softcap or case.sink:
        raise ValueError("torch hands it neither varied lengths nor windows, softcaps and sinks")
    q, k, v = (array.transpose(1, 2) for array in (inputs.q, inputs.k, inputs.v))

    def call(_: int) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.h_kv != case.h_q
            )

    return [call]


def _flash_attention_4(case: MhaCase, inputs: Any) -> list[Call]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    from .mha_measure import options

    function = flash_attn_varlen_func if case.varlen else flash_attn_func
    keywords = options(case, inputs, "learnable_sink")

    def call(_: int) -> Any:
        return function(inputs.q, inputs.k, inputs.v, **keywords)

    return [call]


def _torch_flex(kernel_options: dict[str, Any] | None) -> Callable[[FlexCase, Any], list[Call]]:
    def calls(case: FlexCase, inputs: Any) -> list[Call]:
        if kernel_options is not None:
            import flash_attn.cute  # noqa: F401  (torch's error for want of it is none of an import)
        import torch
        from torch.nn.attention import flex_attention as module

        from .flex_measure import check_output, functions

        score, mask = functions(case, inputs)
        block_mask = None
        if mask is not None:
            block_mask = module.create_block_mask(
                mask, None, None, case.s, case.s, device=inputs.q.device.type
            )
        # Else it would stop compiling after some cases, since they share a function.
        torch._dynamo.reset()
        compiled = torch.compile(module.flex_attention, dynamic=False, fullgraph=True)

        def call(_: int) -> Any:
            return compiled(
                inputs.q,
                inputs.k,
                inputs.v,
                score,
                block_mask,
                enable_gqa=case.h_kv != case.h_q,
                kernel_options=kernel_options,
            )

        check_output(case, inputs, call(0))
        return [call]

    return calls


DENSE = (
    Peer("FlashMLA", "flash_mla", _flash_mla),
    Peer("FlashAttention-3", "flash_attn_interface or flash_attn", _flash_attention_3),
    Peer("torch float32, a request at a time", "torch", _torch_naive, calls_per_graph=1),
)
SPARSE = (Peer("FlashMLA", "flash_mla", _flash_mla_sparse),)
PREFILL = (Peer("FlashMLA", "flash_mla", _flash_mla_prefill),)
MHA = (
    Peer(CUDNN, "torch", _cudnn),
    Peer(FLASH_ATTENTION_4, "flash_attn.cute", _flash_attention_4),
)
FLEX = (
    Peer("torch's Triton", "torch", _torch_flex(None)),
    Peer("torch's FLASH", "flash_attn.cute", _torch_flex({"BACKEND": "FLASH"})),
)
