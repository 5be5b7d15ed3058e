"""The kit of dense attention and prefix prefill: inputs, references on the device, comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kit.generators import on_numpy
from kit.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs, tokens_of
from kit.mha import reference as torch_reference
from kit.mha_backward import (
    Gradients,
    check_mha_backward,
    exact_results,
    make_mha_gradients,
    reference_backward,
)
from kit.prefix import (
    GARBAGE,
    PrefixCase,
    PrefixInputs,
    check_prefix,
    decode_out,
    encode_out,
    make_prefix_inputs,
    written_rows,
)
from kit.prefix import reference as prefix_reference
from rawmla import reference

torch = pytest.importorskip("torch")
from operations.dense import named_arguments  # noqa: E402
from operations.dense_backward import BackwardInputs, named_backward_arguments  # noqa: E402

FIXED = {"b": 2, "s_q": 7, "s_k": 9, "d_qk": 24, "d_v": 16}
SEGMENTS: dict[str, Any] = {"q_lengths": (3, 0, 6, 1), "k_lengths": (5, 4, 0, 2), "d_qk": 24, "d_v": 16}
SAME: dict[str, Any] = {**SEGMENTS, "k_lengths": (3, 0, 6, 1), "h_q": 2}
CASES = (
    MhaCase(**FIXED),
    MhaCase(**FIXED, causal=True, softmax_scale=0.3, layout="slice"),
    MhaCase(**{**FIXED, "s_q": 9, "s_k": 4}, causal=True, layout="heads"),
    MhaCase(**FIXED, window=(2, 1), softcap=15.0, sink="bfloat16", alibi="heads"),
    MhaCase(**FIXED, window=(-1, 0), sink="infinite", alibi="requests", dtype="float16", h_q=6),
    MhaCase(**FIXED, window=(0, -1), h_q=2, h_kv=1, layout="slice"),
    MhaCase(**SEGMENTS, rows_around=2, causal=True),
    MhaCase(**SEGMENTS, q_used=(2, 0, 6, 1), k_used=(5, 0, 0, 1), alibi="requests", sink="float32"),
    MhaCase(**SEGMENTS, packed="kv", window=(3, 0), layout="slice"),
    MhaCase(**{**SEGMENTS, "d_v": 24}, packed="kv4", k_used=(1, 2, 0, 1)),
    MhaCase(**SAME, packed="qkv", q_used=(1, 0, 2, 1)),
    MhaCase(**{**SAME, "d_v": 24}, packed="qkv4", rows_around=1),
    MhaCase(**{**FIXED, "b": 0}),
    MhaCase(q_lengths=(), k_lengths=(), rows_around=2, d_qk=24, d_v=16),
)
GRADIENTS = ("out", "lse", "both")


def name_of(x: Any) -> str:
    """A case or a kind of gradients in the name of a test."""
    return x if isinstance(x, str) else x.id


def by_definition(inputs: MhaInputs, gradients: Gradients | None = None, results: Any = None) -> Any:
    """The NumPy reference, of float64 arrays: out and lse, or the gradients that follow from them."""
    if gradients is None:
        name, arguments = named_arguments(inputs)
    else:
        name, arguments = named_backward_arguments(BackwardInputs(inputs, gradients, results))
    for key, x in arguments.items():
        if isinstance(x, torch.Tensor):
            arguments[key] = (x.double() if x.is_floating_point() else x).numpy()
    return tuple(torch.from_numpy(x.copy()) for x in getattr(reference, name)(**arguments))


# ---- inputs


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_memory_of_no_token_holds_the_gap(case: MhaCase) -> None:
    """Tokens are finite, whatever the layout."""
    inputs = make_mha_inputs(case, "cpu")
    places = [(..., ...)] if inputs.cu_seqlens_q is None else tokens_of(inputs)
    for array, side in ((inputs.q, 0), (inputs.k, 1), (inputs.v, 1)):
        rows = torch.zeros(array.shape[:-2], dtype=torch.bool)
        for place in places:
            rows[place[side]] = True
        assert bool(array[rows].isfinite().all()) and not bool(array[~rows].isfinite().any())
        if inputs.parts is None:
            whole = torch.empty(0, dtype=array.dtype).set_(array.untyped_storage())
            assert int(whole.isfinite().sum()) == array[rows].numel()


# ---- references


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_references(case: MhaCase) -> None:
    """Forward; backward from rounded results, as the definition takes them, and from exact ones."""
    inputs = make_mha_inputs(case, "cpu")
    rows, exact = covered_rows(inputs), torch_reference(inputs)
    for got, want in zip(exact, by_definition(inputs), strict=True):
        torch.testing.assert_close(got[rows], want[rows], rtol=1e-9, atol=1e-11)
    for of, given in itertools.product(GRADIENTS, (exact_results(inputs), None)):
        gradients = make_mha_gradients(inputs, of)
        found = reference_backward(inputs, gradients, given).values
        wanted = by_definition(inputs, gradients, exact if given is None else given)
        assert len(found) == len(wanted) == (3 if case.sink is None else 4)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


# ---- comparison of the forward


def rounded(inputs: MhaInputs) -> tuple[Any, Any]:
    """What an exact kernel would give."""
    out, lse = torch_reference(inputs)
    return out.to(inputs.q.dtype), lse.float()


def test_the_comparison_finds_what_is_wrong() -> None:
    inputs = make_mha_inputs(MhaCase(s_q=70, s_k=90, d_v=64), "cpu")
    planted: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
        ("out are infinite", lambda out, lse: out[1, 2].fill_(float("nan"))),
        ("L2 error of out", lambda out, lse: out.mul_(1.02)),
        ("L2 error of a row of out 4", lambda out, lse: out[0, 3, 1].mul_(1.02)),
        ("plain torch", lambda out, lse: out[0, 3, 1, 5].add_(0.1)),
        ("error of lse", lambda out, lse: lse[1, 1, 4].add_(0.001)),
        ("lse is infinite", lambda out, lse: lse[1, 1, 4].fill_(float("-inf"))),
    )
    check_mha(inputs, rounded(inputs), plain=True)
    for text, change in planted:
        results = rounded(inputs)
        change(*results)
        with pytest.raises(AssertionError, match=text):
            check_mha(inputs, results, plain=True)


# ---- comparison of gradients


def exact_gradients(inputs: MhaInputs, gradients: Gradients, results: tuple[Any, Any]) -> list[Any]:
    """What an exact kernel would give; the emulator's tests check what real ones give."""
    found = reference_backward(inputs, gradients, results).values
    sources = (inputs.q, inputs.k, inputs.v, inputs.attn_sink)
    return [x.to(source.dtype) for x, source in zip(found, sources, strict=False)]


