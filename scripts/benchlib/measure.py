"""Measuring a case: dense decoding, what all attention cases share, the metadata kernel, ceilings, host time.

Needs torch with a Hopper GPU. Times are in microseconds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import rawmla
from kit.generators import GARBAGE_PAGE

from . import cache_cases
from .against import WAYS
from .cases import D_V, DecodeCase, MetadataCase, PrefillCase, SparseCase
from .columns import OURS, Row
from .families import Settings
from .flex_cases import FlexCase
from .mha_cases import MhaCase
from .peers import Peer
from .prefix_cases import PrefixCase
from .report import one_line
from .timing import CALLS_PER_GRAPH, REST_SECONDS, Graph, repeat, rest, slope, time_graph

MATMUL_SIZE = 8192
COPY_BYTES = 2 << 30
COLD_L2_FACTOR = 3
MAX_ROTATED_SETS = 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
METADATA_GRAPH_CALLS = (20, 120)
HOST_BURSTS = 10
HOST_CALLS = 500  # of a burst
ROUNDS_BESIDE = 3
GRAPH_FLOPS = 5 * 10**12
"""Operations of one graph at most, unless one call has more: 8 ms or so. Replays of ten calls of 4 ms would
mostly run at the power limit, and the GPU would idle for seconds after them."""

AttentionCase = DecodeCase | SparseCase | PrefillCase | MhaCase | PrefixCase | FlexCase


@dataclass(frozen=True)
class Prepared:
    """A case that is ready to be timed: its result was right by `rel_l2`.

    `call` makes a call over one of the `sets` of pages or tokens, `calls` of them go into a graph, `more`
    measures what only this family has, given the number of replays.
    """

    inputs: Any
    call: Callable[[int], Any]
    sets: int
    rel_l2: float
    more: Callable[[int], Row]
    calls: int = CALLS_PER_GRAPH


def calls_per_graph(case: PrefillCase | MhaCase | PrefixCase | FlexCase) -> int:
    """CALLS_PER_GRAPH, or fewer calls, as many as GRAPH_FLOPS allows."""
    return max(1, min(CALLS_PER_GRAPH, GRAPH_FLOPS // case.flops()))


def time_attention(
    case: AttentionCase,
    prepare: Callable[[Any], Prepared],
    settings: Settings,
    peers: Sequence[Peer],
) -> Row:
    """Measure one case every way: without rests, rested, over rotated pages where the data would fit in L2,
    and under load; with settings.compare the other libraries beside it.
    """
    ready = prepare(case)
    graph = Graph(repeat(lambda _: ready.call(0), ready.calls), ready.calls)
    published = graph
    if ready.calls != CALLS_PER_GRAPH:
        published = Graph(repeat(lambda _: ready.call(0), CALLS_PER_GRAPH), CALLS_PER_GRAPH)
    unrested = published.without_rests(settings.replays).us
    del published
    rest()
    row: Row = {"case": case.id, **case.fields(), **vars(graph.rested(settings.replays))}
    row |= {"unrested_us": unrested, "rel_l2": ready.rel_l2}
    if ready.sets > 1:
        row["cold_us"] = time_graph(repeat(ready.call, ready.sets), ready.sets, settings.replays).us
    row |= ready.more(settings.replays)
    row["tflops"] = case.flops() / row["us"] / 1e6
    row["gbps"] = case.bytes_moved() / row["us"] / 1e3
    if settings.sustain_seconds:
        figures = graph.sustained(settings.sustain_seconds)
        row |= {f"sustained_{key}": value for key, value in figures.items()}
    if settings.compare and peers:
        row["beside"], failures = time_beside(case, ready, graph, settings, peers)
        if failures:
            row["not_compared"] = failures
    return row


def time_beside(
    case: AttentionCase, ready: Prepared, ours: Graph, settings: Settings, peers: Sequence[Peer]
) -> tuple[dict[str, Row], dict[str, str]]:
    """Our figures and those of each importable peer, medians of rounds in which all take turns in this
    process and are timed the same way; and what went wrong with the others. The load is shared out over the
    rounds.
    """
    graphs = {OURS: ours}
    failures: dict[str, str] = {}
    for peer in peers:
        try:
            graphs[peer.name] = _fastest(peer, case, ready, settings.replays)
        except ImportError:
            failures[peer.name] = f"{peer.modules}: not importable here"
        except Exception as error:  # a peer's failure is a result to report, whatever its kind
            failures[peer.name] = one_line(error)
    if len(graphs) == 1:
        return {}, failures
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in graphs}
    for _ in range(ROUNDS_BESIDE):
        for name, graph in graphs.items():
            rest()
            rested = graph.rested(settings.replays).us
            samples[name].setdefault(WAYS["rested"], []).append(rested)
        # Untimed: without it the first alone would be timed after a rest, the others behind a load.
        next(reversed(graphs.values())).without_rests(settings.replays)
        for name, graph in graphs.items():
            unrested = graph.without_rests(settings.replays).us
            samples[name].setdefault(WAYS["no rests"], []).append(unrested)
        for name, graph in graphs.items() if settings.sustain_seconds else ():
            for key, value in graph.sustained(settings.sustain_seconds / ROUNDS_BESIDE).items():
                samples[name].setdefault(f"sustained_{key}", []).append(value)
    figures: dict[str, Row] = {
        name: {key: statistics.median(values) for key, values in found.items()}
        for name, found in samples.items()
    }
    return figures, failures


def _fastest(peer: Peer, case: AttentionCase, ready: Prepared, replays: int) -> Graph:
    """The graph of a peer's calls; of several ways to make them, the fastest one's."""
    count = peer.calls_per_graph or ready.calls
    best: tuple[float, Graph] | None = None
    for call in peer.calls(case, ready.inputs):
        graph = Graph(repeat(call, count), count)
        us = graph.without_rests(replays).us
        if best is None or us < best[0]:
            best = us, graph
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class DecodeInputs:
    """Device arrays of a decode case. `block_tables` holds one table per rotated set of pages; set 0 is the
    plain case.
    """

    q: Any
    k_cache: Any
    block_tables: list[Any]
    cache_seqlens: Any


def make_inputs(case: DecodeCase, sets: int = 1, device: str = "cuda") -> DecodeInputs:
    """Inputs on a device: q normal(0, 1) clamped to [-1, 1], cache normal(0, 0.1), pages in a
    random order.

    `sets` disjoint sets of pages hold as many caches, for runs whose data must not stay in L2.
    """
    torch.manual_seed(0)
    dtype = DTYPES[case.dtype]
    page = case.page_block_size
    lengths = case.lengths()
    pages = [-(-length // page) for length in lengths]
    q = torch.randn(case.b, case.s_q, case.h_q, case.d_qk, device=device, dtype=dtype).clamp_(-1, 1)
    k_cache = torch.empty(sets * sum(pages), page, case.h_kv, case.d_qk, device=device, dtype=dtype)
    k_cache.normal_(0, 0.1)
    order = torch.randperm(k_cache.shape[0], dtype=torch.int64).to(torch.int32)
    tables = []
    start = 0
    for _ in range(sets):
        table = torch.full((case.b, max(pages)), GARBAGE_PAGE, dtype=torch.int32)
        for request, count in enumerate(pages):
            table[request, :count] = order[start : start + count]
            start += count
        tables.append(table.to(device))
    return DecodeInputs(q, k_cache, tables, torch.tensor(lengths, dtype=torch.int32, device=device))


def plan(case: DecodeCase | MetadataCase, cache_seqlens: Any, out: Any = None) -> tuple[Any, Any]:
    """Scheduling metadata of a case in tensor form, into `out` when given."""
    s_q, h_kv, invariant = 1, 1, False
    if isinstance(case, DecodeCase):
        s_q, h_kv, invariant = case.s_q, case.h_kv, case.batch_invariant
    tokens = s_q * case.h_q // h_kv
    return rawmla.get_mla_metadata(
        cache_seqlens, tokens, h_kv, case.h_q, enable_batch_invariant=invariant, out=out
    )


def time_metadata(case: DecodeCase | MetadataCase, cache_seqlens: Any, replays: int) -> float:
    """Microseconds of one metadata kernel."""
    buffers = plan(case, cache_seqlens)
    return slope(lambda _: plan(case, cache_seqlens, buffers), *METADATA_GRAPH_CALLS, replays)


def attention_of_request(case: DecodeCase, inputs: DecodeInputs, request: int) -> Any:
    """Attention of one request by plain torch operations in float32: the check of the timed kernel, [s_q,
    h_q, 512].
    """
    length = case.lengths()[request]
    pages = inputs.block_tables[0][request, : -(-length // case.page_block_size)].long()
    keys = inputs.k_cache[pages].flatten(0, 1)[:length].float().transpose(0, 1)
    per_kv = case.h_q // case.h_kv
    q = inputs.q[request].float().unflatten(1, (case.h_kv, per_kv)).permute(1, 2, 0, 3)
    scores = torch.einsum("kgsd,ktd->kgst", q, keys) * case.d_qk**-0.5
    if case.causal:
        last_visible = torch.arange(case.s_q, device=q.device)[:, None] + length - case.s_q
        scores.masked_fill_(torch.arange(length, device=q.device) > last_visible, float("-inf"))
    out = torch.einsum("kgst,ktd->kgsd", scores.softmax(-1), keys[..., :D_V])
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def check_output(case: DecodeCase, inputs: DecodeInputs, out: Any) -> float:
    """Relative L2 error of the first and the longest request against attention_of_request.

    Raises AssertionError at 1 % or NaN: the time of a wrong result means nothing.
    """
    lengths = case.lengths()
    worst = 0.0
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for request in {0, lengths.index(max(lengths))}:
            want = attention_of_request(case, inputs, request)
            error = float((out[request].float() - want).norm() / want.norm())
            assert error < 0.01, f"{case.id}: request {request} has a relative error of {error}"
            worst = max(worst, error)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    return worst


def l2_bytes() -> int:
    """Bytes of the device's L2 cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def rotated_sets(case: DecodeCase | SparseCase | PrefillCase, l2: int) -> int:
    """How many page sets keep successive calls out of L2; 1 when one call's data already exceeds it."""
    if case.bytes_moved() >= l2:
        return 1
    return min(MAX_ROTATED_SETS, -(-COLD_L2_FACTOR * l2 // case.bytes_moved()) + 1)


def prepare(case: DecodeCase) -> Prepared:
    """Inputs of a case, its plan and a first call, whose result is checked."""
    sets = rotated_sets(case, l2_bytes())
    inputs = make_inputs(case, sets)
    meta, num_splits = plan(case, inputs.cache_seqlens)

    def call(table: int) -> Any:
        return rawmla.flash_mla_with_kvcache(
            inputs.q,
            inputs.k_cache,
            inputs.block_tables[table],
            inputs.cache_seqlens,
            D_V,
            meta,
            num_splits,
            causal=case.causal,
            enable_batch_invariant=case.batch_invariant,
        )

    error = check_output(case, inputs, call(0)[0])

    def more(replays: int) -> Row:
        return {"meta_us": time_metadata(case, inputs.cache_seqlens, replays)}

    return Prepared(inputs, call, sets, error, more)


def time_metadata_case(case: MetadataCase, replays: int) -> Row:
    """Measure the metadata kernel alone at one batch. Its graphs are too short for a rest, so that both
    figures are the same.
    """
    cache_seqlens = torch.tensor(case.lengths(), dtype=torch.int32, device="cuda")
    us = time_metadata(case, cache_seqlens, replays)
    return {"case": case.id, **case.fields(), "us": us, "unrested_us": us}


def time_cache_case(case: cache_cases.Case, replays: int) -> Row:
    """Measure one of the operations around decoding."""
    call = cache_cases.make_call(case)
    rest()
    timing = time_graph(repeat(lambda _: call(), CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays)
    gbps = case.bytes_moved() / timing.us / 1e3
    return {"case": case.id, **case.fields(), **vars(timing), "gbps": gbps}


def measure_ceilings(replays: int) -> dict[str, float]:
    """This device, now: bf16 matrix product of two 8192 x 8192 matrices (TFLOP/s) and an elementwise copy
    (GB/s, bytes read plus bytes written).
    """
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    rest()
    matmul = time_graph(
        repeat(lambda _: torch.mm(a, b, out=product), CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays
    )
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = time_graph(
        repeat(lambda _: torch.add(source, 0.0, out=target), CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays
    )
    return {
        "matmul_tflops": 2 * MATMUL_SIZE**3 / matmul.us / 1e6,
        "copy_gbps": 2 * COPY_BYTES / copy.us / 1e3,
    }


def time_host() -> dict[str, float]:
    """Host microseconds of one eager decode call, warm, metadata given, on a small case."""
    case = DecodeCase(2, 1, 1024, 16, causal=False, varlen=False)
    inputs = make_inputs(case)
    meta, num_splits = plan(case, inputs.cache_seqlens)
    table = inputs.block_tables[0]

    def call() -> None:
        rawmla.flash_mla_with_kvcache(
            inputs.q, inputs.k_cache, table, inputs.cache_seqlens, D_V, meta, num_splits
        )

    return host_figures("decode", call)


def host_figures(name: str, call: Callable[[], None]) -> dict[str, float]:
    """Host microseconds of one call, warm; the queue never fills. Median and ninth decile of all calls, and
    the median of the quietest burst of them: a host with neighbours is slow for hundredths of a second at a
    time.
    """

    def burst() -> list[float]:
        samples = []
        for i in range(HOST_CALLS):
            if i % 20 == 0:
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - start) / 1e3)
        torch.cuda.synchronize()
        return samples

    burst()
    bursts = []
    for _ in range(HOST_BURSTS):
        time.sleep(REST_SECONDS)
        bursts.append(burst())
    calls = sorted(sample for samples in bursts for sample in samples)
    return {
        f"{name}_call_us": statistics.median(calls),
        f"{name}_call_p90_us": calls[int(0.9 * len(calls))],
        f"{name}_call_quiet_us": min(map(statistics.median, bursts)),
    }
