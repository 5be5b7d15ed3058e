"""Score and mask functions as types of a kernel: their text compiles, their bytes are what the text reads."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from cuda_probe import headers
from flex_points import pack

from rawmla.flex.header import HEADER_NAME, header
from rawmla.flex.mods import NO_BYTES, Capture, CudaMod, Mod, Number, Place
from rawmla.jit import nvrtc
from rawmla.jit.sources import SourceSet

MIXED = Mod(
    "const float bias = mod.t1(h, q_idx, kv_idx) * mod.n0;\n"
    "return score + mod.t0() + bias + static_cast<float>(mod.n1) * mod.n2 + mod.t2(b);",
    (Capture(None, "float32", 0), Capture(None, "bfloat16", 3), Capture(None, "int64", 1)),
    (Number(0.5, False), Number(-7, True), Number(2.25, False)),
)
PLACES = (Place(0x1000, (), ()), Place(0x2000, (4, 50, 60), (3000, 60, 1)), Place(0x3000, (9,), (2,)))
CODES = (
    ("score - slope * (q_idx - kv_idx)", "score_mod", {"slope": 0.5}),
    ("if (q_idx < kv_idx) return -kInfinity;\nreturn score * scale;", "score_mod", {"scale": 2}),
    ("q_idx - kv_idx <= width && q_idx < q_len", "mask_mod", {"width": 100}),
)


def compiled(text: str, conditions: str = "") -> str:
    """The log of the compiler for a kernel that calls both functions; raises where there is an error."""
    main = f"""#include "{HEADER_NAME}"
{conditions}
extern "C" __global__ void probe(const __grid_constant__ ScoreMod score, const __grid_constant__ MaskMod mask,
                                 float* out) {{
    const int i = threadIdx.x;
    out[i] = mask(0, 1, i, 2 * i, 100, 100) ? score(out[i], 0, 1, i, 2 * i, 100, 100) : 0.0f;
}}
"""
    sources = SourceSet("probe.cu", main.encode(), (*headers(), (HEADER_NAME, text.encode())))
    result = nvrtc.compile_source(sources, ("-arch=sm_90a", "-std=c++20", "--ptxas-options=-v"))
    assert result.cubin is not None, result.log
    return result.log


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


def test_without_functions() -> None:
    compiled(
        header(None, None),
        f"static_assert(!ScoreMod::kIsThere && !MaskMod::kIsThere && sizeof(MaskMod) == {len(NO_BYTES)});",
    )


def test_bytes_are_as_the_compiler_lays_them_out() -> None:
    packed = pack(MIXED, PLACES)
    sizes = {
        "ScoreMod": len(packed),
        "Captured<float, 0>": 24,
        "Captured<Bf16, 3>": 48,
        "Captured<i64, 1>": 24,
    }
    compiled(
        header(MIXED, None),
        "\n".join(f"static_assert(sizeof({name}) == {size});" for name, size in sizes.items()),
    )
    assert struct.unpack_from("<Q3q3i", packed, 24) == (0x2000, 3000, 60, 1, 4, 50, 60)
    assert struct.unpack_from("<Qqi", packed, 72) == (0x3000, 2, 9)
    assert struct.unpack_from("<f4xqf", packed, 96) == (0.5, -7, 2.25)


def test_numbers_out_of_range() -> None:
    """Floats become infinite; integers are refused."""
    text = "return score * mod.n0 + mod.n1;"
    mod = Mod(text, (), (Number(1e39, False), Number(-(2**63), True)))
    assert struct.unpack("<f4xq", pack(mod, ())) == (float("inf"), -(2**63))
    with pytest.raises(ValueError, match="integers of 64 bits, got 9223372036854775808"):
        pack(Mod(text, (), (Number(1e39, False), Number(2**63, True))), ())


@pytest.mark.parametrize(("code", "kind", "captures"), CODES)
def test_cuda_text(code: str, kind: str, captures: dict[str, Any]) -> None:
    mod = CudaMod(code, captures).mod()
    compiled(header(mod, None) if kind == "score_mod" else header(None, mod))
    assert [number.source for number in mod.numbers] == list(captures.values())
    assert not any(repr(value) in mod.text for value in captures.values())


@pytest.mark.parametrize(
    "number", (np.float32(2), np.float16(0.5), np.int64(3), np.uint8(200), np.bool_(True))
)
def test_numbers_of_numpy(number: Any) -> None:
    mods = [CudaMod("score * scale", {"scale": scale}).mod() for scale in (number, number.item())]
    assert mods[0] == mods[1] and pack(mods[0], ()) == pack(mods[1], ())


def test_a_number_is_no_part_of_the_text() -> None:
    first, second = (CudaMod("score * scale", {"scale": scale}).mod() for scale in (2.0, 3.5))
    assert header(first, None) == header(second, None)
    assert pack(first, ()) != pack(second, ())


def test_errors_point_at_the_users_line() -> None:
    mod = CudaMod("const float x = score;\nreturn y;").mod()
    text = header(mod, None)
    line = text.split("\n").index("return y;") + 1
    with pytest.raises(AssertionError, match=rf'user/mods.cuh\({line}\): error: identifier "y" is undefined'):
        compiled(text)


@pytest.mark.parametrize(
    ("code", "captures", "error", "message"),
    (
        (3, {}, TypeError, "^code: expected CUDA text, got 3"),
        ("  ", {}, TypeError, "^code: expected CUDA text"),
        ("score", {"a b": 1}, ValueError, "C identifiers, got 'a b'"),
        ("score", {"q_idx": 1}, ValueError, "got 'q_idx'"),
        ("score", {"table": [1, 2]}, TypeError, "expected table to be an array or a number"),
        ("score", {"gradient_sink": 1}, ValueError, "got 'gradient_sink'"),
        (
            "score",
            {"n": np.uint64(2**63)},
            ValueError,
            "expected n to be an int of 64 bits, got 9223372036854775808",
        ),
        ("score", {"z": np.complex64(1)}, TypeError, "expected z to be an array or a number"),
    ),
)
def test_refused(code: Any, captures: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CudaMod(code, captures)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    (
        ({"grad": 3}, TypeError, "^grad: expected CUDA text, got 3"),
        ({"grad": " "}, TypeError, "^grad: expected CUDA text, got ' '"),
        ({"capture_grads": "table"}, TypeError, "^capture_grads: expected a mapping"),
        ({"capture_grads": {"other": ("", "1")}}, ValueError, "arrays in captures, got 'other'"),
        ({"capture_grads": {"number": ("", "1")}}, ValueError, "arrays in captures, got 'number'"),
        ({"capture_grads": {"table": "grad"}}, TypeError, "expected table to have indices and a value"),
        ({"capture_grads": {"table": ("i", "j", "grad")}}, TypeError, "table to have indices and a value"),
        ({"capture_grads": {"table": (("i", 3),)}}, TypeError, "table to have indices and a value"),
        ({"capture_grads": {"table": ("i", " ")}}, ValueError, "expected table to have a value"),
    ),
)
def test_refused_gradients(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CudaMod("score", {"table": np.zeros(3, np.float32), "number": 3.0}, **given)


def test_gradients_are_asked_for() -> None:
    with pytest.raises(
        ValueError, match="^score_mod: expected a CudaMod with grad, since gradients are needed"
    ):
        CudaMod("2 * score").mod(backward=True)
    mod = CudaMod("2 * score", grad="2 * grad").mod()
    assert mod.backward is None and "value_and_derivative" not in header(mod, None)


def test_errors_point_at_the_users_line_of_a_gradient() -> None:
    mod = CudaMod("score * n", {"n": 2.0}, grad="const float y = grad * n;\nreturn z;").mod(backward=True)
    text = header(mod, None)
    line = text.split("\n").index("return z;") + 1
    with pytest.raises(AssertionError, match=rf'user/mods.cuh\({line}\): error: identifier "z" is undefined'):
        compiled(text)
