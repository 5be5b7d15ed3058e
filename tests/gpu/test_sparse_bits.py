"""What the bits of a sparse call must not depend on besides the batch (test_bits.py)."""

from dataclasses import replace

import pytest
from gpu_support import (
    assert_same_bits,
    sparse_check,
    sparse_decode,
    torch,
    without_extra,
)

from kit import SparseCase, make_sparse_inputs


def test_batch_invariance_of_query_tokens() -> None:
    """A plan has fewer parts for more query tokens; the splits of a request stay the same."""
    case = SparseCase(b=6, s_q=4, h_q=64, s_k=3000, topk=2048, lengths="random")
    inputs = make_sparse_inputs(case)
    want_out, want_lse = sparse_decode(inputs, enable_batch_invariant=True)
    for token in range(4):
        alone = replace(
            inputs,
            case=replace(case, s_q=1),
            q=inputs.q[:, token : token + 1],
            indices=inputs.indices[:, token : token + 1],
        )
        out, lse = sparse_decode(alone, enable_batch_invariant=True)
        assert_same_bits(f"out of token {token}", out, want_out[:, token : token + 1])
        assert_same_bits(f"lse of token {token}", lse, want_lse[:, :, token : token + 1])


@pytest.mark.parametrize("layout", ("v32", "model1"))
def test_what_stands_at_invalid_places_does_not_change_the_bits(layout: str) -> None:
    """Other invalid indices, other garbage past the lengths; the same valid ones at the same places."""
    case = SparseCase(b=9, s_q=2, h_q=32, topk=300, layout=layout, lengths="random", invalid=0.3)
    inputs = make_sparse_inputs(case)
    want = sparse_decode(inputs)
    slots = inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    past = torch.arange(300, device="cuda") >= inputs.topk_length[:, None, None]
    invalid = past | (inputs.indices < 0) | (inputs.indices >= slots)
    for value in (-1, 2**31 - 1, slots):
        got = sparse_decode(replace(inputs, indices=inputs.indices.masked_fill(invalid, value)))
        assert_same_bits(f"out with {value}", got[0], want[0])
        assert_same_bits(f"lse with {value}", got[1], want[1])


def test_an_extra_cache_without_indices_does_not_change_the_bits() -> None:
    case = SparseCase(
        b=9, s_q=2, h_q=64, topk=300, layout="model1", extra_topk=100, extra_lengths=(0,) * 9, sink=True
    )
    inputs = make_sparse_inputs(case)
    got, want = sparse_decode(inputs), sparse_decode(without_extra(inputs))
    sparse_check(inputs, got)
    assert_same_bits("out", got[0], want[0])
    assert_same_bits("lse", got[1], want[1])
