"""Score and mask functions as types of a kernel, and CUDA text as functions: the text compiles, its bytes are
as the compiler lays them out, and its gradients are those of autograd.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flex_functions import BIAS, SLOPES, draw, points
from flex_points import compile_alone, evaluate, needs_host_compiler, pack

from rawmla.flex.header import HEADER_NAME, header
from rawmla.flex.mods import NO_BYTES, Capture, CudaMod, Mod, Number, Place

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

MIXED = Mod(
    "const float bias = mod.t1(h, q_idx, kv_idx) * mod.n0;\n"
    "return score + mod.t0() + bias + static_cast<float>(mod.n1) * mod.n2 + mod.t2(b);",
    (Capture(None, "float32", 0), Capture(None, "bfloat16", 3), Capture(None, "int64", 1)),
    (Number(0.5, False), Number(-7, True), Number(2.25, False)),
)
PLACES = (Place(0x1000, (), ()), Place(0x2000, (4, 50, 60), (3000, 60, 1)), Place(0x3000, (9,), (2,)))


def compiled(text: str, *conditions: str) -> None:
    """Compile a kernel that calls both functions; the conditions hold while it is compiled."""
    main = """
extern "C" __global__ void probe(const __grid_constant__ ScoreMod score, const __grid_constant__ MaskMod mask,
                                 float* out) {
    const int i = threadIdx.x;
    out[i] = mask(0, 1, i, 2 * i, 100, 100) ? score(out[i], 0, 1, i, 2 * i, 100, 100) : 0.0f;
}
"""
    asserts = "".join(f"static_assert({condition});\n" for condition in conditions)
    compile_alone(f'#include "{HEADER_NAME}"\n{asserts}{main}', {}, mods=text)


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    (
        ((), (), "kSmall"),
        ((2, 4), (2**31 - 4, 1), "kSmallRows"),
        ((2, 5), (2**31 - 4, 1), "kAny"),
        ((1, 4), (2**31 - 1, 1), "kSmallRows"),
        ((1, 4), (2**31, 1), "kAny"),
        ((2,), (2**31 - 1,), "kSmall"),
        ((2,), (2**31,), "kAny"),
        ((3,), (2**30,), "kAny"),
        ((2, 2), (2**30, 2**30 - 1), "kSmall"),
        ((2, 2), (2**30, 2**30), "kAny"),
        ((2, 2), (-(2**30), 1 - 2**30), "kSmall"),
        ((2, 2), (-(2**30), -(2**30)), "kAny"),
        ((1, 4), (-(2**31), 1), "kAny"),
    ),
)
def test_offsets_of_32_bits_reach_the_last_element(
    shape: tuple[int, ...], strides: tuple[int, ...], layout: str
) -> None:
    """They serve where all strides and the offset of the last element are below 2**31."""
    assert Place(0x1000, shape, strides).layout() == layout


def test_bytes_are_as_the_compiler_lays_them_out() -> None:
    packed = pack(MIXED, PLACES)
    sizes = {
        "ScoreMod": len(packed),
        "Captured<float, 0>": 24,
        "Captured<Bf16, 3>": 48,
        "Captured<i64, 1>": 24,
    }
    compiled(header(MIXED, None), *[f"sizeof({name}) == {size}" for name, size in sizes.items()])
    assert struct.unpack_from("<Q3q3i", packed, 24) == (0x2000, 3000, 60, 1, 4, 50, 60)
    assert struct.unpack_from("<Qqi", packed, 72) == (0x3000, 2, 9)
    assert struct.unpack_from("<f4xqf", packed, 96) == (0.5, -7, 2.25)
    scaled = Mod("return score * mod.n0;", (), (Number(0.5, False),))
    compiled(header(scaled, None), f"sizeof(ScoreMod) == {len(pack(scaled, ()))}", "alignof(MaskMod) == 8")
    facts = (
        "!ScoreMod::kIsThere",
        "!MaskMod::kIsThere",
        "ScoreMod::kDerivativeIsOne",
        "ScoreMod::kSites == 0",
    )
    sizes_alone = (f"sizeof({name}) == {len(NO_BYTES)}" for name in ("ScoreMod", "MaskMod"))
    compiled(header(None, None), *facts, *sizes_alone)


def test_numbers() -> None:
    """They are no part of the text. Floats too large become infinite; integers are refused."""
    first, second = (CudaMod("score * scale", {"scale": scale}).mod() for scale in (2.0, 3.5))
    assert header(first, None) == header(second, None) and pack(first, ()) != pack(second, ())
    for number in (np.float32(2), np.float16(0.5), np.int64(3), np.uint8(200), np.bool_(True)):
        mods = [CudaMod("score * scale", {"scale": scale}).mod() for scale in (number, number.item())]
        assert mods[0] == mods[1] and pack(mods[0], ()) == pack(mods[1], ())
    text = "return score * mod.n0 + mod.n1;"
    mod = Mod(text, (), (Number(1e39, False), Number(-(2**63), True)))
    assert struct.unpack("<f4xq", pack(mod, ())) == (float("inf"), -(2**63))
    with pytest.raises(ValueError, match="integers of 64 bits, got 9223372036854775808"):
        pack(Mod(text, (), (Number(1e39, False), Number(2**63, True))), ())


@pytest.mark.parametrize(
    ("code", "grad", "line"),
    (
        ("const float x = score;\nreturn y;", None, "return y;"),
        ("score * n", "const float y = grad * n;\nreturn z;", "return z;"),
    ),
)
def test_errors_point_at_the_users_line(code: str, grad: str | None, line: str) -> None:
    mod = CudaMod(code, {"n": 2.0}, grad=grad).mod(backward=grad is not None)
    text = header(mod, None)
    at = text.split("\n").index(line) + 1
    error = rf'user/mods.cuh\({at}\): error: identifier "{line[7]}" is undefined'
    with pytest.raises(AssertionError, match=error):
        compiled(text)


TABLE = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    (
        ((3,), TypeError, "^code: expected CUDA text, got 3"),
        (("  ",), TypeError, "^code: expected CUDA text"),
        (("score", {"a b": 1}), ValueError, "C identifiers, got 'a b'"),
        (("score", {"q_idx": 1}), ValueError, "got 'q_idx'"),
        (("score", {"table": [1, 2]}), TypeError, "expected table to be an array or a number"),
        (("score", {"gradient_sink": 1}), ValueError, "got 'gradient_sink'"),
        (
            ("score", {"n": np.uint64(2**63)}),
            ValueError,
            "n to be an int of 64 bits, got 9223372036854775808",
        ),
        (("score", {"z": np.complex64(1)}), TypeError, "expected z to be an array or a number"),
    ),
)
def test_refused(given: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CudaMod(*given)


@pytest.mark.parametrize(
    ("grad", "capture_grads", "error", "message"),
    (
        (3, None, TypeError, "^grad: expected CUDA text, got 3"),
        (" ", None, TypeError, "^grad: expected CUDA text, got ' '"),
        (None, "table", TypeError, "^capture_grads: expected a mapping"),
        (None, {"other": ("", "1")}, ValueError, "arrays in captures, got 'other'"),
        (None, {"number": ("", "1")}, ValueError, "arrays in captures, got 'number'"),
        (None, {"table": "grad"}, TypeError, "table to have indices and a value"),
        (None, {"table": ("i", "j", "grad")}, TypeError, "table to have indices and"),
        (None, {"table": (("i", 3),)}, TypeError, "table to have indices and a value"),
        (None, {"table": ("i", " ")}, ValueError, "expected table to have a value"),
    ),
)
def test_gradients_that_are_refused(
    grad: Any, capture_grads: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CudaMod("score", {"table": TABLE, "number": 3.0}, grad=grad, capture_grads=capture_grads)


# ---- gradients of CUDA text


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured arrays are tensors of the CPU."""
    monkeypatch.setattr(
        "rawmla.flex.mods.inspect", lambda x, name: SimpleNamespace(dtype=str(x.dtype)[6:], shape=x.shape)
    )


