"""Flex attention of `rawmla.reference`: against torch's own on the CPU and the reference in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kit import functions
from kit.flex import FlexCase, FlexInputs, with_mask_mod
from kit.flex import reference as forward
from kit.flex_backward import (
    captured_tensors,
    exact_results,
    make_flex_backward_inputs,
    make_flex_gradients,
    reference_backward,
)
from kit.functions import Sizes
from rawmla import reference
from rawmla.flex.block_mask import BlockMask
from rawmla.reference._flex import NumpyMod, flex_attention_backward

torch = pytest.importorskip("torch")
from torch.nn.attention import flex_attention as theirs  # noqa: E402

B, H, L, S = 2, 4, 40, 50
BOTH = reference.AuxRequest(lse=True, max_scores=True)

FUNCTIONS = Sizes(B, H, L, S, device="cpu")
SCORES = ("", "bias h q k", "alibi table", "softcap", "causal", "square")
MASKS = ("causal", "documents", "per head", "padding", "lower half", "empty")


def forms(builder: Any) -> tuple[Any, Any]:
    """A function as NumPy and as tensors take it; None: there is none."""
    if builder is None:
        return None, None
    function = builder(FUNCTIONS)
    return function.numpy(), function.python


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes the same operator without tracing it first, where its version has a switch for that."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def arrays(h_kv: int = H) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape) for shape in ((B, H, L, 8), (B, h_kv, S, 8), (B, h_kv, S, 5))]


@pytest.mark.parametrize("h_kv", (4, 1))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_against_torch(score: str, mask: str, h_kv: int) -> None:
    """Both make the block mask themselves. torch has no largest scores on the CPU."""
    q, k, v = arrays(h_kv)
    scores, masks = forms(functions.SCORES.get(score)), forms(functions.MASKS[mask])
    ours = reference.create_block_mask(masks[0], B, H, L, S, BLOCK_SIZE=(32, 16))
    got = reference.flex_attention(q, k, v, scores[0], ours, enable_gqa=h_kv == 1, return_lse=True)
    blocks = theirs.create_block_mask(masks[1], B, H, L, S, device="cpu", BLOCK_SIZE=(32, 16))
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    want, aux = theirs.flex_attention(
        *tensors, scores[1], blocks, enable_gqa=h_kv == 1, return_aux=theirs.AuxRequest(lse=True)
    )
    for one, other in zip(got, (want, aux.lse), strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", (16, (32, 16), 128), ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_block_masks_against_torch(mask: str, size: Any) -> None:
    of_numpy, of_tensors = forms(functions.MASKS[mask])
    ours = reference.create_block_mask(of_numpy, B, H, L, S, BLOCK_SIZE=size)
    blocks = theirs.create_block_mask(of_tensors, B, H, L, S, device="cpu", BLOCK_SIZE=size)
    assert ours.shape == tuple(blocks.shape) and ours.BLOCK_SIZE == tuple(blocks.BLOCK_SIZE)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, entries = getattr(ours, f"{name}_num_blocks"), getattr(ours, f"{name}_indices")
        assert counts.dtype == entries.dtype == np.int32
        np.testing.assert_array_equal(counts, getattr(blocks, f"{name}_num_blocks").numpy())
        np.testing.assert_array_equal(entries, getattr(blocks, f"{name}_indices").numpy())


def test_torchs_empty_block_mask() -> None:
    """It attends everything."""
    q, k, v = arrays()
    empty = theirs._create_empty_block_mask(*[torch.from_numpy(x) for x in (q, k)])
    np.testing.assert_array_equal(
        reference.flex_attention(q, k, v, None, empty), reference.flex_attention(q, k, v)
    )


@pytest.mark.parametrize("kind", ("float8_e4m3fn", "float8_e5m2"))
def test_tensors(kind: str) -> None:
    """Rounded to query's dtype; keys and values of bytes; out given."""
    q, k, v = (torch.from_numpy(x) for x in arrays())
    q, k, v = q.bfloat16(), *[x.to(getattr(torch, kind)) for x in (k, v)]
    out = torch.full((B, H, L, 5), math.nan, dtype=torch.bfloat16)
    got, aux = reference.flex_attention(q, k, v, return_aux=BOTH, out=out)
    assert got is out and aux.lse.dtype == aux.max_scores.dtype == torch.float32
    want, lse = theirs.flex_attention(*[x.double() for x in (q, k, v)], return_lse=True)
    assert torch.equal(got, want.bfloat16())
    torch.testing.assert_close(aux.lse, lse.float())
    assert reference.flex_attention(q, k, v, return_aux=reference.AuxRequest(lse=True))[1].max_scores is None


