"""Backward of dense attention in `rawmla.reference`: finite differences, autograd, and what must not matter.

tests/test_mha_reference.py holds forward and backward against torch together; here stands what backward has
alone: its own arguments, rows that take no part, and sinks and lengths in all combinations.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from full_cases import full_unless

from rawmla import reference

torch = pytest.importorskip("torch")

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
H_Q, H_KV, D_QK, D_V = 4, 2, 3, 2
SINK = np.array([0.4, -np.inf, np.inf, -1.5])
SLOPES = np.array([[0.5, 0.25, 0.0, 1.0], [0.3, 0.7, 2.0, 0.1], [1.0, 0.4, 0.2, 0.6]])
CU_Q, CU_K = np.array([1, 4, 4, 9]), np.array([2, 4, 7, 11])  # of 10 and 12 rows
USED_Q, USED_K = (2, 0, 4), (2, 1, 3)


def randn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def arrays_of_segments() -> tuple[np.ndarray, ...]:
    """dout, q, k, v and dlse."""
    shapes = ((10, H_Q, D_V), (10, H_Q, D_QK), (12, H_KV, D_QK), (12, H_KV, D_V), (10, H_Q))
    dout, q, k, v, dlse = (randn(*shape, seed=i) for i, shape in enumerate(shapes))
    return dout, q, k, v, dlse


# ---- finite differences


def check_by_differences(function: Callable[[], float], x: np.ndarray, gradient: np.ndarray) -> None:
    """Compare derivatives of a function of an array, which it reads and which changes in place, along some
    directions; infinite elements stay what they are.
    """
    given, finite = x.copy(), np.isfinite(x)
    for seed in range(8):
        direction = randn(*x.shape, seed=100 + seed)
        direction /= np.linalg.norm(direction)
        values = []
        for step in (1e-5, -1e-5):
            x[finite] = (given + step * direction)[finite]
            values.append(function())
        x[...] = given
        found = (values[0] - values[1]) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), found, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("of", full_unless(lambda of: of == "both", ("out", "lse", "both")))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"causal": True, "softmax_scale": 1.3},
        {"window_size": (1, 0), "softcap": 0.7},
        {"window_size": (-1, 1), "alibi_slopes": SLOPES},
        {"window_size": (0, None), "alibi_slopes": SLOPES[0], "softcap": 2.0},
    ),
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("sink", (False, True), ids=("", "sink"))
def test_differences(options: dict[str, Any], of: str, sink: bool) -> None:
    """Segments of 3, 0 and 5 queries, of which 2, 0 and 4 count, and of 2, 3 and 4 keys."""
    dout, q, k, v, dlse = arrays_of_segments()
    dout, dlse = dout * (of != "lse"), dlse * (of != "out")
    options = {**options, "seqused_q": USED_Q, "seqused_k": USED_K}
    if sink:
        options["attn_sink"] = SINK.copy()
    cu = (CU_Q, CU_K, 5, 4)

    def loss() -> float:
        out, lse = reference.flash_attn_varlen_func(q, k, v, *cu, **options)
        return float((dout * out).sum() + (dlse * np.where(np.isfinite(lse), lse, 0)).sum())

    results = reference.flash_attn_varlen_func(q, k, v, *cu, **options)
    got = reference.flash_attn_varlen_backward(dout, q, k, v, *results, *cu, dlse=dlse, **options)
    leaves = [q, k, v, *([options["attn_sink"]] if sink else [])]
    assert len(got) == len(leaves)
    for one, leaf in zip(got, leaves, strict=True):
        check_by_differences(loss, leaf, one)


# ---- autograd


def attention(
    q: Any, k: Any, v: Any, options: dict[str, Any], sink: Any, slopes: np.ndarray | None
) -> tuple[Any, Any]:
    """out `[s_q, h, d_v]` and lse `[s_q, h]` of one request, element by element of the definition."""
    position = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    left, right = (np.inf if bound in (None, -1) else bound for bound in options.get("window_size", (-1, -1)))
    right = 0 if options.get("causal") else right
    seen = (position - key <= left) & (key - position <= right)
    outs, lses = [], []
    for h in range(H_Q):
        h_kv = h * H_KV // H_Q
        s = options.get("softmax_scale", D_QK**-0.5) * q[:, h] @ k[:, h_kv].T
        if cap := options.get("softcap"):
            s = cap * torch.tanh(s / cap)
        if slopes is not None:
            s = s - slopes[h] * (position - key).abs().double()
        weights = torch.where(seen, torch.exp(torch.where(seen, s, 0)), 0)
        total = weights.sum(1)
        some = total > 0
        lses.append(torch.where(some, torch.log(torch.where(some, total, 1)), -torch.inf))
        more = 0 if sink is None else torch.exp(sink[h])
        outs.append(weights @ v[:, h_kv] / torch.where(some, total + more, 1)[:, None])
    return torch.stack(outs, 1), torch.stack(lses, 1)


MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window_size": (1, 2)},
    {"window_size": (0, -1)},
    {"window_size": (None, 1)},
    {"window_size": (2, 5), "causal": True},
)


@pytest.mark.parametrize("used", (False, True), ids=("whole", "seqused"))
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_autograd(mask: dict[str, Any], used: bool) -> None:
    """Every mask with every softcap, sink and slopes; NaN stands wherever there is no token."""
    for softcap, sink, slopes in product(
        (0.0, 0.9), (None, np.where(np.isinf(SINK), 2.0, SINK)), (None, SLOPES[1], SLOPES)
    ):
        options: dict[str, Any] = {**mask, "softcap": softcap}
        arrays = arrays_of_segments()
        ends = [(a + n, b + m) for a, b, n, m in zip(CU_Q, CU_K, USED_Q, USED_K, strict=False)]
        ends = ends if used else list(zip(CU_Q[1:], CU_K[1:], strict=True))
        places = [
            (slice(a, end), slice(b, end_k)) for a, b, (end, end_k) in zip(CU_Q, CU_K, ends, strict=False)
        ]
        for side, of_side in ((0, (0, 1, 4)), (1, (2, 3))):
            for i in of_side:
                hole = np.ones(len(arrays[i]), bool)
                for place in places:
                    hole[place[side]] = False
                arrays[i][hole] = np.nan
        dout, q, k, v, dlse = arrays
        leaves = [torch.from_numpy(x).clone().requires_grad_() for x in (q, k, v)]
        of_sink = None if sink is None else torch.from_numpy(sink).clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for r, (i, j) in enumerate(places):
            own = slopes if slopes is None or slopes.ndim == 1 else slopes[r]
            out, lse = attention(leaves[0][i], leaves[1][j], leaves[2][j], options, of_sink, own)
            some = lse.isfinite()
            loss = loss + (out * torch.from_numpy(dout[i]))[some].sum()
            loss = loss + (lse * torch.from_numpy(dlse[i]))[some].sum()
        loss.backward()
        options |= {"attn_sink": sink, "alibi_slopes": slopes}
        options |= {"seqused_q": USED_Q, "seqused_k": USED_K} if used else {}
        cu = (CU_Q, CU_K, 5, 4)
        results = reference.flash_attn_varlen_func(q, k, v, *cu, **options)
        for result in results:  # of rows of no request a fresh array holds anything
            result[:1] = result[9:] = np.nan
        got = reference.flash_attn_varlen_backward(dout, q, k, v, *results, *cu, dlse=dlse, **options)
        assert len(got) == (3 if sink is None else 4)
        for one, leaf in zip(got, (*leaves, of_sink), strict=False):
            assert one.dtype == np.float64
            np.testing.assert_allclose(one, leaf.grad.numpy(), **TIGHT)


# ---- what must not matter


def batch(s_q: int, s_kv: int, **options: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """dout, q, k, v, out and lse; and dlse."""
    shapes = ((s_q, H_Q, D_V), (s_q, H_Q, D_QK), (s_kv, H_KV, D_QK), (s_kv, H_KV, D_V))
    dout, q, k, v = (randn(3, *shape, seed=i) for i, shape in enumerate(shapes))
    return [dout, q, k, v, *reference.flash_attn_func(q, k, v, **options)], randn(3, H_Q, s_q, seed=5)


@pytest.mark.parametrize("poison", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("sink", (None, SINK), ids=("", "sink"))
@pytest.mark.parametrize(
    ("mask", "s_kv", "count"),
    (
        ({"causal": True}, 3, 4),
        ({"window_size": (1, 0)}, 3, 4),
        ({"window_size": (None, 1)}, 3, 3),
        ({"window_size": (1, -1)}, 0, 7),
    ),
    ids=str,
)
def test_rows_without_keys(mask: dict[str, Any], s_kv: int, count: int, sink: Any, poison: float) -> None:
    """Whatever they hold: their dq is 0 and the rest is what it is without them, dsink too."""
    options = {**mask, "attn_sink": sink, "softcap": 1.5, "alibi_slopes": SLOPES}
    arrays, dlse = batch(7, s_kv, **options)
    empty = np.isneginf(arrays[5][0, 0])
    assert empty.sum() == count
    clean = reference.flash_attn_backward(*arrays, dlse=dlse, **options)
    for x in (arrays[0], arrays[1], arrays[4]):
        x[:, empty] = poison
    dlse[..., empty] = poison
    got = reference.flash_attn_backward(*arrays, dlse=dlse, **options)
    assert not got[0][:, empty].any() and got[0][:, ~empty].all()
    for one, other in zip(got, clean, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("options", ({}, {"causal": True, "softcap": 1.0, "alibi_slopes": SLOPES}), ids=str)
def test_lse_alone(options: dict[str, Any]) -> None:
    """dv is exactly 0; a sink, of which lse is independent, changes nothing and gets exactly 0."""
    arrays, dlse = batch(5, 6, **options)
    arrays[0][:] = 0
    want = reference.flash_attn_backward(*arrays, dlse=dlse, **options)
    assert want[0].all() and want[1].any() and not want[2].any()
    sink = {**options, "attn_sink": SINK}
    arrays[4:] = reference.flash_attn_func(*arrays[1:4], **sink)
    got = reference.flash_attn_backward(*arrays, dlse=dlse, **sink)
    for one, other in zip(got, want, strict=False):
        np.testing.assert_allclose(one, other, **TIGHT)
    assert not got[2].any() and not got[3].any()


def test_infinite_sinks_beside_finite_ones() -> None:
    """A head with -inf is one without a sink; one with +inf has only what comes of dlse."""
    arrays, dlse = batch(5, 6, attn_sink=SINK)
    got = reference.flash_attn_backward(*arrays, dlse=dlse, attn_sink=SINK)
    without, _ = batch(5, 6)
    plain = reference.flash_attn_backward(*without, dlse=dlse)
    without[0][:] = 0
    of_lse = reference.flash_attn_backward(*without, dlse=dlse)
    np.testing.assert_allclose(got[0][:, :, 1], plain[0][:, :, 1], **TIGHT)
    np.testing.assert_allclose(got[0][:, :, 2], of_lse[0][:, :, 2], **TIGHT)
    assert np.abs(got[0][:, :, 0] - plain[0][:, :, 0]).min() > 0
    assert all(np.isfinite(x).all() for x in got)
    assert got[3][0] and got[3][3] and not got[3][1] and not got[3][2]


@pytest.mark.parametrize("sink", (-1e4, -800.0, 800.0, 1e4))
def test_sinks_far_from_all_scores(sink: float) -> None:
    """As infinite ones, though exp(sink) or its inverse is none of float64's numbers."""
    results = []
    for value in (sink, np.copysign(np.inf, sink)):
        sinks = np.full(H_Q, value)
        arrays, dlse = batch(5, 6, attn_sink=sinks)
        results.append(reference.flash_attn_backward(*arrays, dlse=dlse, attn_sink=sinks))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, **TIGHT)