# With rows that attend nothing.
SINK = MhaCase(s_q=130, s_k=100, d_qk=64, d_v=64, causal=True, sink="bfloat16")
PLANTED: tuple[tuple[str, Callable[[list[Any]], Any]], ...] = (
    ("dq is not 0 in a row", lambda got: got[0][1, 29, 1, 3].fill_(1e-6)),
    ("dq is not 0 in a row", lambda got: got[0][1, 29, 1, 3].fill_(torch.nan)),
    ("error of dsink", lambda got: got[3][1].mul_(1.02)),
    ("error of dsink", lambda got: got[3][1].fill_(torch.nan)),
    ("3 gradients instead of 4", lambda got: got.pop()),
    (": relative L2 error of dq", lambda got: got[0].mul_(1.02)),
    (": L2 error of a row of dk ", lambda got: got[1][1, 99, 1].mul_(1.05)),
    ("elements of dv are", lambda got: got[2][1, 99, 1, 3].fill_(torch.nan)),
    ("largest error of dk ", lambda got: got[1][1, 99, 1, 3].add_(0.2)),
    ("dv of torch.float32", lambda got: got.__setitem__(2, got[2].float())),
    ("dq of .* shape", lambda got: got.__setitem__(0, got[0][:1])),
)


def test_the_comparison_finds_planted_gradients() -> None:
    inputs = make_mha_inputs(SINK, "cpu")
    gradients, results = make_mha_gradients(inputs, "both"), exact_results(inputs)
    found = exact_gradients(inputs, gradients, results)
    check_mha_backward(inputs, gradients, results, tuple(found), plain=True)
    for text, change in PLANTED:
        got = [x.clone() for x in found]
        change(got)
        with pytest.raises(AssertionError, match=text):
            check_mha_backward(inputs, gradients, results, tuple(got), plain=True)
    of_lse = make_mha_gradients(inputs, "lse")
    got = exact_gradients(inputs, of_lse, results)
    got[2].view(-1)[got[1].view(-1) != 0] = 1e-30
    with pytest.raises(AssertionError, match="dv is not 0 without"):
        check_mha_backward(inputs, of_lse, results, tuple(got))


