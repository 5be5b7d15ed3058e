"""Dense decoding at the edges: empty requests, huge caches, poison, strides, odd shapes, outputs given."""

import math
from dataclasses import replace

import pytest
from gpu_support import assert_same_bits, check, decode, reference, torch

from kit import DenseCase, make_dense_inputs
from kit.generators import GARBAGE_PAGE

EDGE_CASES = (
    DenseCase(b=4, s_q=4, h_q=16, lengths=(0, 1, 3, 5), causal=True),
    DenseCase(b=5, s_q=5, h_q=128, lengths=(64, 2, 65, 0, 127), causal=True, sharp=True),
    DenseCase(b=2, s_q=128, h_q=16, lengths=(100, 777), causal=True),
    DenseCase(b=2, s_q=300, h_q=8, lengths=(299, 1111), causal=True, sharp=True),
    DenseCase(b=3, s_q=2, h_q=8, lengths=(63, 64, 65), page_block_size=32),
    DenseCase(b=3, h_q=64, lengths=(127, 128, 129), page_block_size=128),
    DenseCase(b=3, h_q=128, lengths=(511, 512, 1025), page_block_size=512, dtype="float16"),
    DenseCase(b=2, h_q=256, s_k=1000),
    DenseCase(b=2, s_q=2, h_q=96, h_kv=3, s_k=1000, causal=True, sharp=True),
    DenseCase(b=7, h_q=8, s_k=600, varlen=True, block_gap=16, table_gap=5),
    DenseCase(b=7, s_q=2, h_q=32, h_kv=2, s_k=600, varlen=True, block_gap=64, table_gap=1, dtype="float16"),
    DenseCase(b=4, h_q=128, s_k=2000, varlen=True, page_block_size=16, block_gap=1, sharp=True),
    DenseCase(b=1, h_q=128, s_k=131072, sharp=True),
    DenseCase(b=1, h_q=16, s_k=131072, d_qk=512, dtype="float16", sharp=True),
    DenseCase(b=300, h_q=16, s_k=200, varlen=True, zero_lengths=True),
    DenseCase(b=70, h_q=33, s_k=2000, varlen=True, zero_lengths=True, sharp=True),
    DenseCase(b=20, s_q=4, h_q=33, s_k=3000, varlen=True, causal=True, dtype="float16"),
)


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_edge_case(case: DenseCase, form: str) -> None:
    inputs = make_dense_inputs(case)
    check(inputs, decode(inputs, form))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("s_q", (1, 2))
@pytest.mark.parametrize("h_q", (16, 128))
def test_random_zero_lengths(h_q: int, s_q: int, dtype: str) -> None:
    case = DenseCase(
        b=128, s_q=s_q, h_q=h_q, s_k=4096, varlen=True, zero_lengths=True, causal=True, dtype=dtype
    )
    inputs = make_dense_inputs(case)
    empty = [i for i, length in enumerate(inputs.lengths) if length == 0]
    assert empty
    out, lse = decode(inputs, "object")
    check(inputs, (out, lse))
    assert_same_bits("out of empty requests", out[empty], torch.zeros_like(out[empty]))
    assert bool((lse[empty] == float("inf")).all())


@pytest.mark.parametrize("lengths", ((0,), (0, 0, 0), (0,) * 200), ids=len)
def test_every_request_empty(lengths: tuple[int, ...]) -> None:
    inputs = make_dense_inputs(DenseCase(b=len(lengths), h_q=128, lengths=lengths))
    for form in ("object", "tensors"):
        out, lse = decode(inputs, form)
        assert_same_bits("out", out, torch.zeros_like(out))
        assert bool((lse == float("inf")).all())