def test_a_single_key_has_no_gradient_of_scores() -> None:
    """Its probability is 1 whatever its score: dq and dk come of dlse alone, and dv is dout."""
    (dout, *arrays), dlse = batch(4, 1)
    dq, dk, dv = reference.flash_attn_backward(dout, *arrays)
    np.testing.assert_allclose(dq, 0, atol=1e-15)
    np.testing.assert_allclose(dk, 0, atol=1e-15)
    np.testing.assert_allclose(dv[:, 0], dout.reshape(3, 4, H_KV, 2, D_V).sum((1, 3)), **TIGHT)
    dq = reference.flash_attn_backward(dout, *arrays, dlse=dlse)[0]
    want = dlse.swapaxes(1, 2)[..., None] * np.repeat(arrays[1], 2, 2) * D_QK**-0.5
    np.testing.assert_allclose(dq, want, rtol=1e-10, atol=1e-14)


def test_probabilities_follow_the_given_lse() -> None:
    """And DELTA the given out: both are inputs, as a kernel has them."""
    arrays, _ = batch(4, 5)
    dq, dk, dv = reference.flash_attn_backward(*arrays)
    arrays[5] -= np.log(2)
    for one, other in zip(reference.flash_attn_backward(*arrays), (dq, dk, dv), strict=True):
        np.testing.assert_allclose(one, 2 * other, **TIGHT)
    arrays[4] *= 2
    got = reference.flash_attn_backward(*arrays)
    np.testing.assert_allclose(got[2], 2 * dv, **TIGHT)
    assert np.abs(got[0] - 2 * dq).max() > 0.01


