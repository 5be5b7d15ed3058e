"""The small cases of the table of operations, run by their kernels on the emulated device: they reach every
role and path of a kernel. Further cases are for what depends on the order in which threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import inf, nan
from typing import Any
from unittest import mock

import pytest
from emulator import Emulator

torch = pytest.importorskip("torch")

from full_cases import full_unless  # noqa: E402
from gpu_support import forced_clusters, small_plans, united_selections  # noqa: E402

import rawmla  # noqa: E402
from kit import SparseCase  # noqa: E402
from kit.flex import FlexCase  # noqa: E402
from kit.kvcache import KvCacheCase, make_kvcache_inputs  # noqa: E402
from kit.mha import MhaCase, make_mha_inputs  # noqa: E402
from kit.prefix import PrefixCase  # noqa: E402
from operations import OPERATIONS, Call, Operation  # noqa: E402
from operations.dense import SMALL as SMALL_SEGMENTS  # noqa: E402
from operations.dense import dense_call, make_dense_call  # noqa: E402
from operations.dense_backward import BackwardCase, make_dense_backward_call  # noqa: E402
from operations.flex import make_traced_call  # noqa: E402
from operations.flex_backward import make_flex_backward_call  # noqa: E402
from operations.kvcache import kvcache_call, make_kvcache_call  # noqa: E402
from operations.memory import all_canaries, between_canaries, fill_with_canaries  # noqa: E402
from operations.mla_prefill import BF16, make_prefill_call  # noqa: E402
from operations.mla_sparse import make_sparse_call  # noqa: E402
from operations.prefix import FEW, FP8_KIND, WITHOUT_OWN, make_prefix_call  # noqa: E402
from rawmla.call.memo import clear_all  # noqa: E402
from rawmla.kernels import mha_decode  # noqa: E402


def labels_alone(emulator: Emulator) -> Any:
    """Inside, launches are noted and kernels do not run."""
    return mock.patch.object(emulator, "run", lambda spec, *_: emulator.launched.append(spec.label))


def names(emulator: Emulator) -> list[str]:
    """Names of the kernels that ran."""
    return [label.partition("[")[0] for label in emulator.launched]


@pytest.fixture
def clusters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls go to the kernel for clusters if the operation says so."""
    with forced_clusters() if request.getfixturevalue("operation").clusters else nullcontext():
        yield


def checked(emulator: Emulator, call: Call, operation: Operation | None = None) -> None:
    """Make a call, into slices of larger buffers if the operation takes some, and check its results."""
    outputs, pairs = {}, []
    if operation is not None and operation.out is not None:
        with labels_alone(emulator):
            results = call.run()
        for name, result in zip(operation.outputs, results, strict=False):
            pairs.append(between_canaries(result, operation.out(result)))
            outputs[name] = pairs[-1][1].copy_(result)
    emulator.launched.clear()
    call.check(call.run(**outputs))
    for buffer, given in pairs:
        fill_with_canaries(given)
        assert all_canaries(buffer), "the call wrote outside an output"


# ---- small cases

SMALL = [(operation, case) for operation in OPERATIONS for case in operation.small_cases or operation.cases]


def is_quick(pair: tuple[Operation, Any]) -> bool:
    """Of the gradients of dense attention in any and in a fixed order, one by turns; two thirds of those of
    flex attention.
    """
    operation, case = pair
    number = operation.small_cases.index(case) if case in operation.small_cases else 0
    if operation.name.startswith("flex_backward"):
        return number % 3 != (2 if operation.any_framework else 0)
    twin = replace(case, deterministic=not case.deterministic) if isinstance(case, BackwardCase) else None
    return twin not in operation.small_cases or number % 4 in (0, 3)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("operation", "case"),
    [
        pytest.param(
            *pair, id=f"{pair[0].name}-{pair[1].id}", marks=[] if is_quick(pair) else pytest.mark.full
        )
        for pair in SMALL
    ],
)
def test_small_case(emulator: Emulator, operation: Operation, case: Any) -> None:
    emulator.sm_count = 8
    checked(emulator, operation.make(case, "cpu"), operation)
    assert any(label.startswith(operation.kernels) for label in emulator.launched), emulator.launched


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_small_cases_reach_all_kernels(emulator: Emulator, operation: Operation) -> None:
    assert operation.kernels
    emulator.sm_count = 8
    with labels_alone(emulator):
        for case in operation.small_cases or operation.cases:
            operation.make(case, "cpu").run()
    for kernel in operation.kernels:
        assert any(label.startswith(kernel) for label in emulator.launched), kernel