# ---- prefix prefill

SMALL: dict[str, Any] = {"query_lengths": (3, 0, 1, 6, 2), "contexts": (9, 5, 16, 0, 21), "d": 24}
PREFIX_CASES = (
    PrefixCase(**SMALL, block_size=4),
    PrefixCase(**SMALL, block_size=4, x=4, pack=2, padded=True, rows_around=2, layout="slice"),
    PrefixCase(**SMALL, block_size=1, x=24, table="int64", window=5, dtype="float16", layout="heads"),
    PrefixCase(**SMALL, block_size=7, x=1, table="pointers", causal=False, window=3, padded=True),
    PrefixCase(**SMALL, block_size=4, own_cached=True, window=6, sinks="infinite", alibi=True, h_q=6),
    PrefixCase(**SMALL, block_size=4, own_cached=True, causal=False, skip_decode=True, sinks="bfloat16"),
    PrefixCase(
        **SMALL, block_size=16, x=3, kv_cache_dtype="fp8", k_scale=0.3, v_scale=2.0, device_scales=True
    ),
    PrefixCase(
        **SMALL, block_size=8, pack=4, kv_cache_dtype="fp8_e5m2", bytes_dtype="uint8", own_cached=True,
        sinks="float32", out_scale=0.01,
    ),
    PrefixCase(**SMALL, kv_cache_dtype="fp8_e4m3", bytes_dtype="int8", out_scale=0.001, device_scales=True),
    PrefixCase(**SMALL, block_size=4, x=2, pack=4, window=1, sinks="float32"),
    PrefixCase(**SMALL, block_size=3, pack=1, window=100, table="pointers", kv_cache_dtype="fp8_e5m2"),
    PrefixCase(query_lengths=(6, 4, 2), contexts=(-2, -4, 0), d=24, own_cached=True),
    PrefixCase(query_lengths=(6, 4, 2), contexts=(-2, -4, 5), d=24, block_size=4, window=3),
    PrefixCase(**SMALL, room=40, block_size=4, sm_scale=0.4, uniform=1e-3),
)  # fmt: skip


def on_host(inputs: PrefixInputs) -> PrefixInputs:
    """The same with NumPy arrays: float64, and bytes."""
    bytes_of = {
        name: x.view(torch.uint8)
        for name in ("k_cache", "v_cache")
        if (x := getattr(inputs, name)).element_size() == 1
    }
    host = on_numpy(replace(inputs, **bytes_of))
    if bytes_of and inputs.case.bytes_dtype == "float8":
        kind = getattr(ml_dtypes, str(inputs.k_cache.dtype).removeprefix("torch."))
        host = replace(host, k_cache=host.k_cache.view(kind), v_cache=host.v_cache.view(kind))
    if inputs.case.table == "pointers":
        first, step = inputs.k_cache.data_ptr(), inputs.k_cache.stride(0) * inputs.k_cache.element_size()
        moved = (host.b_loc - first) // step * host.k_cache.strides[0] + host.k_cache.ctypes.data
        is_address = (host.b_loc > 0) & (host.b_loc != GARBAGE["pointers"])
        host = replace(host, b_loc=np.where(is_address, moved, host.b_loc))
    return host


