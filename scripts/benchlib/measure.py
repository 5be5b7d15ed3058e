"""Timing on the GPU through torch: CUDA graphs, medians, and the ceilings of the same run.

Needs torch with a Hopper GPU. Times are in microseconds.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import rawmla

from . import cache_cases
from .cases import D_V, DecodeCase, MetadataCase, PrefillCase, SparseCase

CALLS_PER_GRAPH = 10
WARMUP_REPLAYS = 2
# After memory was allocated, the first 5 to 10 ms of 27 us calls have been seen 2 us slower than the rest.
WARMUP_SECONDS = 0.02
REST_SECONDS = 0.2
# An H200 holds its full clock for 35 to 80 ms of dense decoding with 128 heads, then its power limit slows
# it. Warm-up and timed replays that last longer than this together are parted by a rest, so that the timed
# ones begin with the power budget of a chip at rest. Shorter ones do not reach the limit, and the first
# replay after a rest has been seen 3 us a call slower.
FULL_CLOCK_SECONDS = 0.03
# Of rest, times as long as what ran before it: two replays of warm-up; and the timed ones, for the next case.
COOL_DOWN = 10
MATMUL_SIZE = 8192
COPY_BYTES = 2 << 30
COLD_L2_FACTOR = 3
MAX_ROTATED_SETS = 64
GARBAGE_PAGE = 2147480000
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
METADATA_GRAPH_CALLS = (20, 120)
HOST_BURSTS = 10
HOST_CALLS = 500  # of a burst


@dataclass(frozen=True)
class Timing:
    """Time of one call over several graph replays, in microseconds."""

    us: float
    us_min: float
    us_max: float

    @staticmethod
    def of(samples: list[float]) -> "Timing":
        """Median and range of the samples."""
        return Timing(statistics.median(samples), min(samples), max(samples))


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


def time_graph(calls: Callable[[], None], count: int, replays: int) -> Timing:
    """Capture `calls` (which enqueues `count` calls) in a CUDA graph, warm up with it, and time replays back
    to back by events. Idles before them if warm-up and replays would last longer than FULL_CLOCK_SECONDS
    together, and for COOL_DOWN times as long as the replays before it returns.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            calls()
        begin = time.perf_counter()
        done = 0
        while done < WARMUP_REPLAYS or time.perf_counter() - begin < WARMUP_SECONDS:
            graph.replay()
            stream.synchronize()
            done += 1
        warmup = time.perf_counter() - begin
        replay = warmup / done
        if warmup + replays * replay > FULL_CLOCK_SECONDS:
            time.sleep(COOL_DOWN * WARMUP_REPLAYS * replay)
        samples = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / count)
        time.sleep(COOL_DOWN * sum(samples) * count * 1e-6)
    torch.cuda.current_stream().wait_stream(stream)
    return Timing.of(samples)


def rest() -> None:
    """Let the GPU idle, so that the heat and power of one case do not slow the next."""
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)


def repeat(call: Callable[[int], Any], count: int) -> Callable[[], None]:
    """A function that makes `count` calls, giving each its number."""

    def calls() -> None:
        for i in range(count):
            call(i)

    return calls


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
    """Microseconds of one metadata kernel: the slope between graphs of two lengths, free of a graph's fixed
    cost.
    """
    buffers = plan(case, cache_seqlens)

    def call(_: int) -> None:
        plan(case, cache_seqlens, buffers)

    few, many = METADATA_GRAPH_CALLS
    short = time_graph(repeat(call, few), 1, replays).us
    long = time_graph(repeat(call, many), 1, replays).us
    return (long - short) / (many - few)


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
    for request in {0, lengths.index(max(lengths))}:
        want = attention_of_request(case, inputs, request)
        error = float((out[request].float() - want).norm() / want.norm())
        assert error < 0.01, f"{case.id}: request {request} has a relative error of {error}"
        worst = max(worst, error)
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


def time_decode(case: DecodeCase, replays: int) -> tuple[dict[str, Any], DecodeInputs]:
    """Measure one case: identical calls, calls over rotated pages where the data would fit in L2, and its
    metadata.
    """
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
    rest()
    timing = time_graph(repeat(lambda _: call(0), CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays)
    row: dict[str, Any] = {**case.fields(), **vars(timing), "rel_l2": error}
    if sets > 1:
        row["cold_us"] = time_graph(repeat(call, sets), sets, replays).us
    row["meta_us"] = time_metadata(case, inputs.cache_seqlens, replays)
    row["tflops"] = case.flops() / row["us"] / 1e6
    row["gbps"] = case.bytes_moved() / row["us"] / 1e3
    return row, inputs


def time_metadata_case(case: MetadataCase, replays: int) -> dict[str, Any]:
    """Measure the metadata kernel alone at one batch."""
    cache_seqlens = torch.tensor(case.lengths(), dtype=torch.int32, device="cuda")
    return {**case.fields(), "us": time_metadata(case, cache_seqlens, replays)}


def time_cache_case(case: cache_cases.Case, replays: int) -> dict[str, Any]:
    """Measure one of the operations around decoding."""
    call = cache_cases.make_call(case)
    rest()
    timing = time_graph(repeat(lambda _: call(), CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays)
    fields = case.fields()
    row = {"case": case.id, "op": fields["family"], **fields, **vars(timing)}
    row["gbps"] = case.bytes_moved() / timing.us / 1e3
    return row


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
    """Host microseconds of one eager decode call, warm, metadata given, on a small case; the queue never
    fills. Median and ninth decile of all calls, and the median of the quietest burst of them: a host with
    neighbours is slow for hundredths of a second at a time.
    """
    case = DecodeCase(2, 1, 1024, 16, causal=False, varlen=False)
    inputs = make_inputs(case)
    meta, num_splits = plan(case, inputs.cache_seqlens)
    table = inputs.block_tables[0]

    def burst() -> list[float]:
        samples = []
        for i in range(HOST_CALLS):
            if i % 20 == 0:
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            rawmla.flash_mla_with_kvcache(
                inputs.q, inputs.k_cache, table, inputs.cache_seqlens, D_V, meta, num_splits
            )
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
        "decode_call_us": statistics.median(calls),
        "decode_call_p90_us": calls[int(0.9 * len(calls))],
        "decode_call_quiet_us": min(map(statistics.median, bursts)),
    }
