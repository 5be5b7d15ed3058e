"""The backward of dense attention at the borders of what it takes, and with CuPy, streams and graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from gpu_support import (
    assert_poison,
    assert_same_bits,
    bits,
    cupy,
    no_kernel_loaded,
    replaced_launches,
    torch,
)
from mha_backward_calls import (
    NAMES,
    BackwardInputs,
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
    function_and_arguments,
    gradient_buffers,
)
from mha_calls import CANARY, assert_untouched_around
from test_frameworks import DELAY_CYCLES, to_cupy
from test_graphs import capture
from test_mha_bits import SIZES as RACE_SIZES
from test_mha_edges import at_offset, in_order, odd_rows, part_of_a_projection
from test_mha_frameworks import as_torch, mapped

import rawmla
from kit.mha import MhaCase, make_mha_inputs
from kit.mha_backward import MhaGradients, reference_backward, rows_in_use
from rawmla.call import frameworks
from rawmla.jit import loading

RAGGED: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
BATCH = MhaCase(b=3, s_q=150, s_k=200, causal=True, sink="float32", layout="heads")
SEGMENTS = MhaCase(
    **RAGGED, q_used=(290, 0, 0, 77, 3, 60), k_used=(250, 90, 0, 5, 129, 513), rows_around=9, layout="slice",
    window=(100, 3), alibi="requests", sink="bfloat16", d_qk=64, d_v=64,
)  # fmt: skip
CASES = (BATCH, SEGMENTS, MhaCase(**RAGGED, d_qk=96, d_v=96, dtype="float16"))


def batch(of: str = "both", **options: Any) -> BackwardInputs:
    return backward_inputs(make_mha_inputs(MhaCase(b=3, s_q=150, s_k=200, causal=True, **options)), of)


def map_call(call: BackwardInputs, change: Callable[[Any], Any]) -> BackwardInputs:
    """The call on other arrays, which `change` makes of the torch tensors."""
    dlse = call.gradients.dlse
    return BackwardInputs(
        mapped(call.inputs, change),
        MhaGradients(change(call.gradients.dout), None if dlse is None else change(dlse)),
        (change(call.results[0]), change(call.results[1])),
    )


def with_array(call: BackwardInputs, name: str, change: Callable[[Any], Any]) -> BackwardInputs:
    """The call with one array laid out otherwise."""
    if name in ("q", "k", "v"):
        return replace(call, inputs=replace(call.inputs, **{name: change(getattr(call.inputs, name))}))
    if name == "out":
        return replace(call, results=(change(call.results[0]), call.results[1]))
    return replace(call, gradients=replace(call.gradients, dout=change(call.gradients.dout)))


# ---- nothing to attend


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@pytest.mark.parametrize("spoiler", (nan, inf))
def test_backward_of_rows_without_keys(spoiler: float, of: str) -> None:
    """The first 140 of 200 query tokens see none of 60 keys: what their rows hold reaches nothing."""
    for sink in (None, "float32", "infinite"):
        inputs = make_mha_inputs(MhaCase(s_q=200, s_k=60, causal=True, sink=sink, gap=spoiler))
        call = backward_inputs(inputs, of)
        assert not bool(call.gradients.dout[:, :140].isfinite().any())
        inputs.q[:, :140] = spoiler
        call.results[0][:, :140] = spoiler
        got = backward_of(call)
        check_backward(call, got)
        assert_same_bits("dq", got[0][:, :140], torch.zeros_like(got[0][:, :140]))


@pytest.mark.parametrize("window", ((-1, 0), (3, 0), (0, -1), (5, 7), (200, 0)), ids=str)
def test_backward_of_rows_without_keys_in_windows(window: tuple[int, int]) -> None:
    for s_q, s_k in ((300, 1), (400, 130), (129, 64)):
        inputs = make_mha_inputs(MhaCase(s_q=s_q, s_k=s_k, window=window, sink="bfloat16"))
        call = backward_inputs(inputs, "both")
        check_backward(call, backward_of(call))


@pytest.mark.parametrize("spoiler", (nan, inf))
@pytest.mark.parametrize("left", (0, 30, 100))
@pytest.mark.parametrize("d", (64, 128))
def test_keys_that_no_query_sees_may_hold_anything(d: int, left: int, spoiler: float) -> None:
    """Those ahead of the first query's window, in a tile with others that count."""
    inputs = make_mha_inputs(MhaCase(s_q=70, s_k=333, window=(left, -1), d_qk=d, d_v=d))
    unseen = ~rows_in_use(inputs)[1]
    assert bool(unseen[:, : 333 - 70 - left].all()) and not bool(unseen[:, 333 - 70 - left :].any())
    call = backward_inputs(inputs, "both")
    want = backward_of(call)
    check_backward(call, want)
    inputs.k[unseen], inputs.v[unseen] = spoiler, spoiler
    got = backward_of(call)
    check_backward(call, got)
    assert_same_gradients("unseen keys spoilt", got, want)


