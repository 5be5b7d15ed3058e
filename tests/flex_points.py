"""Evaluates score and mask functions at single points, through their types in kernels: on the GPU, and on the
CPU with the emulator's headers instead of CUDA's.
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
from cuda_probe import headers
from emulator.build import build_text, missing_reason

from rawmla.flex.header import HEADER_NAME, header
from rawmla.flex.mods import Form, Mod, Place, reading_of
from rawmla.jit import nvrtc
from rawmla.jit.sources import SourceSet

needs_host_compiler = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

PROBE = """
static_assert((sizeof(FUNCTION) + 7) / 8 * 8 == BYTES);
#if IS_BACKWARD
static_assert(FUNCTION::kDerivativeIsOne == IS_ONE);
static_assert(FUNCTION::kGradients == GRADIENTS && FUNCTION::kSites == SITES);
__device__ constexpr int sites_of(bool by_kv) {
    int bits = 0;
    for (int i = 0; i < SITES; ++i)
        bits |= (by_kv ? FUNCTION::kSite[i].by_kv : FUNCTION::kSite[i].by_q) << i;
    return bits;
}
static_assert(sites_of(false) == BY_Q && sites_of(true) == BY_KV);
struct Sink {
    const FUNCTION& mod;
    i64* places;
    template <int kPlace> __device__ void add(i64 place, float value) {
        places[kPlace] = place;
        atomicAdd(mod.gradients[FUNCTION::kSite[kPlace].gradient] + place, value);
    }
};
#endif
extern "C" __global__ void probe(const FUNCTION* function, const float* scores, const int* at,
                                 const float* grads, float* values, float* again, float* derivatives,
                                 i64* places) {
    const int i = threadIdx.x;
    const int b = at[4 * i], h = at[4 * i + 1], q = at[4 * i + 2], k = at[4 * i + 3];
#if IS_MASK
    values[i] = (*function)(b, h, q, k, 50, 50);
#else
    values[i] = (*function)(scores[i], b, h, q, k, 50, 50);
#endif
#if IS_BACKWARD
    const auto both = function->value_and_derivative(scores[i], b, h, q, k, 50, 50);
    again[i] = both.value, derivatives[i] = both.derivative;
    Sink sink{*function, places + i * SITES};
    function->captured_gradients(grads[i], scores[i], b, h, q, k, 50, 50, sink);
#endif
}
"""
ON_THE_CPU = """
extern "C" void run(const FUNCTION* function, const float* scores, const int* at, const float* grads,
                    float* values, float* again, float* derivatives, i64* places, int count) {
    for (int i = 0; i < count; ++i) {
        emulator::thread_index = {static_cast<unsigned>(i)};
        probe(function, scores, at, grads, values, again, derivatives, places);
    }
}
"""


class Evaluated(NamedTuple):
    """Results at each point. All but the values are those of a function with a backward, else NaN."""

    values: Any  # float64 [n]
    again: Any  # float64 [n]; the values that come with the derivatives
    derivatives: Any  # float64 [n]
    places: Any  # int64 [n, sites]
    gradients: dict[int, Any]  # by capture: the sums over all points, float32 of the capture's shape


Launch = Callable[[str, dict[str, int], list[int], int], object]
"""Runs `probe` of a text with macros, given the addresses of its arrays and the number of points."""


def evaluate(
    mod: Mod,
    scores: Any,
    at: Any,
    grads: Any = None,
    *,
    is_mask: bool = False,
    launch: Launch | None = None,
    device: str = "cpu",
) -> Evaluated:
    """Evaluate a function at scores `[n]` and (b, h, q_idx, kv_idx) `[n, 4]`, where the result has the
    gradients `[n]`; None: ones.
    """
    import torch

    captured = [capture.array.detach().to(device) for capture in mod.captures]
    with_gradient, sites = (mod.backward.gradients, mod.backward.sites) if mod.backward else ((), ())
    gradients = {place: torch.zeros(captured[place].shape, device=device) for place in with_gradient}
    places = [Place(x.data_ptr(), tuple(x.shape), x.stride()) for x in captured]
    packed = pack(mod, places, [x.data_ptr() for x in gradients.values()])
    count = len(scores)
    arrays = [
        torch.frombuffer(bytearray(packed), dtype=torch.uint8),
        scores.float().contiguous(),
        at.int().contiguous(),
        torch.ones(count) if grads is None else grads.float().contiguous(),
        *[torch.full((count,), float("nan")) for _ in range(3)],
        torch.full((count, len(sites)), -1),
    ]
    arrays = [x.to(device) for x in arrays]
    declared = header(None, mod) if is_mask else header(mod, None)
    probe = PROBE.replace("FUNCTION", "MaskMod" if is_mask else "ScoreMod")
    macros = {
        "BYTES": len(packed),
        "IS_MASK": int(is_mask),
        "IS_BACKWARD": int(mod.backward is not None),
        "IS_ONE": int(mod.backward is not None and mod.backward.is_one),
        "GRADIENTS": len(with_gradient),
        "SITES": len(sites),
        "BY_Q": sum(site.by_q << i for i, site in enumerate(sites)),
        "BY_KV": sum(site.by_kv << i for i, site in enumerate(sites)),
    }
    (launch or _on_the_cpu)(
        declared.replace("#pragma once", "") + probe, macros, [x.data_ptr() for x in arrays], count
    )
    *results, found = (x.cpu() for x in arrays[4:])
    summed = {place: x.cpu() for place, x in gradients.items()}
    return Evaluated(*[x.double() for x in results], found, summed)


def compile_alone(
    text: str, macros: dict[str, int], addresses: Any = (), count: int = 0, *, mods: str = ""
) -> None:
    """Compile as for the GPU a text, which may include a header of functions by its name in kernels; raise
    AssertionError with the compiler's log where it has an error.
    """
    options = ("-arch=sm_90a", "-std=c++20", *(f"-D{name}={value}" for name, value in macros.items()))
    sources = SourceSet("probe.cu", text.encode(), (*headers(), (HEADER_NAME, mods.encode())))
    result = nvrtc.compile_source(sources, options)
    assert result.cubin is not None, result.log


def _on_the_cpu(text: str, macros: dict[str, int], addresses: list[int], count: int) -> None:
    function = "MaskMod" if macros["IS_MASK"] else "ScoreMod"
    library = built(text + ON_THE_CPU.replace("FUNCTION", function), **macros)
    library.run(*[ctypes.c_void_p(address) for address in addresses], count)


@functools.cache
def built(text: str, **macros: int) -> ctypes.CDLL:
    """The library of a C++ text with the emulator's headers, compiled once for all processes of a user."""
    folder = Path(tempfile.gettempdir()) / f"rawmla-flex-points-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return build_text("points", text, folder, **macros)