def test_strides() -> None:
    """lse and dlse in both orders; everything else in any, with dimensions of stride 0 too."""
    arrays, dlse = batch(5, 6, causal=True)
    want = reference.flash_attn_backward(*arrays, dlse=dlse, causal=True)
    turned = [np.asfortranarray(x) for x in (*arrays, dlse)]
    assert turned[5].T.flags.c_contiguous
    got = reference.flash_attn_backward(*turned[:6], dlse=turned[6], causal=True)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    rows = [x.reshape(-1, *x.shape[2:]) for x in arrays[:5]]
    cu = ([0, 5, 10, 15], [0, 6, 12, 18], 5, 6)
    for order in "CF":
        lse, dlses = (np.array(x.swapaxes(1, 2).reshape(15, H_Q), order=order) for x in (arrays[5], dlse))
        assert (lse if order == "C" else lse.T).flags.c_contiguous
        got = reference.flash_attn_varlen_backward(*rows, lse, *cu, dlse=dlses, causal=True)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.reshape(other.shape), other)
    wide = np.broadcast_to(arrays[2][:, :1], arrays[2].shape)
    results = reference.flash_attn_func(arrays[1], wide, arrays[3])
    got = reference.flash_attn_backward(arrays[0], arrays[1], wide, arrays[3], *results)
    want = reference.flash_attn_backward(arrays[0], arrays[1], wide.copy(), arrays[3], *results)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- arguments