GROUPS = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (L, 2)))
TABLE = torch.from_numpy(np.random.default_rng(1).standard_normal((L, S))).bfloat16()
# Of single positions: values of whole arrays would be others, or an error.
OF_TENSORS: dict[str, tuple[Any, Any]] = {
    "any": (
        lambda s, b, h, q, k: torch.where((GROUPS[q] == k % 4).any(), s, s - 1),
        lambda b, h, q, k: (GROUPS[q] == k % 4).any(),
    ),
    "rows": (lambda s, b, h, q, k: s + TABLE[q][k], lambda b, h, q, k: TABLE[q][k] > 0),
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_functions_of_tensors(name: str) -> None:
    """Those that rawmla traces, with their BlockMask, torch's, and AuxRequest."""
    score, mask = OF_TENSORS[name]
    tensors = [torch.from_numpy(x) for x in arrays()]
    blocks = theirs.create_block_mask(mask, B, H, L, S, device="cpu", BLOCK_SIZE=16)
    want, lse = theirs.flex_attention(*tensors, score, blocks, return_lse=True)
    ours = reference.create_block_mask(mask, B, H, L, S, device="cpu", BLOCK_SIZE=16)
    assert isinstance(ours, reference.BlockMask)
    np.testing.assert_array_equal(ours.to_dense(), blocks.to_dense().numpy())
    for given in (ours, blocks):
        out, aux = reference.flex_attention(
            *tensors, score, given, return_aux=reference.AuxRequest(lse=True), kernel_options={"BLOCK_M": 64}
        )
        assert isinstance(aux, reference.AuxOutput) and aux.max_scores is None
        torch.testing.assert_close(out, want, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(aux.lse, lse.float())


# ---- backward

SMALL: dict[str, Any] = {"s_q": L, "s_k": S, "d_qk": 8, "d_v": 5, "block": (16, 32)}


# The derivative of a score function, and what it adds to the gradients of the arrays that it reads.
GRADIENTS: dict[str, Callable[[Any], tuple[Callable[..., Any], dict[str, Callable[..., Any]]]]] = {
    "softcap": lambda c: (lambda grad, s, b, h, q, k: grad * (1 - np.tanh(s / c["cap"]) ** 2), {}),
    "head scale": lambda c: (
        lambda grad, s, b, h, q, k: grad * c["factor"][h],
        {"factor": lambda grad, s, b, h, q, k: ((h,), grad * s)},
    ),
    "symmetric bias": lambda c: (
        lambda grad, s, b, h, q, k: grad,
        {
            "bias": lambda grad, s, b, h, q, k: (
                (np.stack([q + 0 * k, k + 0 * q]), np.stack([k + 0 * q, q + 0 * k])),
                grad,
            )
        },
    ),
}


def numpy_mod(inputs: FlexInputs) -> NumpyMod | None:
    """The score function of NumPy arrays with its gradients."""
    if inputs.score is None:
        return None
    read = {
        name: x.detach().double().numpy() if hasattr(x, "detach") else x
        for name, x in inputs.score.captures.items()
    }
    grad, added = GRADIENTS[inputs.case.score](read)
    return NumpyMod(inputs.score.numpy(), grad, {name: (read[name], add) for name, add in added.items()})


def listed(inputs: FlexInputs) -> FlexInputs:
    """With lists that need not agree with the mask, for fewer heads, and garbage after their ends."""
    states = np.random.default_rng(3).integers(0, 3, (1, 2, 3, 2))  # nothing, partial, full
    lists = []
    for state in (1, 2):
        order = np.argsort(states != state, axis=-1, kind="stable")
        order[np.arange(2) >= (states == state).sum(-1)[..., None]] = 2**30
        lists += [torch.from_numpy(x.astype(np.int32)) for x in ((states == state).sum(-1), order)]
    assert inputs.mask is not None and {0, 1, 2} == set(states.flat)
    return replace(
        inputs, block_mask=BlockMask((L, S), *lists, BLOCK_SIZE=(16, 32), mask_mod=inputs.mask.python)
    )


CASES = (
    *[FlexCase(**SMALL, score=name) for name in ("", *GRADIENTS)],
    *[
        FlexCase(**SMALL, score="head scale", mask=mask, h_kv=h_kv, b_kv=b_kv, scale=0.4)
        for mask, h_kv, b_kv in (("per head", 2, 0), ("padding", 1, 1), ("empty", 1, 0), ("random", 2, 1))
    ],
)
GIVEN = (*[(case, "both") for case in CASES], (CASES[-2], "out"), (CASES[-3], "lse"), (CASES[-3], "out"))


@pytest.mark.parametrize(("case", "of"), GIVEN, ids=lambda x: getattr(x, "id", x))
def test_gradients(case: FlexCase, of: str) -> None:
    """As the reference in torch, of which tests hold autograd against; what takes no part is NaN."""
    inputs = make_flex_backward_inputs(case, "cpu")
    if case.mask == "random":
        inputs = listed(replace(inputs, k=inputs.k.nan_to_num(), v=inputs.v.nan_to_num()))
    gradients = make_flex_gradients(inputs, of)
    mask = inputs.block_mask
    if mask is not None and inputs.mask is not None:
        mask = with_mask_mod(mask, inputs.mask.numpy())
    arrays = [x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)]
    options = (numpy_mod(inputs), mask, case.scale, True)
    results = reference.flex_attention(*arrays, *options, return_lse=True)
    for got, want in zip(results, forward(inputs), strict=False):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-9, atol=1e-12)
    grad_lse = None if gradients.dlse is None else gradients.dlse.double().numpy()
    *found, captured = flex_attention_backward(
        gradients.dout.double().numpy(), *arrays, *results, *options, grad_lse=grad_lse
    )
    wanted = reference_backward(inputs, gradients)
    assert list(captured) == list(wanted.captured)
    for got, want in zip(
        (*found, *captured.values()),
        (*wanted.rows.values, *[x.value for x in wanted.captured.values()]),
        strict=True,
    ):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-9, atol=1e-12)
    assert of != "lse" or not found[2].any()


def test_gradients_of_tensors() -> None:
    """Gradients are tensors of the dtypes of what they belong to."""
    inputs = make_flex_backward_inputs(FlexCase(**SMALL, score="head scale", gap=0.0), "cpu")
    mod = numpy_mod(inputs)
    assert mod is not None
    mod.capture_grads["factor"] = (
        captured_tensors(inputs)["factor"].detach(),
        mod.capture_grads["factor"][1],
    )
    out, lse = exact_results(inputs)
    grad = make_flex_gradients(inputs).dout
    arrays = [grad, inputs.q, inputs.k, inputs.v, out, lse]
    *found, captured = flex_attention_backward(*arrays, mod)
    assert [x.dtype for x in found] == [torch.bfloat16] * 3 and captured["factor"].dtype == torch.float16
    *want, wanted = flex_attention_backward(*[x.double().numpy() for x in arrays], mod)
    for got, one in zip((*found, captured["factor"]), (*want, wanted["factor"]), strict=True):
        np.testing.assert_allclose(got.double().numpy(), one, rtol=2**-8, atol=1e-6)