TEXTS: dict[str, tuple[CudaMod, Callable[..., Any], list[tuple[int, bool, bool]], bool]] = {
    "comments and statements": (
        CudaMod(
            "const float x = score * n; // twice\nreturn x * slopes(h);",
            {"n": 2, "slopes": SLOPES},
            grad="const float x = n * grad;\nreturn x * slopes(h); // by it",
            capture_grads={"slopes": ("h // head", "grad * n * score // grad")},
        ),
        lambda s, b, h, q, k: s * 2 * SLOPES[h].float(),
        [(0, False, False)],
        False,
    ),
    "several": (
        CudaMod(
            "score + bias(0, q_idx, kv_idx) + bias(-1, kv_idx, 5) * slopes(h)",
            {"bias": BIAS, "slopes": SLOPES},
            grad="grad",
            capture_grads={
                "slopes": ("h", "bias(-1, kv_idx, 5) * grad"),
                "bias": [("0, q_idx, kv_idx", "grad"), ("-1, kv_idx, 5", "grad * slopes(h)")],
            },
        ),
        lambda s, b, h, q, k: s + BIAS[0, q, k] + BIAS[-1, k, 5] * SLOPES[h].float(),
        [(0, True, True), (0, False, True), (1, False, False)],
        True,
    ),
    "names inside": (
        CudaMod(
            "const float value = score; const float v0 = value;\nreturn v0 + (q_len - q_len) + sink;",
            {"sink": 0.0},
            grad="const float value = grad; return value;",
        ),
        lambda s, b, h, q, k: s,
        [],
        False,
    ),
}


@needs_host_compiler
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.usefixtures("on_the_cpu")
def test_gradients(name: str) -> None:
    """CUDA text has the gradients of the same function in Python."""
    given, function, sites, is_one = TEXTS[name]
    for tensor in (BIAS, SLOPES):
        tensor.requires_grad_()
    mod, same = given.mod(backward=True), trace(function, "score_mod", backward=True)
    evaluate(mod, *points(), launch=compile_alone)
    grads = torch.randn(100, generator=draw(8))
    results = []
    for one in (mod, same):
        *found, _, gradients = evaluate(one, *points(), grads)
        results.append([*found, {one.captures[i].name.lower(): x for i, x in gradients.items()}])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)
    assert mod.backward is not None and [tuple(site) for site in mod.backward.sites] == sites
    assert mod.backward.is_one == is_one


@pytest.mark.usefixtures("on_the_cpu")
def test_gradients_that_are_missing() -> None:
    mod = CudaMod("2 * score", grad="2 * grad").mod()
    assert mod.backward is None and "value_and_derivative" not in header(mod, None)
    table, buckets = torch.randn(50, requires_grad=True), torch.arange(50)
    given: dict[str, Any] = {"grad": "grad", "capture_grads": {"table": ("q_idx", "grad")}}
    with pytest.raises(ValueError, match="expected table to be of a floating-point dtype, got int64"):
        CudaMod("score + table(q_idx)", {"table": buckets}, **given).mod(backward=True)
    mod = CudaMod("score + table(q_idx)", {"table": table.detach()}, **given).mod(backward=True)
    assert mod.backward is not None and mod.backward.sites == mod.backward.gradients == ()