# ---- further schedules

OF_192 = MhaCase(b=1, s_q=150, s_k=200, h_q=2, h_kv=1, d_qk=192, d_v=128, causal=True)
OF_256 = MhaCase(b=1, s_q=100, s_k=150, h_q=1, h_kv=1, d_qk=256, d_v=256, dtype="float16", window=(60, 10))
OF_FLEX: dict[str, Any] = {"b": 1, "h_q": 2, "h_kv": 1, "s_q": 200, "s_k": 300, "mask": "documents"}
SCHEDULES: tuple[tuple[Any, Any], ...] = (
    *(
        (make_dense_call, case)
        for case in (
            MhaCase(b=2, s_q=150, s_k=300, h_q=2, h_kv=2, causal=True, layout="heads"),
            MhaCase(**SMALL_SEGMENTS, h_q=8, h_kv=2, causal=True),
            MhaCase(b=1, s_q=200, s_k=300, h_q=2, h_kv=2, d_qk=64, d_v=64, causal=True),
        )
    ),
    *((make_prefix_call, PrefixCase(**FEW, **source)) for source in ({}, {"x": 16}, FP8_KIND)),
    (make_traced_call, FlexCase(b=2, h_q=2, h_kv=2, s_q=140, s_k=270, mask="documents", score="nested")),
    *(
        (make_dense_backward_call, BackwardCase(case, deterministic=ordered))
        for ordered in (False, True)
        for case in (
            MhaCase(b=2, s_q=150, s_k=300, h_q=2, h_kv=2, causal=True, layout="heads"),
            MhaCase(b=1, s_q=200, s_k=300, h_q=2, h_kv=1, d_qk=64, d_v=64, window=(30, 5)),
            OF_192,
            OF_256,
        )
    ),
    *(
        (make_flex_backward_call, BackwardCase(FlexCase(**OF_FLEX, score=score), "both", ordered))
        for score, ordered in (("head scale", False), ("query scale", True))
    ),
)
"""What makes the call of a case, and the case."""


@pytest.mark.parametrize(
    "seeds", full_unless(lambda seeds: 2 in seeds, ((2, 3), (4, 5))), ids=lambda seeds: f"seeds {seeds}"
)
@pytest.mark.parametrize(("make", "case"), SCHEDULES, ids=lambda x: getattr(x, "id", ""))
def test_other_schedules(emulator: Emulator, make: Any, case: Any, seeds: tuple[int, ...]) -> None:
    for emulator.seed in seeds:
        checked(emulator, make(case, "cpu"))


def test_other_schedules_of_clusters(emulator: Emulator) -> None:
    emulator.sm_count = 8
    case = SparseCase(b=1, h_q=128, s_k=200, topk=140, layout="v32")
    with forced_clusters():
        for emulator.seed in (2, 3, 4):
            checked(emulator, make_sparse_call(case, "cpu"))


def test_turns_without_own_keys(emulator: Emulator) -> None:
    """Lanes of the loader that look for its turn late, when the gatherer has taken the next one: these seeds
    delay them.
    """
    case = PrefixCase(**WITHOUT_OWN, x=16, h_q=1, h_kv=1)
    for emulator.seed in (8, 21, 24):
        checked(emulator, make_prefix_call(case, "cpu"))


# ---- paths that need a device of another size, or other numbers


def test_splits(emulator: Emulator) -> None:
    """Of the keys of few tiles."""
    emulator.sm_count = 8
    case = MhaCase(b=1, s_q=40, s_k=2100, h_q=1, h_kv=1, causal=True, sink="float32")
    checked(emulator, make_dense_call(case, "cpu"))
    assert names(emulator) == ["mha_forward", "mha_combine"]


@pytest.mark.parametrize("more", ({}, {"d_qk": 64, "d_v": 64}), ids=("d 128", "d 64"))
def test_references_rise(emulator: Emulator, more: dict[str, Any]) -> None:
    """Scores grow from key to key, to many times what the first block has."""
    inputs = make_mha_inputs(MhaCase(b=1, s_q=600, s_k=1100, h_q=1, h_kv=1, **more), "cpu")
    inputs.q.mul_(4)
    inputs.k.mul_(torch.linspace(0.1, 3, 1100).bfloat16()[:, None, None])
    checked(emulator, dense_call(inputs))