def pack(mod: Mod, places: Sequence[Place], gradients: Sequence[int] = ()) -> bytes:
    """The bytes of a ScoreMod or MaskMod, given where its captures and their gradients are."""
    frame, _, numbers = reading_of(mod)
    packed = Form(frame.mod, places).pack([place.ptr for place in places], numbers)
    return packed[: len(packed) - 8 * len(gradients)] + struct.pack(f"<{len(gradients)}Q", *gradients)


def wanted(function: Callable[..., Any], kind: str, scores: Any, at: Any) -> Any:
    """What the function itself gives, one call after another; float64 `[n]`."""
    import torch
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    results = []
    with TransformGetItemToIndex():
        for score, indices in zip(scores, at.int(), strict=True):
            result = function(score, *indices) if kind == "score_mod" else bool(function(*indices))
            results.append(float(result))
    return torch.tensor(results, dtype=torch.float64)


def apply(name: str, *arguments: Any) -> Any:
    """Apply a function of mods.cuh of one or two floats to the elements of float32 tensors."""
    import torch

    text = f"""#include "flex/mods.cuh"
extern "C" void run(const float* x, const float* y, float* out, int n) {{
    for (int i = 0; i < n; ++i) out[i] = {name}({", ".join(("x[i]", "y[i]")[: len(arguments)])});
}}
"""
    held = [x.contiguous() for x in arguments]
    out = torch.empty_like(held[0])
    built(text).run(*[ctypes.c_void_p(x.data_ptr()) for x in (held[0], held[-1], out)], out.numel())
    return out