def test_given_gradients_of_a_batch() -> None:
    """Overwritten, not added to; some may be given and others not, by position too."""
    arrays, dlse = batch(5, 6)
    want = reference.flash_attn_backward(*arrays, dlse=dlse)
    for chosen in product((False, True), repeat=3):
        given = [np.full_like(x, 7.0) if on else None for x, on in zip(arrays[1:4], chosen, strict=True)]
        got = reference.flash_attn_backward(*arrays, *given, dlse=dlse)
        for one, target, other in zip(got, given, want, strict=True):
            np.testing.assert_array_equal(one, other)
            if target is not None:
                np.testing.assert_array_equal(target, other)


def test_the_order_of_arguments() -> None:
    """causal and softmax_scale follow the gradients."""
    arrays, _ = batch(5, 6, causal=True, softmax_scale=0.3)
    want = reference.flash_attn_backward(*arrays, causal=True, softmax_scale=0.3)
    got = reference.flash_attn_backward(*arrays, None, None, None, True, 0.3)
    rows = [x.reshape(-1, *x.shape[2:]) for x in arrays[:5]]
    lse = arrays[5].swapaxes(1, 2).reshape(15, H_Q)
    cu = ([0, 5, 10, 15], [0, 6, 12, 18], 5, 6)
    of_rows = reference.flash_attn_varlen_backward(*rows, lse, *cu, None, None, None, True, 0.3, False)
    for one, other, wanted in zip(got, of_rows, want, strict=True):
        np.testing.assert_array_equal(one, wanted)
        np.testing.assert_array_equal(other.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_dsink_has_the_dtype_of_the_sink(dtype: str) -> None:
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=getattr(torch, dtype))
    exact = {"attn_sink": sink.double().numpy()}
    arrays, _ = batch(5, 6, **exact)
    tensors = [torch.from_numpy(x).bfloat16() for x in arrays[:5]] + [torch.from_numpy(arrays[5]).float()]
    *others, dsink = reference.flash_attn_backward(*tensors, attn_sink=sink, deterministic=True)
    want = reference.flash_attn_backward(*(x.double().numpy() for x in tensors), **exact)[3]
    assert dsink.dtype == sink.dtype and torch.equal(dsink, torch.from_numpy(want).to(sink.dtype))
    assert all(x.dtype == torch.bfloat16 for x in others)


