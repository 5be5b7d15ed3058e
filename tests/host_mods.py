"""Evaluates the CUDA text of score and mask functions on the CPU: the host compiler takes the text and
cuda_src/flex/mods.cuh as C++, with stand-ins for what only the device has.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cuda_probe import source
from emulator.build import build_library, missing_reason

from rawmla.flex.header import header
from rawmla.flex.mods import ELEMENTS, Form, Mod, Number, Place, Reading, reading_of

needs_host_compiler = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

# C's headers alone: g++ takes twice as long to read <cmath> as for all the rest.
_STAND_INS = r"""
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <string.h>
#define __device__
#define __forceinline__ inline
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
struct float2 { float x, y; };
const float kInfinity = INFINITY, kNaN = NAN, kLn2 = 0.693147180559945309f, kLog2E = 1.44269504088896341f;
inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }
template <class T> inline T __ldg(const T* src) { return *src; }
inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float2 unpack_f16(u32 bits) { _Float16 x; u16 low = bits; memcpy(&x, &low, 2); return {float(x), 0}; }
"""


def mod_of(reading: Reading) -> Mod:
    """A function with the arrays and numbers that it reads in their places."""
    frame, arrays, sources = reading
    captures = [x._replace(array=array) for x, array in zip(frame.mod.captures, arrays, strict=True)]
    numbers = [Number(y, x.is_integer) for x, y in zip(frame.mod.numbers, sources, strict=True)]
    return frame.mod._replace(captures=tuple(captures), numbers=tuple(numbers))


def pack(mod: Mod, places: Sequence[Place], gradients: Sequence[int] = ()) -> bytes:
    """The bytes of a ScoreMod or MaskMod, given where its captures lie."""
    frame, _, numbers = reading_of(mod)
    packed = Form(frame.mod, places).pack([place.ptr for place in places], numbers)
    return packed[: len(packed) - 8 * len(gradients)] + struct.pack(f"<{len(gradients)}Q", *gradients)


@functools.cache
def compiled(text: str, *flags: str) -> ctypes.CDLL:
    """The library of a C++ text, which is compiled once for all processes of a user."""
    folder = Path(tempfile.gettempdir()) / f"rawmla-host-mods-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    all_flags = ["-O0", "-w", *flags]
    return ctypes.CDLL(str(build_library("mods", {"mods.cpp": text}, ["mods.cpp"], all_flags, folder)))


WITHOUT_CPP = ("-nostdlib", "-lm", "-lgcc")
"""Flags for a text that needs none of C++'s libraries, through which the linker else looks for long."""


def _called() -> str:
    """What the text of a function calls, as C++."""
    before, _, behind = source("flex/mods.cuh").partition("#include")
    return _STAND_INS + before.replace("#pragma once", "") + behind.split('types.cuh"')[1]


def apply(name: str, *arguments: Any) -> Any:
    """A function of mods.cuh of one or two floats, applied to the elements of float32 tensors."""
    import torch

    text = f"""{_called()}
extern "C" void run(const float* x, const float* y, int n, float* out) {{
    for (int i = 0; i < n; ++i) out[i] = {name}({", ".join(("x[i]", "y[i]")[: len(arguments)])});
}}
"""
    held = [x.contiguous() for x in arguments]
    out = torch.empty_like(held[0])
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (held[0], held[-1], out)]
    compiled(text, *WITHOUT_CPP).run(pointers[0], pointers[1], out.numel(), pointers[2])
    return out