@pytest.mark.parametrize("gap", (0, 8))
def test_cache_past_2_31_elements(gap: int) -> None:
    """The live pages lie at both ends of a cache of more than 2**31 elements (4 GiB), the rest is poison."""
    case = DenseCase(b=6, s_q=2, h_q=128, s_k=3000, varlen=True, causal=True, block_gap=gap)
    small = make_dense_inputs(case)
    live = small.k_cache.shape[0]
    num_blocks = 2**31 // (64 * 576) + 2 * live
    storage = torch.full((num_blocks, 64 + gap, 1, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert storage.numel() > 2**31
    k_cache = storage[:, :64]
    half = live // 2
    k_cache[:half] = small.k_cache[:half]
    shift = num_blocks - live
    k_cache[half + shift :] = small.k_cache[half:]
    table = small.block_table
    moved = torch.where((table >= half) & (table < live), table + shift, table)
    large = replace(small, k_cache=k_cache, block_table=moved.int())
    check(large, decode(large))


@pytest.mark.parametrize("poison", ("nan", "inf"))
@pytest.mark.parametrize("page_block_size", (16, 64, 256))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_poison_is_never_read(dtype: str, page_block_size: int, poison: str) -> None:
    case = DenseCase(
        b=9,
        s_q=2,
        h_q=64,
        lengths=(1, 15, 16, 17, 63, 64, 65, 250, 700),
        page_block_size=page_block_size,
        dtype=dtype,
        block_gap=32,
        table_gap=3,
    )
    for causal in (False, True):
        poisoned = make_dense_inputs(replace(case, causal=causal, poison=poison))
        clean = make_dense_inputs(replace(case, causal=causal, poison="none"))
        got, want = decode(poisoned), decode(clean)
        check(poisoned, got)
        assert_same_bits(f"{case.id} out with and without poison", got[0], want[0])
        assert_same_bits(f"{case.id} lse with and without poison", got[1], want[1])


def test_nan_inside_a_request_stays_in_its_request() -> None:
    inputs = make_dense_inputs(DenseCase(b=5, h_q=16, lengths=(700, 650, 1, 64, 900)))
    want, want_lse = decode(inputs)
    page = int(inputs.block_table[1, 5])
    inputs.k_cache[page, 3] = float("nan")
    out, lse = decode(inputs)
    assert bool(out[1].isnan().all()) and bool(lse[1].isnan().all())
    others = [0, 2, 3, 4]
    assert_same_bits("other requests' out", out[others], want[others])
    assert_same_bits("other requests' lse", lse[others], want_lse[others])


@pytest.mark.parametrize("h_q", (8, 16, 63, 128))
def test_out_as_a_slice_between_canaries(h_q: int) -> None:
    inputs = make_dense_inputs(DenseCase(b=6, s_q=3, h_q=h_q, s_k=700, varlen=True, causal=True))
    canary = -7.0
    buffer = torch.full((8, 5, h_q + 24, 528), canary, dtype=torch.bfloat16, device="cuda")
    given = buffer[1:7, 1:4, 8 : 8 + h_q, 8:520]
    given.fill_(float("nan"))
    out, lse = decode(inputs, out=given)
    assert out is given
    check(inputs, (out, lse))
    given.fill_(canary)
    assert bool((buffer == canary).all()), "the call wrote outside `out`"


def test_query_expanded_over_the_batch() -> None:
    """One request's q for all of them: a batch stride of 0."""
    inputs = make_dense_inputs(DenseCase(b=4, h_q=16, s_k=500, varlen=True))
    expanded = replace(inputs, q=inputs.q[:1].expand(4, -1, -1, -1))
    check(expanded, decode(expanded))


def test_block_table_much_wider_than_the_lengths() -> None:
    """The engine's maximum, not the batch's: 131,072 tokens of table for requests of a few hundred."""
    inputs = make_dense_inputs(DenseCase(b=3, s_q=2, h_q=16, s_k=300, varlen=True, causal=True))
    wide = torch.full((3, 2048), GARBAGE_PAGE, dtype=torch.int32, device="cuda")
    wide[:, : inputs.block_table.shape[1]] = inputs.block_table
    widened = replace(inputs, block_table=wide)
    check(widened, decode(widened))


def test_softmax_scale() -> None:
    inputs = make_dense_inputs(DenseCase(b=3, s_q=2, h_q=16, s_k=300, varlen=True, causal=True))
    for scale in (1.0, 0.5, 1e-4):
        got = decode(inputs, softmax_scale=scale)
        check(inputs, got, reference(inputs, softmax_scale=scale))


@pytest.mark.parametrize(
    ("s_q", "h_q", "h_kv"), ((1, 15, 1), (2, 16, 2), (1, 17, 1), (2, 32, 2), (3, 5, 1), (3, 11, 1))
)
def test_query_rows_around_the_tiles(s_q: int, h_q: int, h_kv: int) -> None:
    """Of 16 rows for a KV head, one less and more, and of more tokens than one."""
    inputs = make_dense_inputs(
        DenseCase(b=5, s_q=s_q, h_q=h_q, h_kv=h_kv, s_k=900, page_block_size=32, varlen=True, causal=True)
    )
    check(inputs, decode(inputs))


@pytest.mark.parametrize(("b", "s_q", "h_q"), ((3, 16, 128), (140, 1, 16)))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("rise", (0.3, 4.0, 7.5, 30.0, -4.0))
def test_scores_that_rise_from_block_to_block(rise: float, dtype: str, b: int, s_q: int, h_q: int) -> None:
    """By `rise` powers of two: the softmax's reference has to follow them, seldom or in every block.

    Rows leave room for four parts, or requests are as many as parts: most of a request's blocks are in one
    split.
    """
    inputs = make_dense_inputs(DenseCase(b=b, s_q=s_q, h_q=h_q, s_k=1500, varlen=True, dtype=dtype))
    inputs.q.mul_(0.1)[..., -1] = 1
    for request, length in enumerate(inputs.lengths):
        for block in range(-(-length // 64)):
            page = int(inputs.block_table[request, block])
            inputs.k_cache[page, :, :, -1] += rise * math.log(2) * block
    got = decode(inputs, softmax_scale=1.0)
    check(inputs, got, reference(inputs, softmax_scale=1.0))


@pytest.mark.parametrize("exponent", (-90, -24, 24, 90))
def test_magnitude_of_the_values(exponent: int) -> None:
    """Splits of split requests keep their powers of two, though float16 would not hold the values."""
    inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=3000))
    factor = 2.0**exponent
    out, lse = decode(
        replace(inputs, k_cache=inputs.k_cache * factor), softmax_scale=inputs.q.shape[-1] ** -0.5 / factor
    )
    check(inputs, (out / factor, lse))


@pytest.mark.parametrize("h_q", (16, 128), ids=("few_rows", "tile"))
def test_nan_in_a_token_that_a_query_does_not_see(h_q: int) -> None:
    """The newest token's V has NaN in one column. By causality only the last query token sees it.

    That column is NaN for the others too, since 0 times NaN is NaN, and nothing else of theirs changes.
    """
    case = DenseCase(b=2, s_q=3, h_q=h_q, lengths=(70, 200), causal=True)
    inputs = make_dense_inputs(case)
    want_out, want_lse = decode(inputs)
    page, row = divmod(69, case.page_block_size)
    inputs.k_cache[inputs.block_table[0, page].long(), row, :, 5] = float("nan")
    out, lse = decode(inputs)
    others = [column for column in range(512) if column != 5]
    assert_same_bits("older query tokens", out[0, :2][..., others], want_out[0, :2][..., others])
    assert_same_bits("their lse", lse[0, :, :2], want_lse[0, :, :2])
    assert bool(out[0, 2].isnan().all()) and bool(out[0, :2, :, 5].isnan().all())
    assert_same_bits("the other request", out[1], want_out[1])