def test_bad_arguments() -> None:
    arrays, dlse = batch(5, 6)
    good = dict(zip(("dout", "q", "k", "v", "out", "lse"), arrays, strict=True))
    tensors = {name: torch.from_numpy(x).half() for name, x in good.items()}
    tensors["lse"] = torch.from_numpy(good["lse"]).float()
    bad: tuple[tuple[dict[str, Any], str, Any, type[Exception], str], ...] = (
        (good, "dout", arrays[0][:1], ValueError, r"^dout: expected shape \[3, 5, 4, 2\], got \[1, "),
        (good, "out", arrays[4][..., :1], ValueError, r"^out: expected shape \[3, 5, 4, 2\], got"),
        (
            good,
            "lse",
            arrays[5].swapaxes(1, 2),
            ValueError,
            r"^lse: expected shape \[3, 4, 5\], got \[3, 5, 4\]",
        ),
        (good, "dlse", dlse[0], ValueError, r"^dlse: expected shape \[3, 4, 5\], got \[4, 5\]"),
        (good, "lse", None, TypeError, "^lse: expected"),
        (good, "dq", np.zeros((3, 5, 4, 2)), ValueError, r"^dq: expected shape \[3, 5, 4, 3\]"),
        (good, "dk", np.zeros((3, 6, 4, 3)), ValueError, r"^dk: expected shape \[3, 6, 2, 3\]"),
        (good, "dv", np.zeros((3, 6, 2, 3)), ValueError, r"^dv: expected shape \[3, 6, 2, 2\]"),
        (good, "dq", [0.0], TypeError, "^dq: expected"),
        (good, "attn_sink", SINK[:3], ValueError, r"^attn_sink: expected shape \[4\]"),
        (good, "alibi_slopes", SLOPES[:2], ValueError, r"^alibi_slopes: expected shape \[4\] or \[3, 4\]"),
        (good, "window_size", (-2, 0), ValueError, "^window_size: expected None, -1 or at least 0"),
        (good, "softcap", -1.0, ValueError, "^softcap: expected"),
        (good, "softmax_scale", 0.0, ValueError, "^softmax_scale: expected"),
        (good, "dropout_p", 0.0, TypeError, "unexpected keyword argument 'dropout_p'"),
        (good, "cu_seqlens_q", [0, 5], TypeError, "unexpected keyword argument 'cu_seqlens_q'"),
        (tensors, "dout", tensors["dout"].float(), TypeError, "^dout: expected dtype float16, got"),
        (tensors, "out", tensors["out"].bfloat16(), TypeError, "^out: expected dtype float16, got"),
        (tensors, "lse", tensors["lse"].half(), TypeError, "^lse: expected dtype float32"),
        (tensors, "dlse", tensors["lse"].double(), TypeError, "^dlse: expected dtype float32"),
        (tensors, "dv", tensors["v"].float(), TypeError, "^dv: expected dtype float16, got"),
    )
    for arguments, name, value, error, text in bad:
        with pytest.raises(error, match=text):
            reference.flash_attn_backward(**{**arguments, name: value})
    dout, q, k, v, _ = arrays_of_segments()
    results = reference.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 5, 4)
    for options, error, text in (
        ({"seqused_q": USED_Q[:2]}, ValueError, r"^seqused_q: expected shape \[3\]"),
        ({"lse": results[1].T}, ValueError, r"^lse: expected shape \[10, 4\], got \[4, 10\]"),
        ({"cu_seqlens_k": CU_K[1:]}, ValueError, r"^cu_seqlens_k: expected shape \[4\]"),
        ({"attention_chunk": 2}, TypeError, "unexpected keyword argument 'attention_chunk'"),
    ):
        all_of: dict[str, Any] = {
            **dict(zip(("dout", "q", "k", "v", "out", "lse"), (dout, q, k, v, *results), strict=True)),
            "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 5, "max_seqlen_k": 4, **options,
        }  # fmt: skip
        with pytest.raises(error, match=text):
            reference.flash_attn_varlen_backward(**all_of)
