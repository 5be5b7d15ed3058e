"""Other implementations on the same inputs, for --compare: whichever of them this environment can import."""

from collections.abc import Callable

from .cases import D_V, DecodeCase, PrefillCase, SparseCase
from .measure import CALLS_PER_GRAPH, DecodeInputs, attention_of_request, repeat, time_graph
from .prefill_measure import PrefillArrays, calls_per_graph
from .sparse_measure import SparseArrays

FA3_SPLITS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Split counts tried for FlashAttention-3 (0: its own choice); the best one counts."""

Peer = Callable[..., float]
"""From a case, its inputs and the number of replays to µs."""


def _flash_mla(case: DecodeCase, inputs: DecodeInputs, replays: int) -> float:
    import flash_mla

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

    return time_graph(repeat(call, CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays).us


def _flash_attention_3(case: DecodeCase, inputs: DecodeInputs, replays: int) -> float:
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache
    q_nope, q_rope = inputs.q[..., :D_V], inputs.q[..., D_V:].contiguous()
    v_cache, k_rope = inputs.k_cache[..., :D_V], inputs.k_cache[..., D_V:]

    def best_of(splits: int) -> float:
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

        return time_graph(repeat(call, CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays).us

    return min(best_of(splits) for splits in FA3_SPLITS)


def _torch_naive(case: DecodeCase, inputs: DecodeInputs, replays: int) -> float:
    def call(_: int) -> None:
        for request in range(case.b):
            attention_of_request(case, inputs, request)

    return time_graph(lambda: call(0), 1, replays).us


PEERS: dict[str, tuple[str, Peer]] = {
    "FlashMLA": ("flash_mla", _flash_mla),
    "FlashAttention-3": ("flash_attn_interface or flash_attn", _flash_attention_3),
    "torch float32, a request at a time": ("torch", _torch_naive),
}
"""Name -> (modules it is imported from, its timing function)."""


def _flash_mla_sparse(case: SparseCase, inputs: SparseArrays, replays: int) -> float:
    import flash_mla
    from torch.nn.functional import pad

    q = pad(inputs.q, (0, 0, 0, -case.h_q % 64))  # it has 64 and 128 heads; the caller pads
    meta, _ = flash_mla.get_mla_metadata()

    def call(_: int) -> None:
        flash_mla.flash_mla_with_kvcache(
            q, inputs.k_cache, None, None, D_V, meta, None, **inputs.keywords(case, 0)
        )

    return time_graph(repeat(call, CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays).us


SPARSE_PEERS: dict[str, tuple[str, Peer]] = {
    "FlashMLA": ("flash_mla", _flash_mla_sparse),
}


def _flash_mla_prefill(case: PrefillCase, inputs: PrefillArrays, replays: int) -> float:
    import flash_mla
    from torch.nn.functional import pad

    q = pad(inputs.q, (0, 0, 0, -case.h_q % 64))  # as for decoding

    def call(_: int) -> None:
        flash_mla.flash_mla_sparse_fwd(q, inputs.kv_sets[0], inputs.indices, case.d_qk**-0.5)

    count = calls_per_graph(case)
    return time_graph(repeat(call, count), count, replays).us


PREFILL_PEERS: dict[str, tuple[str, Peer]] = {
    "FlashMLA": ("flash_mla", _flash_mla_prefill),
}


def _peers_of(case: DecodeCase | SparseCase | PrefillCase) -> dict[str, tuple[str, Peer]]:
    """The peers that have the operation of a case. None has prefill from an FP8 cache: its row has the time
    of gathering first.
    """
    if isinstance(case, PrefillCase):
        return PREFILL_PEERS if case.layout == "bf16" else {}
    return SPARSE_PEERS if isinstance(case, SparseCase) else PEERS


def time_peers(
    case: DecodeCase | SparseCase | PrefillCase,
    inputs: DecodeInputs | SparseArrays | PrefillArrays,
    replays: int,
) -> dict[str, float | str]:
    """Microseconds of each importable peer on these inputs, or the text of what went wrong with it."""
    answer: dict[str, float | str] = {}
    for name, (modules, run) in _peers_of(case).items():
        try:
            answer[name] = run(case, inputs, replays)
        except ImportError:
            answer[name] = f"{modules}: not importable here"
        except Exception as error:  # a peer's failure is a result to report, whatever its kind
            answer[name] = f"{type(error).__name__}: {error}"
    return answer