@pytest.mark.parametrize("case", PREFIX_CASES, ids=name_of)
def test_the_reference_of_prefixes(case: PrefixCase) -> None:
    """It gives what the definition gives of NumPy arrays, and rounded of tensors; all write the same rows."""
    inputs = make_prefix_inputs(case, "cpu")
    got, rows = prefix_reference(inputs), written_rows(inputs)
    others = torch.ones(len(got), dtype=torch.bool)
    others[rows] = False
    assert bool(got[rows].isfinite().all()) and got[rows].numel() and bool(got[others].isnan().all())
    in_bytes = case.out_scale is not None
    o = torch.full(inputs.q.shape, 7, dtype=torch.uint8 if in_bytes else inputs.q.dtype)
    want = reference.context_attention_fwd(**inputs.keywords(o))
    rounded = encode_out(got / float(inputs.out_scale)) if in_bytes else got.to(want.dtype)
    assert want is o and torch.equal(rounded[rows], want[rows])
    exact = np.full(inputs.q.shape, 7, np.uint8 if in_bytes else np.float64)
    reference.context_attention_fwd(**on_host(inputs).keywords(exact))
    wanted = rounded if in_bytes else got
    np.testing.assert_allclose(exact[rows], wanted[rows].numpy(), rtol=1e-9, atol=1e-12)
    assert bool((want[others] == 7).all()) and (exact[others.numpy()] == 7).all()


@pytest.mark.parametrize("case", PREFIX_CASES, ids=name_of)
def test_caches_and_tables_hold_the_gap(case: PrefixCase) -> None:
    """And entries of pages that no query sees are garbage."""
    inputs = make_prefix_inputs(case, "cpu")
    cached = pages = 0
    for n, context in zip(case.query_lengths, case.contexts, strict=True):
        seq_len, older = n + context, max(context, 0)
        first = max(older - case.window + 1, 0) if case.window else 0
        seen = range(first, seq_len if case.own_cached else older) if n else range(0)
        cached += len(seen)
        pages += len({t // case.block_size for t in seen})
    for cache in (inputs.k_cache, inputs.v_cache):
        whole = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
        if case.float8 is None:
            taken = whole.isfinite()
        else:
            taken = whole.view(torch.uint8) != 0x7F
        assert int(taken.sum()) == cached * case.h_kv * case.d
    assert int((inputs.b_loc != GARBAGE[case.table]).sum()) == pages
    for array in (inputs.q, inputs.k, inputs.v):
        if array is not None:
            whole = torch.empty(0, dtype=array.dtype).set_(array.untyped_storage())
            assert int(whole.isfinite().sum()) == sum(case.query_lengths) * array.shape[1] * case.d


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_comparison_of_bytes(dtype: str) -> None:
    """It takes what products in the dtype give, and refuses rounding towards 0 and other errors."""
    case = PrefixCase(query_lengths=(60, 40), contexts=(70, 3), d=64, out_scale=0.01, dtype=dtype)
    inputs = make_prefix_inputs(case, "cpu")
    want = prefix_reference(inputs) / 0.01
    noise = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half_step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    typical = want.square().mean(-1, keepdim=True).sqrt()
    check_prefix(inputs, encode_out(want))
    check_prefix(inputs, encode_out(want + noise * typical * half_step * 0.4))
    down = encode_out(want)
    down -= (decode_out(down).abs() > want.abs()).to(torch.uint8)
    for wrong, text in (
        (down, "an element of o"),
        (encode_out(want * 1.1), "L2 error of o"),
        (encode_out(want).index_fill(0, torch.tensor([5]), 0x7F), "NaN"),
        (encode_out(want).index_fill(0, torch.tensor([5]), 0), "an element of o"),
    ):
        with pytest.raises(AssertionError, match=text):
            check_prefix(inputs, wrong)