@pytest.mark.parametrize("topk", (64, 140))
def test_prefill_in_chunks(emulator: Emulator, topk: int) -> None:
    """A chunk has a plan, attention, and the combine where a token has more than one block."""
    case = SparseCase(b=10, h_q=66, s_k=90, topk=topk, lengths="random", **BF16)
    with small_plans(max_batch=4):
        checked(emulator, make_prefill_call(case, "cpu"))
    assert names(emulator) == ["mla_metadata", "mla_sparse_bf16", "mla_combine"][: 2 + (topk > 64)] * 3


def test_united_selections(emulator: Emulator) -> None:
    """Chunk after chunk of groups of four tokens, then the token that is left."""
    emulator.sm_count = 8
    case = SparseCase(b=13, h_q=16, s_k=41, topk=70, duplicates=0.3, lengths="random", sink=True, **BF16)
    with united_selections(scratch_bytes=1 << 12, tokens=1):
        checked(emulator, make_prefill_call(case, "cpu"))
    group = ["mla_unite_selections", "mla_metadata", "mla_sparse_bf16", "mla_combine"]
    assert names(emulator) == ["mla_find_not_finite", *group, *group, *group[1:]]


# ---- attention over caches


@pytest.mark.parametrize("cache_dtype", (None, "float8_e4m3fn"))
@pytest.mark.parametrize("spoiler", (nan, inf))
def test_queries_that_are_no_numbers(emulator: Emulator, spoiler: float, cache_dtype: str | None) -> None:
    """Their rows are NaN and no others, whether their keys are shared among CTAs or not."""
    for num_splits in (0, 1):
        case = KvCacheCase((700, 5), cache_dtype=cache_dtype, h_q=2, h_kv=1, num_splits=num_splits)
        inputs = make_kvcache_inputs(case, "cpu")
        inputs.q[0, 0, 1, 3] = spoiler
        out, lse = kvcache_call(inputs).run()
        assert bool(out[0, 0, 1].isnan().all()) and bool(lse[0, 1, 0].isnan())
        assert bool(out[0, 0, 0].isfinite().all()) and bool(out[1].isfinite().all())


@pytest.mark.parametrize(
    "hidden", ({"window_size": (3, 0)}, {"cache_leftpad": torch.tensor([12]).int()}), ids=str
)
def test_new_tokens_that_no_query_sees(emulator: Emulator, hidden: dict[str, Any]) -> None:
    """They are appended whatever they hold, and do not reach results."""
    case = KvCacheCase((4,), s_q=1, new=20, h_q=1, h_kv=1, page=None)
    inputs = make_kvcache_inputs(case, "cpu")
    inputs.v[0, :5] = nan
    out, _ = kvcache_call(inputs).run(**hidden)
    assert bool(out.isfinite().all()) and bool(inputs.v_cache[0, 4:9].isnan().all())