@pytest.mark.parametrize(
    ("b", "s_q", "s_k"), ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0)), ids=str
)
@pytest.mark.parametrize("given", (False, True))
def test_backward_of_empty_calls(b: int, s_q: int, s_k: int, given: bool) -> None:
    for segments in (False, True):
        sizes: dict[str, Any] = {"b": b, "s_q": s_q, "s_k": s_k}
        if segments:
            sizes = {"q_lengths": (s_q,) * b, "k_lengths": (s_k,) * b}
        call = backward_inputs(make_mha_inputs(MhaCase(**sizes, sink="float32")), "both")
        buffers, arrays_given = gradient_buffers(call.inputs, CANARY) if given else ([], {})
        got = backward_of(call, **arrays_given)
        sources = (call.inputs.q, call.inputs.k, call.inputs.v, call.inputs.attn_sink)
        for one, source in zip(got, sources, strict=True):
            assert one.shape == source.shape and one.dtype == source.dtype and not bool(one.any())
        for buffer, array in zip(buffers, arrays_given.values(), strict=True):
            assert_untouched_around(buffer, array)


@pytest.mark.parametrize("sink", (None, "float32", "infinite"))
def test_dv_without_a_gradient_of_out_is_0(sink: str | None) -> None:
    for case in (MhaCase(s_q=150, s_k=200, sink=sink, h_kv=1), MhaCase(**RAGGED, sink=sink, causal=True)):
        call = backward_inputs(make_mha_inputs(case), "lse")
        got = backward_of(call)
        check_backward(call, got)
        assert bool(got[0].any()) and bool(got[1].any()) and not bool(got[2].any())


@pytest.mark.parametrize("dtype", ("float64", "bfloat16", "float16"))
def test_dsink_in_the_dtype_of_the_sink(dtype: str) -> None:
    """That of the same sink in float32, rounded."""
    call = batch(sink="bfloat16")
    sink = call.inputs.attn_sink.to(getattr(torch, dtype))
    assert bool((sink.float() == call.inputs.attn_sink.float()).all())
    exact, got = (
        backward_of(replace(call, inputs=replace(call.inputs, attn_sink=one)))[3]
        for one in (sink.float(), sink)
    )
    assert exact.dtype == torch.float32 and bool(exact.any())
    assert_same_bits("dsink", got, exact.to(sink.dtype))


def test_gradients_within_flash_attention_bounds_of_lse() -> None:
    """dq, dk and dv from a gradient of lse within 0.02 of float64, at 128 to 256 tokens."""
    for s_q, s_k in ((128, 128), (200, 256), (256, 131)):
        for of in ("lse", "both"):
            call = backward_inputs(make_mha_inputs(MhaCase(s_q=s_q, s_k=s_k, d_qk=64, d_v=64)), of)
            want = reference_backward(call.inputs, call.gradients).values
            for name, one, wanted in zip(NAMES, backward_of(call), want, strict=False):
                assert float((one.double() - wanted).abs().max()) < 0.02, (name, s_q, s_k, of)