def evaluate(traced: Any, kind: str, scores: Any, indices: Any) -> Any:
    """The results of a traced function for scores `[n]` and (b, h, q_idx, kv_idx) `[n, 4]`, as float32."""
    import torch

    fields, setup = [], []
    for i, capture in enumerate(traced.captures):
        tensor = capture.array
        fields.append(f"Captured<{ELEMENTS[capture.dtype]}, {capture.rank}> t{i};")
        setup.append(f"mod.t{i}.data = static_cast<const {ELEMENTS[capture.dtype]}*>(arrays[{i}]);")
        for dim in range(capture.rank):
            setup.append(f"mod.t{i}.strides[{dim}] = {tensor.stride(dim)};")
            setup.append(f"mod.t{i}.sizes[{dim}] = {tensor.shape[dim]};")
    for i, number in enumerate(traced.numbers):
        value = number.source.item() if isinstance(number.source, torch.Tensor) else number.source
        fields.append(f"{'i64' if number.is_integer else 'float'} n{i};")
        setup.append(f"mod.n{i} = {int(value)};" if number.is_integer else f"mod.n{i} = {float(value)!r}f;")
    takes_score = kind == "score_mod"
    text = f"""{_called()}
struct Mod {{ {" ".join(fields)} }};
inline {"float" if takes_score else "bool"} function(
    const Mod& mod, {"float score, " if takes_score else ""}int b, int h, int q_idx, int kv_idx) {{
{traced.text}
}}
extern "C" void run(void** arrays, const float* scores, const int* at, int n, float* out) {{
    Mod mod;
    {" ".join(setup)}
    for (int i = 0; i < n; ++i, at += 4)
        out[i] = function(mod, {"scores[i], " if takes_score else ""}at[0], at[1], at[2], at[3]);
}}
"""
    out = torch.empty(len(scores))
    arrays = (ctypes.c_void_p * max(1, len(traced.captures)))(
        *[capture.array.data_ptr() for capture in traced.captures]
    )
    at = indices.to(torch.int32).contiguous()
    compiled(text, *WITHOUT_CPP).run(
        arrays,
        ctypes.c_void_p(scores.data_ptr()),
        ctypes.c_void_p(at.data_ptr()),
        len(scores),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


class Differentiated(NamedTuple):
    """What a type that a backward kernel takes gives at each point."""

    values: Any  # float32 [n]
    derivatives: Any  # float32 [n]
    places: Any  # int64 [n, sites]
    gradients: dict[int, Any]  # by capture: the sums over all points, float32 of the capture's shape
    is_one: bool  # kDerivativeIsOne


def differentiate(traced: Any, scores: Any, indices: Any, grads: Any) -> Differentiated:
    """The generated type ScoreMod of a function with gradients at scores `[n]` and (b, h, q_idx, kv_idx)
    `[n, 4]`, where the result has the gradients `[n]`.
    """
    import torch

    declared = header(traced, None).partition('mods.cuh"')[2]
    text = f"""{_called()}{declared}
struct Sink {{
    const ScoreMod& mod;
    i64* places;
    template <int kPlace> void add(i64 place, float value) {{
        places[kPlace] = place;
        mod.gradients[ScoreMod::kSite[kPlace].gradient][place] += value;
    }}
}};
extern "C" int size() {{ return sizeof(ScoreMod); }}
extern "C" void run(const void* bytes, const float* scores, const int* at, const float* grads, int n,
                    float* values, float* derivatives, i64* places, bool* is_one) {{
    ScoreMod mod;
    memcpy(static_cast<void*>(&mod), bytes, sizeof(ScoreMod));
    *is_one = ScoreMod::kDerivativeIsOne;
    for (int i = 0; i < n; ++i, at += 4, places += ScoreMod::kSites) {{
        const auto both = mod.value_and_derivative(scores[i], at[0], at[1], at[2], at[3], 50, 50);
        values[i] = both.value, derivatives[i] = both.derivative;
        Sink sink{{mod, places}};
        mod.captured_gradients(grads[i], scores[i], at[0], at[1], at[2], at[3], 50, 50, sink);
    }}
}}
"""
    n, sites = len(scores), len(traced.backward.sites)
    captured = [capture.array for capture in traced.captures]
    places = [Place(x.data_ptr(), tuple(x.shape), x.stride()) for x in captured]
    gradients = {place: torch.zeros(captured[place].shape) for place in traced.backward.gradients}
    packed = pack(traced, places, [x.data_ptr() for x in gradients.values()])
    library = compiled(text, *WITHOUT_CPP)
    assert library.size() == len(packed)
    values, derivatives = torch.empty(n), torch.empty(n)
    found = torch.full((n, sites), -1, dtype=torch.int64)
    is_one = ctypes.c_bool()
    inputs = (scores.float().contiguous(), indices.to(torch.int32).contiguous(), grads.float().contiguous())
    library.run(
        packed,
        *[ctypes.c_void_p(x.data_ptr()) for x in inputs],
        n,
        *[ctypes.c_void_p(x.data_ptr()) for x in (values, derivatives, found)],
        ctypes.byref(is_one),
    )
    return Differentiated(values, derivatives, found, gradients, is_one.value)


def wanted(function: Callable[..., Any], kind: str, scores: Any, indices: Any) -> Any:
    """What the function itself gives, one call after another."""
    import torch
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    results = []
    with TransformGetItemToIndex():
        for score, at in zip(scores, indices.to(torch.int32), strict=True):
            result = function(score, *at) if kind == "score_mod" else bool(function(*at))
            results.append(float(result))
    return torch.tensor(results)