def test_whole_pairs_by_fewer_ctas(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attends several tiles of queries, one after the other, and rows keep their bits."""
    case = KvCacheCase((90, 200), q_lengths=(7, 70), h_q=4, h_kv=2, page=8, causal=True, num_splits=1)
    call = make_kvcache_call(case, "cpu")
    expected = call.run()
    monkeypatch.setattr(mha_decode, "MOST_WHOLE_CTAS", 9)  # for three tiles of two requests and two heads
    clear_all()
    assert all(map(torch.equal, call.run(), expected))
    checked(emulator, call)


def test_many_requests(emulator: Emulator) -> None:
    """A thread counts the blocks of two requests; some have no keys, and some no queries."""
    emulator.sm_count = 5
    lengths = (*(number % 67 - 1 for number in range(140)), 900)
    queries = tuple(number % 3 for number in range(len(lengths)))
    case = KvCacheCase(lengths, q_lengths=queries, h_q=2, h_kv=2, d_qk=64, d_v=64, causal=True)
    checked(emulator, make_kvcache_call(case, "cpu"))


def test_requests_of_one_length_are_cut_alike(emulator: Emulator) -> None:
    """Two multiprocessors share the five blocks of a request and a head: equal requests get the same bits."""
    emulator.sm_count = 8
    case = KvCacheCase((320, 320), h_q=2, h_kv=2, page=None)
    inputs = make_kvcache_inputs(case, "cpu")
    for x in (inputs.q, inputs.k_cache, inputs.v_cache):
        x[1] = x[0]
    out, lse = kvcache_call(inputs).run()
    assert names(emulator) == ["mha_decode", "mha_decode_combine"]
    assert torch.equal(out[0], out[1]) and torch.equal(lse[0], lse[1])


def test_decoding_beside_dense_attention(emulator: Emulator) -> None:
    """Neither needs the other's end: here dense attention runs first, and the combine after both."""
    late: list[tuple[Any, ...]] = []
    run = emulator.run

    def run_late(spec: Any, *launch: Any) -> None:
        if spec.name == "mha_decode":
            late.append((spec, *launch))
            return
        run(spec, *launch)
        while late:
            run(*late.pop())

    case = KvCacheCase((700, 90, 0, 300), q_lengths=(1, 70, 2, 80), h_q=2, h_kv=1, causal=True)
    with mock.patch.object(emulator, "run", run_late):
        checked(emulator, make_kvcache_call(case, "cpu"))
    assert names(emulator) == ["mha_forward", "mha_decode", "mha_decode_combine"]


# ---- lists of blocks that a user wrote


def flex_gradients(emulator: Emulator, n: int, mask: Any, seed: int, **options: Any) -> tuple[Any, ...]:
    """dq, dk and dv of one head."""
    q, k, v, dout = torch.randn(4, 1, 1, n, 32).half()
    emulator.seed = seed
    out, lse = rawmla.flex_attention(q, k, v, None, mask, return_lse=True)
    return rawmla.flex_attention_backward(dout, q, k, v, out, lse, None, mask, **options)[:3]


@pytest.mark.parametrize("form", ("both lists", "by columns"))
def test_a_block_named_twice_ends(emulator: Emulator, form: str) -> None:
    """In a fixed order a tile waits until others have added: a list of the user's may count them wrong."""
    n = 384
    counts = torch.tensor([[[1, 1, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    if form == "both lists":
        lists = {"full_kv_num_blocks": counts, "full_kv_indices": indices}
        mask = rawmla.BlockMask.from_kv_blocks(counts, indices, **lists, seq_lengths=(n, n))
    else:
        q_counts = torch.tensor([[[3, 1, 1]]], dtype=torch.int32)
        q_indices = torch.tensor([[[[0, 0, 1], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
        mask = rawmla.BlockMask((n, n), counts, indices, q_num_blocks=q_counts, q_indices=q_indices)
    gradients = flex_gradients(emulator, n, mask, 1, deterministic=True)
    assert all(x.isfinite().all() for x in gradients)


def test_keys_that_no_block_lists(emulator: Emulator) -> None:
    """A tile of them waits for its copies before it ends: the next CTA has the same shared memory."""
    n = 512
    counts, indices = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    mask = rawmla.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(n, n))
    for seed in range(2, 8):
        for gradient in flex_gradients(emulator, n, mask, seed)[1:]:
            assert gradient[..., :128, :].any() and not gradient[..., 128:, :].any()


def test_numbers_that_are_no_blocks_are_skipped(emulator: Emulator) -> None:
    """They would be addresses of what the backward adds; and a count is no longer than its column."""
    n = 384
    counts = torch.tensor([[[1, 2, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    clean = rawmla.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(n, n))
    listed = torch.arange(3) < clean.q_num_blocks[..., None]
    of_columns = {
        "q_num_blocks": torch.full_like(counts, 2**31 - 1),
        "q_indices": clean.q_indices.where(listed, torch.tensor([-1, 3, -(2**31)], dtype=torch.int32)),
    }
    q, k, v, dout = torch.randn(4, 1, 1, n, 32).half()
    out, lse = rawmla.flex_attention(q, k, v, None, clean, return_lse=True)
    found = []
    for mask in (clean, rawmla.BlockMask((n, n), counts, indices, **of_columns)):
        given = (dout, q, k, v, out, lse, None, mask)
        found.append(rawmla.flex_attention_backward(*given, deterministic=True)[:3])
    for one, other in zip(*found, strict=True):
        assert bool(one.any()) and torch.equal(one, other)