# ---- layouts


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the arguments that calls copy."""
    made: list[str] = []
    original = frameworks.TorchFramework.aligned_copy

    def counted(self: Any, array: Any, name: str) -> Any:
        made.append(name)
        return original(self, array, name)

    monkeypatch.setattr(frameworks.TorchFramework, "aligned_copy", counted)
    return made


def order_of(x: Any) -> list[int]:
    return sorted(range(4), key=lambda axis: -x.stride(axis))


@pytest.mark.parametrize(
    "change",
    (
        *[in_order(*order) for order in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (2, 0, 1, 3))],
        part_of_a_projection,
        at_offset(8),
    ),
    ids=("b h s d", "s b h d", "h s b d", "h b s d", "projection", "offset of 16 bytes"),
)
def test_backward_layouts_that_are_free(change: Any, copies: list[str]) -> None:
    """Read where they lie; fresh gradients have their dimensions in the order of what they are of."""
    call = batch()
    want = backward_of(call)
    check_backward(call, want)
    moved = call
    for name in ("q", "k", "v", "out", "dout"):
        moved = with_array(moved, name, change)
    got = backward_of(moved)
    assert_same_gradients("laid out", got, want)
    assert copies == []
    for one, name in zip(got, ("q", "k", "v"), strict=True):
        assert order_of(one) == order_of(getattr(moved.inputs, name))
        assert one.numel() == one.untyped_storage().size() // 2


@pytest.mark.parametrize("name", ("q", "k", "v", "out", "dout"))
@pytest.mark.parametrize(
    "change",
    (in_order(0, 1, 3, 2), at_offset(1), odd_rows),
    ids=("last dimension not contiguous", "address", "stride"),
)
def test_backward_layouts_that_are_copied(change: Any, name: str, copies: list[str]) -> None:
    call = batch()
    want = backward_of(call)
    got = backward_of(with_array(call, name, change))
    assert copies == [name]
    assert_same_gradients("copied", got, want)


@pytest.mark.parametrize("axes", ((0,), (1,), (2,), (0, 1, 2)), ids=str)
@pytest.mark.parametrize("names", (("q",), ("k", "v"), ("dout",), ("q", "k", "v", "dout")), ids=str)
def test_backward_of_broadcast_arrays(
    names: tuple[str, ...], axes: tuple[int, ...], copies: list[str]
) -> None:
    """A stride of 0 is read as it is; gradients are dense."""
    call = batch()

    def first_for_all(x: Any) -> Any:
        for axis in axes:
            x = x.narrow(axis, 0, 1).expand(*[x.shape[i] if i == axis else -1 for i in range(4)])
        return x

    inputs, gradients = call.inputs, call.gradients
    for name in names:
        if name != "dout":
            inputs = replace(inputs, **{name: first_for_all(getattr(inputs, name))})
    call = replace(backward_inputs(inputs, "both"), gradients=gradients)
    if "dout" in names:
        call = with_array(call, "dout", first_for_all)
    got = backward_of(call)
    assert copies == []
    checked = got
    if "k" in names and 1 in axes:
        # With one key for all tokens dq is the key times a sum of dS, which cancel: rounding leaves no digit.
        exact = reference_backward(call.inputs, call.gradients, call.results).values[0]
        checked = (exact.to(got[0].dtype), *got[1:])
    check_backward(call, checked)
    dense = {name: getattr(call.inputs, name).contiguous() for name in ("q", "k", "v")}
    gradients = replace(call.gradients, dout=call.gradients.dout.contiguous())
    copied = replace(call, inputs=replace(call.inputs, **dense), gradients=gradients)
    assert_same_gradients("copied", got, backward_of(copied))
    assert all(x.stride(-1) == 1 and 0 not in x.stride() for x in got)


@pytest.mark.parametrize("order", ((0, 2, 1, 3), (2, 1, 0, 3), (1, 0, 2, 3)), ids=str)
def test_gradients_in_another_order(order: tuple[int, ...]) -> None:
    """They are overwritten, not added to, and returned."""
    call = batch()
    want = backward_of(call)
    given = {name: in_order(*order)(torch.full_like(x, nan)) for name, x in zip(NAMES, want, strict=False)}
    got = backward_of(call, **given)
    assert all(one is given[name] for one, name in zip(got, given, strict=True))
    assert_same_gradients("given", got, want)


def test_one_gradient_given() -> None:
    call = batch()
    want = backward_of(call)
    for name, x in zip(NAMES, want, strict=False):
        given = torch.full_like(x, nan)
        got = backward_of(call, **{name: given})
        assert [one is given for one in got] == [name == other for other in NAMES[:3]]
        assert_same_gradients(f"{name} given", got, want)


@pytest.mark.parametrize("segments", (False, True), ids=("batch", "segments"))
@pytest.mark.parametrize("dims", ((1, 1), (17, 33), (127, 3)), ids=str)
@pytest.mark.parametrize("layout", ("plain", "slice"))
def test_backward_of_odd_head_dimensions(dims: tuple[int, int], layout: str, segments: bool) -> None:
    """What lies between the rows of given gradients is not written."""
    sizes: dict[str, Any] = {"s_q": 150, "s_k": 200}
    if segments:
        sizes = {"q_lengths": (130, 0, 1, 128, 41), "k_lengths": (200, 3, 7, 128, 90)}
    inputs = make_mha_inputs(MhaCase(**sizes, d_qk=dims[0], d_v=dims[1], layout=layout, dtype="float16"))
    for sink in (None, torch.randn(4, device="cuda")):
        call = backward_inputs(replace(inputs, attn_sink=sink), "both")
        want = backward_of(call)
        check_backward(call, want)
        buffers, given = gradient_buffers(inputs, CANARY)
        assert_same_gradients("given", backward_of(call, **given), want)
        for buffer, array in zip(buffers, given.values(), strict=True):
            assert_untouched_around(buffer, array)


@pytest.mark.parametrize("axis", (0, 1, 2))
def test_backward_of_strides_past_2_31_elements(axis: int) -> None:
    """Two requests, tokens or heads, 2**31 elements apart; gradients too."""
    sizes = {0: (2, 100, 2), 1: (1, 2, 2), 2: (2, 100, 2)}[axis]
    inputs = make_mha_inputs(MhaCase(b=sizes[0], s_q=sizes[1], s_k=sizes[1], h_q=2, h_kv=2, causal=True))
    call = backward_inputs(inputs, "both")
    room = 1 << 20
    memory = torch.full((2**31 + 10 * room,), nan, dtype=torch.bfloat16, device="cuda")
    strides = list(inputs.q.contiguous().stride())
    strides[axis] = 2**31

    def placed(number: int, values: Any = None) -> Any:
        array = memory.as_strided(inputs.q.shape, strides, number * room)
        return array if values is None else array.copy_(values)

    apart = BackwardInputs(
        replace(inputs, q=placed(0, inputs.q), k=placed(1, inputs.k), v=placed(2, inputs.v)),
        replace(call.gradients, dout=placed(3, call.gradients.dout)),
        (placed(4, call.results[0]), call.results[1]),
    )
    got = backward_of(apart, dq=placed(5), dk=placed(6), dv=placed(7))
    check_backward(call, got)


def test_backward_of_more_than_65535_heads_of_requests() -> None:
    """b * h of 68,160, as a batch and as segments."""
    inputs = make_mha_inputs(MhaCase(b=22720, s_q=3, s_k=5, h_q=3, h_kv=3, d_qk=64, d_v=64, causal=True))
    call = backward_inputs(inputs)
    check_backward(call, backward_of(call))
    ends = torch.arange(22721, dtype=torch.int32, device="cuda")
    q, k, v, dout, out = (
        x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v, call.gradients.dout, call.results[0])
    )
    lse = call.results[1].transpose(1, 2).flatten(0, 1)
    got = rawmla.flash_attn_varlen_backward(dout, q, k, v, out, lse, 3 * ends, 5 * ends, 3, 5, causal=True)
    check_backward(call, tuple(x.unflatten(0, (22720, -1)) for x in got))


# ---- masks


@pytest.mark.parametrize("sizes", ((300, 300), (129, 400), (257, 128)), ids=str)
@pytest.mark.parametrize("d", (64, 128))
def test_backward_windows_at_borders_of_tiles(d: int, sizes: tuple[int, int]) -> None:
    """Of 64 query tokens and of 128 keys, of which a warpgroup has 64."""
    for left in (-1, 0, 1, 63, 64, 65, 127, 128, 129, 299):
        for right in (-1, 0, 1, 63, 64, 128, 300):
            inputs = make_mha_inputs(
                MhaCase(b=1, s_q=sizes[0], s_k=sizes[1], window=(left, right), h_q=2, h_kv=1, d_qk=d, d_v=d)
            )
            call = backward_inputs(inputs)
            check_backward(call, backward_of(call))


# ---- lengths that are too small


TOO_SMALL = MhaCase(q_lengths=(300, 77, 0, 40), k_lengths=(900, 90, 33, 100))


@pytest.mark.parametrize("longest", ((0, 0), (77, 0), (0, 100), (1, 1), (299, 899), (77, 100)), ids=str)
@pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "fixed order"))
def test_backward_with_too_small_bounds_of_lengths(deterministic: bool, longest: tuple[int, int]) -> None:
    """Results are undefined, but nothing outside of dq, dk and dv is written, and no tile waits for the turn
    of one that does not run. The next call is right.
    """
    call = backward_inputs(make_mha_inputs(TOO_SMALL), "both")
    buffers, given = gradient_buffers(call.inputs, CANARY)
    function, arguments, keywords = function_and_arguments(call, deterministic=deterministic, **given)
    function(*arguments[:-2], *longest, **keywords)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)
    check_backward(call, backward_of(call, deterministic=deterministic))


# ---- bits

REPEATS = 1000
TOGETHER = 10  # calls in flight between two comparisons


def assert_repeats(case: MhaCase, of: str, deterministic: bool) -> None:
    """Raise unless all repeats give the bits of the first call in dk, dv and dsink, and in a fixed order in
    dq, which are compared on the device.
    """
    call = backward_inputs(make_mha_inputs(case), of)
    first = backward_of(call, deterministic=deterministic)
    check_backward(call, first)
    skipped = 0 if deterministic else 1
    wanted = [bits(x) for x in first[skipped:]]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS // TOGETHER):
        for results in [backward_of(call, deterministic=deterministic) for _ in range(TOGETHER)]:
            for one, want in zip(results[skipped:], wanted, strict=True):
                different += (bits(one) != want).any()
    assert int(different) == 0, f"{case.id}: {int(different)} of {REPEATS * len(wanted)} results differ"


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("sizes", "d"), (*((sizes, 64) for sizes in RACE_SIZES), ((1024, 128), 128), ((257, 257), 128)), ids=str
)
@pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "fixed order"))
def test_backward_repeats(deterministic: bool, sizes: tuple[int, int], d: int) -> None:
    """At the sizes of the forward's repeats, which are in test_mha_bits.py. Each is causal in one order and
    full in the other. Without poison, whose fills would keep the launches from overlapping.
    """
    causal = deterministic == (RACE_SIZES.index(sizes) % 2 == 0)
    s_q, s_k = sizes
    case = MhaCase(b=60, s_q=s_q, s_k=s_k, h_kv=4, d_qk=d, d_v=d, causal=causal, sink="float32")
    assert_repeats(case, "out", deterministic)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    "case",
    (
        MhaCase(b=60, s_q=257, s_k=257, h_kv=1, causal=True, sink="float32"),
        MhaCase(b=60, s_q=97, s_k=300, h_kv=4, d_qk=96, d_v=96, sink="bfloat16", dtype="float16"),
        MhaCase(b=20, s_q=257, s_k=257, d_qk=64, d_v=64, window=(50, 3), softcap=15.0, alibi="requests"),
        MhaCase(
            q_lengths=(1, 400, 0, 33, 64, 130) * 10, k_lengths=(300, 401, 90, 0, 64, 17) * 10, causal=True
        ),
    ),
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "fixed order"))
def test_backward_repeats_of_other_kernels(case: MhaCase, deterministic: bool) -> None:
    """Groups of heads, sinks with a gradient of lse, flags, and segments."""
    assert_repeats(case, "both", deterministic)


PACKED_LENGTHS = (300, 0, 1, 77, 130, 64)


@pytest.mark.parametrize(
    "case",
    (
        MhaCase(b=3, s_q=300, s_k=457, d_qk=192, causal=True),
        MhaCase(b=3, s_q=300, s_k=457, d_qk=256, d_v=256, window=(200, 30), h_kv=1, layout="slice"),
        MhaCase(**RAGGED, q_used=(290, 0, 0, 77, 3, 60), k_used=(250, 90, 0, 5, 129, 513), rows_around=9,
                d_qk=192, layout="heads"),
        MhaCase(**RAGGED, q_used=(290, 0, 0, 77, 3, 60), k_used=(250, 90, 0, 5, 129, 513), causal=True,
                d_qk=256, d_v=256, h_kv=4),
        MhaCase(q_lengths=PACKED_LENGTHS, k_lengths=PACKED_LENGTHS, packed="qkv", h_kv=4, d_qk=192),
        MhaCase(q_lengths=PACKED_LENGTHS, k_lengths=PACKED_LENGTHS, packed="qkv4", h_kv=4, causal=True),
        MhaCase(**RAGGED, packed="kv", d_qk=192, window=(60, 20)),
        SEGMENTS,
    ),
    ids=lambda case: case.id,
)  # fmt: skip
def test_backward_in_a_fixed_order(case: MhaCase) -> None:
    """dq too has the same bits in every call, into fresh arrays and into given ones. Those of packed arrays
    are parts of one array.
    """
    call = backward_inputs(make_mha_inputs(case), "both")
    want = backward_of(call, deterministic=True)
    check_backward(call, want)
    for _ in range(10):
        got = backward_of(call, deterministic=True)
        assert_same_gradients("again", got, want, exact_dq=True)
    buffers, given = gradient_buffers(call.inputs, CANARY)
    got = backward_of(call, deterministic=True, **given)
    assert all(one is given[name] for one, name in zip(got, given, strict=False))
    assert_same_gradients("given", got, want, exact_dq=True)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)
    if case.packed:
        whole = torch.full_like(call.inputs.parts, nan)
        if case.packed.endswith("4"):
            parts = whole.unbind(1)
        else:
            widths = [case.d_qk] * (2 if case.packed == "qkv" else 1) + [case.d_v]
            parts = whole.split(widths, dim=-1)
        names = NAMES[:3][-len(parts) :]
        got = backward_of(call, deterministic=True, **dict(zip(names, parts, strict=True)))
        assert_same_gradients("packed", got, want, exact_dq=True)
        assert bool(whole.isfinite().all())


def test_backward_under_deterministic_algorithms_of_torch() -> None:
    """torch.use_deterministic_algorithms has the effect of `deterministic=True`."""
    call = backward_inputs(make_mha_inputs(MhaCase(b=8, s_q=300, s_k=900, causal=True, d_qk=192)))
    want = backward_of(call, deterministic=True)
    check_backward(call, want)
    torch.use_deterministic_algorithms(True)
    try:
        results = [backward_of(call) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    for got in results:
        assert_same_gradients("under torch's switch", got, want, exact_dq=True)


# ---- frameworks and graphs


def test_gradients_are_poison_before_the_kernel() -> None:
    """What the other tests rely on, in both frameworks and with rows that are padded."""
    for case in (*CASES, MhaCase(b=2, s_q=70, s_k=90, d_qk=17, d_v=33)):
        call = backward_inputs(make_mha_inputs(case), "both")
        in_cupy = map_call(call, to_cupy)
        with replaced_launches(lambda: None):
            for one in (call, in_cupy):
                for name, result in zip(NAMES, backward_of(one), strict=False):
                    assert_poison(name, result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_backward_of_cupy_arrays(case: MhaCase) -> None:
    """CuPy arrays in, CuPy arrays out; those given are filled."""
    call = backward_inputs(make_mha_inputs(case), "both")
    want = backward_of(call)
    check_backward(call, want)
    in_cupy = map_call(call, to_cupy)
    buffers, given = gradient_buffers(call.inputs, CANARY)
    targets = {name: to_cupy(x) for name, x in given.items()}
    torch.cuda.synchronize()
    got = backward_of(in_cupy)
    assert all(isinstance(x, cupy.ndarray) for x in got)
    assert [x.strides for x in got] == [tuple(x.element_size() * n for n in x.stride()) for x in want]
    filled = backward_of(in_cupy, **targets)
    assert all(one is targets[name] for one, name in zip(filled, targets, strict=False))
    cupy.cuda.get_current_stream().synchronize()
    assert_same_gradients("CuPy", as_torch(got), want)
    assert_same_gradients("CuPy, given", (*given.values(), *as_torch(filled[3:])), want)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)


def test_backward_on_a_side_stream() -> None:
    """dout becomes valid late on a side stream; only work on that stream, after it, sees it."""
    call = backward_inputs(make_mha_inputs(SEGMENTS), "both")
    want = backward_of(call)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # so that the allocator holds memory for the stream
        for _ in range(2):
            backward_of(call)
    valid = call.gradients.dout.clone()
    call.gradients.dout.fill_(nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        call.gradients.dout.copy_(valid)
        got = backward_of(call)
        assert not stream.query(), "the call waited for the device"
        call.gradients.dout.fill_(nan)
    stream.synchronize()
    assert_same_gradients("on a side stream", got, want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_backward_in_a_graph(case: MhaCase) -> None:
    """Replays follow what changes in place: arrays, and lengths."""
    call = backward_inputs(make_mha_inputs(replace(case, gap=0.0)), "both")
    backward_of(call)
    buffers, given = gradient_buffers(call.inputs, CANARY)
    graph, (fresh, filled) = capture(lambda: (backward_of(call), backward_of(call, **given)))
    inputs = call.inputs
    for turn in range(3):
        graph.replay()
        want = backward_of(call)
        check_backward(call, want)
        assert_same_gradients("replayed", fresh, want)
        assert_same_gradients("given", filled, want)
        inputs.q.mul_(0.5)
        if inputs.seqused_q is not None and turn == 0:
            inputs.seqused_q.div_(2, rounding_mode="floor")
            inputs.seqused_k.div_(3, rounding_mode="floor")
        again = backward_inputs(inputs, "both")  # its out, lse and gradients belong to what changed
        for x, other in zip(
            (*call.results, call.gradients.dout, call.gradients.dlse),
            (*again.results, again.gradients.dout, again.gradients.dlse),
            strict=True,
        ):
            x.copy_(other)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)


def test_backward_kernel_missing_in_a_capture() -> None:
    """Nothing is compiled or loaded in a capture, and the refused call leaves nothing behind."""
    call = backward_inputs(make_mha_inputs(SEGMENTS), "both")
    want = backward_of(call)
    with no_kernel_loaded():
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            backward_of(call)
        assert loading.loaded_labels() == []
        assert_same_gradients("after a refused capture", backward_of(call), want)
        torch.cuda.synchronize()  # before the kernels are let go of
