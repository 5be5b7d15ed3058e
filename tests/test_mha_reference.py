"""Dense attention of `rawmla.reference` against the reference in torch and its autograd; segments, sinks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kit.mha import flash_attn_func
from rawmla import reference

torch = pytest.importorskip("torch")

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def randn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def make(
    s_q: int, s_kv: int, h_q: int = 4, h_kv: int = 2, d_qk: int = 6, d_v: int = 5, b: tuple[int, ...] = (2,)
) -> list[np.ndarray]:
    """q, k, v and gradients of out and of lse, this as `flash_attn_func` has it."""
    shapes = ((s_q, h_q, d_qk), (s_kv, h_kv, d_qk), (s_kv, h_kv, d_v), (s_q, h_q, d_v), (h_q, s_q))
    return [randn(*b, *shape, seed=i) for i, shape in enumerate(shapes)]


def by_autograd(arrays: list[np.ndarray], **options: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """out and lse of the reference in torch, and the gradients of q, k, v and of a sink."""
    q, k, v, dout, dlse = (torch.from_numpy(x) for x in arrays)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if options.get("attn_sink") is not None:
        leaves.append(torch.from_numpy(options["attn_sink"]).requires_grad_())
        options["attn_sink"] = leaves[-1]
    if options.get("alibi_slopes") is not None:
        options["alibi_slopes"] = torch.from_numpy(options["alibi_slopes"])
    out, lse = flash_attn_func(*leaves[:3], **options)
    some = torch.isfinite(lse)
    ((out * dout).sum() + (lse[some] * dlse[some]).sum() + 0 * leaves[0].sum()).backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [x.detach().numpy() for x in (out, lse)], [x.numpy() for x in gradients]


def check(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, **TIGHT)


SINK = np.array([0.3, -1.0, 2.0, 30.0])
FAR_SINK = np.array([-1e4, -800.0, 800.0, 1e4])  # of which exp or its inverse is none of float64's numbers
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"softmax_scale": 0.7},
    {"window_size": (2, 1)},
    {"window_size": (0, -1)},
    {"softcap": 0.8, "softmax_scale": 1.0},
    {"softcap": 0.8, "causal": True, "attn_sink": SINK},
    {"alibi_slopes": np.array([0.5, 0.25, 1.0, 0.0])},
    {"alibi_slopes": np.arange(8.0).reshape(2, 4) / 7, "softcap": 2.0, "window_size": (4, 4)},
    {"attn_sink": FAR_SINK},
    {"attn_sink": SINK, "window_size": (1, 0), "alibi_slopes": np.array([0.5, 0.25, 1.0, 0.0])},
)
SIZES = ((6, 6), (3, 8), (9, 4), (1, 5), (5, 1), (4, 0), (0, 4))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_against_autograd(options: dict[str, Any], sizes: tuple[int, int]) -> None:
    """Forward, and backward from gradients of out and of lse; 9 queries of 4 keys leave rows with none."""
    arrays = make(*sizes)
    q, k, v, dout, dlse = arrays
    want, gradients = by_autograd(arrays, **options)
    out, lse = reference.flash_attn_func(q, k, v, **options)
    check((out, lse), want)
    check(reference.flash_attn_backward(dout, q, k, v, out, lse, dlse=dlse, **options), gradients)
    alone = by_autograd([*arrays[:4], np.zeros_like(dlse)], **options)[1]
    check(reference.flash_attn_backward(dout, q, k, v, out, lse, **options), alone)


@pytest.mark.parametrize("chunk", (1, 3, 4, 100))
@pytest.mark.parametrize("sizes", ((8, 8), (3, 10), (9, 4)), ids=str)
def test_chunks(sizes: tuple[int, int], chunk: int) -> None:
    """A query attends to the keys of its chunk that the mask leaves."""
    q, k, v = make(*sizes)[:3]
    masks: tuple[tuple[dict[str, Any], int, int], ...] = (
        ({"causal": True}, 100, 0),
        ({"window_size": (2, 2)}, 2, 2),
        ({}, 100, 100),
    )
    for options, left, right in masks:
        out, lse = reference.flash_attn_func(q, k, v, **options, attention_chunk=chunk)
        for i in range(sizes[0]):
            at = i + sizes[1] - sizes[0]
            seen = [j for j in range(sizes[1]) if j // chunk == at // chunk and at - left <= j <= at + right]
            check((out[:, [i]], lse[..., [i]]), reference.flash_attn_func(q[:, [i]], k[:, seen], v[:, seen]))


@pytest.mark.parametrize("poison", (np.nan, np.inf))
def test_masked_pairs_are_selected_and_not_multiplied(poison: float) -> None:
    """Causal: key 3 is seen by query 3 alone, and query 0 sees key 0 alone. What they hold stays there."""
    q, k, v, dout, dlse = make(4, 4)
    options: dict[str, Any] = {"causal": True, "softcap": 2.0}
    clean = reference.flash_attn_func(q, k, v, **options)
    gradients = reference.flash_attn_backward(dout, q, k, v, *clean, dlse=dlse, **options)
    bad_k, bad_v, bad_q, bad_dout = k.copy(), v.copy(), q.copy(), dout.copy()
    bad_k[:, 3], bad_v[:, 3] = np.nan, poison
    bad_q[:, 0], bad_dout[:, 0] = np.nan, poison
    with np.errstate(invalid="ignore"):
        out, lse = reference.flash_attn_func(q, bad_k, bad_v, **options)
        of_keys = reference.flash_attn_backward(dout, q, bad_k, bad_v, *clean, dlse=dlse, **options)
        of_queries = reference.flash_attn_backward(bad_dout, bad_q, k, v, *clean, dlse=dlse, **options)
    check((out[:, :3], lse[..., :3]), (clean[0][:, :3], clean[1][..., :3]))
    assert np.isnan(out[:, 3]).all() and np.isnan(lse[..., 3]).all()
    np.testing.assert_allclose(of_keys[0][:, :3], gradients[0][:, :3], **TIGHT)
    for one, other in zip(of_queries, gradients, strict=True):
        np.testing.assert_allclose(one[:, 1:], other[:, 1:], **TIGHT)
    assert np.isnan(of_keys[0][:, 3]).all() and np.isnan(of_queries[1][:, 0]).all()


Q_LENGTHS, K_LENGTHS = (3, 0, 4, 1, 5, 2), (4, 3, 0, 1, 2, 6)
CU_Q, CU_K = (np.cumsum((first, *lengths)) for first, lengths in ((2, Q_LENGTHS), (1, K_LENGTHS)))
TOTAL_Q, TOTAL_K = int(CU_Q[-1]) + 3, int(CU_K[-1]) + 1
SLOPES = np.abs(randn(6, 4, seed=9))
INFINITE = np.array([0.4, -np.inf, np.inf, -1.5])


def make_ragged() -> list[np.ndarray]:
    """q, k, v, and gradients of out and of lse as the functions of segments have it."""
    arrays = make(TOTAL_Q, 0, b=())
    keys = make(0, TOTAL_K, b=())
    return [arrays[0], keys[1], keys[2], arrays[3], arrays[4].T]


def test_tokens_that_are_used() -> None:
    """They end with their segment; rows of other ones get out 0 and lse -inf, outside segments nothing."""
    q, k, v = make_ragged()[:3]
    given = np.full((TOTAL_Q, 4, 5), 7.0)
    used = {"seqused_q": (2, 0, 4, 1, -1, 9), "seqused_k": (4, 3, 0, -1, 1, 7)}
    out, lse = reference.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 5, 6, **used, out=given)
    same = {"seqused_q": (2, 0, 4, 1, 0, 2), "seqused_k": (4, 3, 0, 0, 1, 6)}
    check((out, lse), reference.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 5, 6, **same))
    unused = [4, *range(10, 15)]  # of the first request and the fifth
    assert not out[unused].any() and np.isneginf(lse[unused]).all()
    covered = slice(CU_Q[0], CU_Q[-1])
    np.testing.assert_array_equal(given[covered], out[covered])
    assert (given[:2] == 7).all() and (given[-3:] == 7).all()
    assert lse.shape == (TOTAL_Q, 4) and lse.T.flags.c_contiguous


def test_other_names_of_arguments() -> None:
    q, k, v = make_ragged()[:3]
    want = reference.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 5, 6, attn_sink=SINK)
    other: dict[str, Any] = {
        "cu_seqlens_qo": CU_Q,
        "cu_seqlens_kv": CU_K,
        "max_seqlen_qo": 5,
        "max_seqlen_kv": 6,
        "learnable_sink": SINK,
    }
    check(reference.flash_attn_varlen_func(q, k, v, **other), want)
    kv = np.concatenate([k, v], -1)
    check(reference.flash_attn_varlen_kvpacked_func(q, kv, head_dim_qk=6, **other), want)
    for alias, name in (("cu_seqlens_qo", "cu_seqlens_q"), ("learnable_sink", "attn_sink")):
        with pytest.raises(TypeError, match=f"^{alias}: expected one of {alias} and {name}, got both"):
            reference.flash_attn_varlen_func(q, k, v, **{**other, name: other[alias]})


# ---- what must not matter to gradients


@pytest.mark.parametrize("poison", (np.nan, np.inf))
@pytest.mark.parametrize(
    ("mask", "sizes", "rows", "keys"),
    (
        ({"causal": True}, (7, 3), 4, 0),
        ({"window_size": (None, 1)}, (7, 3), 3, 0),
        ({"window_size": (1, -1)}, (7, 0), 7, 0),
        ({"window_size": (2, 0)}, (3, 9), 0, 4),
    ),
    ids=str,
)
def test_what_takes_no_part(
    mask: dict[str, Any], sizes: tuple[int, int], rows: int, keys: int, poison: float
) -> None:
    """Rows without keys and keys that no query sees have gradients of 0, and do not change the others."""
    for sink in (None, INFINITE):
        options = {**mask, "attn_sink": sink, "softcap": 1.5, "alibi_slopes": SLOPES[:2]}
        q, k, v, dout, dlse = make(*sizes)
        empty = np.isneginf(reference.flash_attn_func(q, k, v, **options)[1][0, 0])
        assert empty.sum() == rows
        results = []
        for value in (0.0, poison):
            k[:, :keys] = v[:, :keys] = value
            out, lse = reference.flash_attn_func(q, k, v, **options)
            q[:, empty] = dout[:, empty] = dlse[..., empty] = value
            given = np.where(empty[:, None, None], value, out)
            gradients = reference.flash_attn_backward(dout, q, k, v, given, lse, dlse=dlse, **options)
            assert not gradients[0][:, empty].any() and gradients[0][:, ~empty].all()
            assert not gradients[1][:, :keys].any() and not gradients[2][:, :keys].any()
            results.append((out, lse, *gradients))
            q[:, empty] = 0
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


def test_gradients_follow_what_is_given() -> None:
    """Probabilities the lse, DELTA the out; given gradients are overwritten; arrays have any strides."""
    q, k, v, dout, dlse = make(4, 5)
    arrays = [dout, q, k, v, *reference.flash_attn_func(q, k, v)]
    dq, dk, dv = reference.flash_attn_backward(*arrays)
    given = np.full_like(q, 7.0)
    turned = [np.asfortranarray(x) for x in arrays]
    got = reference.flash_attn_backward(*turned, given)
    for one, other in zip((given, *got), (dq, dq, dk, dv), strict=True):
        np.testing.assert_array_equal(one, other)
    arrays[5] -= np.log(2)
    for one, other in zip(reference.flash_attn_backward(*arrays), (dq, dk, dv), strict=True):
        np.testing.assert_allclose(one, 2 * other, **TIGHT)
    arrays[4] *= 2
    got = reference.flash_attn_backward(*arrays)
    np.testing.assert_allclose(got[2], 2 * dv, **TIGHT)
    assert np.abs(got[0] - 2 * dq).max() > 0.01
