"""Evaluates the CUDA text of score and mask functions on the CPU: the host compiler takes the text and
cuda_src/attention/mods.cuh as C++, with stand-ins for what only the device has.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_probe import source

from rawmla.attention.mods import ELEMENTS

needs_host_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")

_STAND_INS = r"""
#include <cmath>
#include <cstring>
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
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float2 unpack_f16(u32 bits) { _Float16 x; u16 low = bits; memcpy(&x, &low, 2); return {float(x), 0}; }
"""


@functools.cache
def _library(text: str) -> ctypes.CDLL:
    folder = Path(tempfile.gettempdir()) / "rawmla-host-mods"
    folder.mkdir(exist_ok=True)
    name = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    name.with_suffix(".cpp").write_text(text)
    command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-o", f"{name}.so", f"{name}.cpp"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"{text}\n{built.stderr}"
    return ctypes.CDLL(f"{name}.so")


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
    parts = [source("attention/mods.cuh").split("#include")[0].replace("#pragma once", "")]
    parts.append(source("attention/mods.cuh").split('types.cuh"')[1])
    text = f"""{_STAND_INS}{"".join(parts)}
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
    _library(text).run(
        arrays,
        ctypes.c_void_p(scores.data_ptr()),
        ctypes.c_void_p(at.data_ptr()),
        len(scores),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


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
