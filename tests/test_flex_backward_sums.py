"""Sums of captured gradients in the backward of flex attention: a warp of cuda_src/flex/captured_sums.cuh on
the emulated device.
"""

from __future__ import annotations

import ctypes
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cuda_probe import source
from emulator.build import build_text, entry_of
from flex_points import needs_host_compiler

from rawmla.jit import KernelSpec

if TYPE_CHECKING:
    from emulator import Emulator

pytestmark = needs_host_compiler
KEYS, QUERIES = 16, 64  # of a warp, and of a block
BLOCKS, HEADS = 3, 2
Q_LEN, KV_LEN = QUERIES * BLOCKS - 10, 13
TERMS_LOG2 = 20
SIZES = (HEADS, Q_LEN, KEYS, Q_LEN + KV_LEN)
IN_ANY_ORDER, LARGEST, IN_UNITS, IN_DIGITS = range(4)
CELLS = np.dtype({"names": ("units", "rest"), "formats": ("<i8", "<f4"), "itemsize": 16})
DIGITS = np.dtype([("digits", "<i8", (12, 32)), ("rest", "<f4", 32)])

_BEFORE = """
#include "common/types.cuh"
#include "flex/mods.cuh"
#include "ptx/sync.cuh"
constexpr int kBlockRows = 64;
struct ScoreMod {
    static constexpr int kGradients = 4, kSites = 5;
    static constexpr Site kSite[5] = {
        {0, false, false}, {1, true, false}, {2, false, true}, {3, true, true}, {1, false, false}};
    float* gradients[4];
    template <class Sink>
    void captured_gradients(float grad, float score, int, int h, int q_idx, int kv_idx, int, int,
                            Sink& sink) const {
        sink.template add<0>(h, grad * score);
        sink.template add<1>(q_idx / 2, grad);       // places of several queries
        sink.template add<2>(15 - kv_idx, 2 * grad);
        sink.template add<3>(q_idx + kv_idx, grad);  // and of queries and keys
        sink.template add<4>(0, -grad);              // to the same array as another site
    }
};
struct Params {
    ScoreMod score_mod;
    int seqlen_q, seqlen_k, terms_log2;
    u32* largest;
    // [heads, blocks, 64 queries, 16 keys]
    const float *scores, *grads;
    const bool* seen;
    int heads, blocks;
};
"""
_KERNEL = """
// A warp whose first key is 0 goes through scores and their gradients as flex_captured_gradients.cu does.
extern "C" __global__ void probe(const __grid_constant__ Params params) {
    const int lane = threadIdx.x, keys[2] = {lane / 4, lane / 4 + 8};
    CapturedSums sums(params);
    for (int h = 0; h < params.heads; ++h) {
        for (int block = 0; block < params.blocks; ++block) {
            CapturedSums::Block of_queries;
            of_queries.clear();
            for (int j = 0; j < 8; ++j)
                for (int c = 0; c < 4; ++c) {
                    const int r = c >> 1, query = 8 * j + 2 * (lane % 4) + (c & 1);
                    const int q_idx = block * 64 + query;
                    const int at = ((h * params.blocks + block) * 64 + query) * 16 + keys[r];
                    CapturedSums::Sink sink{sums, of_queries, 2 * j + (c & 1), r, params.seen[at]};
                    params.score_mod.captured_gradients(params.grads[at], params.scores[at], 0, h, q_idx,
                                                        keys[r], 0, 0, sink);
                }
            sums.flush_queries(of_queries, 0, h, 64 * block);
        }
        sums.flush_head(0, h, keys[0], keys[1]);
    }
    sums.finish();
}
extern "C" void sum_digits(const CapturedDigits* sums, int count, double* out) {
    for (int i = 0; i < count; ++i)
        out[i] = sum_of_digits(sums[i / kElementsTogether], i % kElementsTogether);
}
extern "C" void add_digits(CapturedDigits* sums, const float* values, int count) {
    for (int i = 0; i < count; ++i) {
        const TwoDigits two(__float_as_uint(values[i]));
        sums->digits[two.first][0] += two.low;
        sums->digits[two.first + 1][0] += two.high;
    }
}
extern "C" double unit(u32 largest, int terms_log2) {
    return power_of_two(-units_exponent(largest, terms_log2));
}
"""


class _Params(ctypes.Structure):
    _fields_ = (
        ("gradients", ctypes.c_void_p * 4),
        *[(name, ctypes.c_int) for name in ("seqlen_q", "seqlen_k", "terms_log2")],
        *[(name, ctypes.c_void_p) for name in ("largest", "scores", "grads", "seen")],
        *[(name, ctypes.c_int) for name in ("heads", "blocks")],
    )


Inputs = tuple[Any, Any, Any]


def library(emulator: Emulator, which: int) -> ctypes.CDLL:
    parts = [source(f"flex/{name}.cuh") for name in ("captured_cells", "captured_sums")]
    text = re.sub(r"^#(include|pragma once).*$", "", "\n".join(parts), flags=re.MULTILINE)
    made = build_text("sums", f"{_BEFORE}{text}{_KERNEL}{entry_of('probe')}", emulator.folder, PASS=which)
    made.unit.restype = ctypes.c_double
    return made


def inputs() -> Inputs:
    """Scores, their gradients, and which are seen; gradients of the others are NaN, to be left out."""
    draw = np.random.default_rng(0)
    shape = (HEADS, BLOCKS, QUERIES, KEYS)
    scores, grads = (draw.standard_normal(shape).astype(np.float32) for _ in range(2))
    q_idx = np.arange(BLOCKS * QUERIES).reshape(1, BLOCKS, QUERIES, 1)
    seen = (draw.random(shape) < 0.7) & (q_idx < Q_LEN) & (np.arange(KEYS) < KV_LEN)
    grads[~seen] = np.nan
    return scores, grads, seen


def wanted(scores: Any, grads: Any, seen: Any) -> list[Any]:
    found = [np.zeros(size) for size in SIZES]
    for h, block, query, key in np.argwhere(seen):
        grad, q_idx = float(grads[h, block, query, key]), block * QUERIES + query
        found[0][h] += grad * float(scores[h, block, query, key])
        found[1][q_idx // 2] += grad
        found[2][15 - key] += 2 * grad
        found[3][q_idx + key] += grad
        found[1][0] -= grad
    return found


def run(emulator: Emulator, which: int, arrays: list[Any], largest: Any, given: Inputs) -> None:
    pointers = [x.ctypes.data for x in (largest, *given)]
    gradients = (ctypes.c_void_p * 4)(*[x.ctypes.data for x in arrays])
    params = _Params(gradients, Q_LEN, KV_LEN, TERMS_LOG2, *pointers, HEADS, BLOCKS)
    spec = KernelSpec("probe", (), threads=32, smem_bytes=0)
    emulator.run(spec, library(emulator, which), (1, 1, 1), bytes(params))


def in_units(emulator: Emulator, given: Inputs) -> tuple[Any, list[Any]]:
    """The bits of the largest sums, and the sums in units that follow from them."""
    largest = np.zeros(4, np.uint32)
    run(emulator, LARGEST, [np.zeros(1)] * 4, largest, given)
    got = [np.zeros(size, CELLS) for size in SIZES]
    run(emulator, IN_UNITS, got, largest, given)
    return largest, got


def in_digits(emulator: Emulator, given: Inputs) -> list[Any]:
    got = [np.zeros(-(-size // 32), DIGITS) for size in SIZES]
    run(emulator, IN_DIGITS, got, np.zeros(4, np.uint32), given)
    return got


def sum_of(emulator: Emulator, digits: Any, size: int) -> Any:
    sums = np.zeros(size)
    library(emulator, IN_DIGITS).sum_digits(_pointer(digits), size, _pointer(sums))
    return sums


def _pointer(array: Any) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)


def test_in_any_order(emulator: Emulator) -> None:
    given = inputs()
    got = [np.zeros(size, np.float32) for size in SIZES]
    run(emulator, IN_ANY_ORDER, got, np.zeros(4, np.uint32), given)
    for one, want in zip(got, wanted(*given), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=1e-4)


def test_in_a_fixed_order(emulator: Emulator) -> None:
    """In units of the largest sums, and in digits: the same bits in whatever order lanes run."""
    scores, grads, seen = given = inputs()
    scores *= 1000  # an array of larger sums
    results = []
    for emulator.seed in range(3):
        largest, got = in_units(emulator, given)
        results.append((largest, *got, *in_digits(emulator, given)))
    for others in results[1:]:
        assert all((one == other).all() for one, other in zip(others, results[0], strict=True))
    largest, *sums = results[0]
    want = wanted(scores, grads, seen)
    for bits, one, exact in zip(largest, sums[:4], want, strict=True):
        most = float(bits.view(np.float32))
        assert 0 < most <= 2 * np.abs(exact).max() + 1e3 and not one["rest"].any()
        unit = library(emulator, IN_UNITS).unit(ctypes.c_uint(int(bits)), TERMS_LOG2)
        assert most < unit * 2.0 ** (62 - TERMS_LOG2) <= 2 * most * (1 + 1e-6)
        np.testing.assert_allclose(one["units"] * unit, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    for one, size, exact in zip(sums[4:], SIZES, want, strict=True):
        assert not one["rest"].any()
        got = sum_of(emulator, one, size)
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def test_digits_of_any_exponent(emulator: Emulator) -> None:
    """From the smallest float32 to the largest, of both signs: the sum is exact."""
    draw = np.random.default_rng(1)
    values = draw.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    extremes = [np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal, 1.0, -0.0]
    values = np.concatenate([values, np.array(extremes, np.float32)])
    for some in (values, values[:1], values[-1:], values[-3:-2], values[np.abs(values) < 1e-30]):
        sums = np.zeros(1, DIGITS)
        given = np.ascontiguousarray(some)
        library(emulator, IN_DIGITS).add_digits(_pointer(sums), _pointer(given), len(some))
        want = math.fsum(some.astype(float).tolist())
        assert sum_of(emulator, sums, 1)[0] == pytest.approx(want, rel=1e-15, abs=0)


def test_numbers_that_are_not_finite(emulator: Emulator) -> None:
    """They go to their own sums, and nowhere else."""
    _, grads, seen = given = inputs()
    h, block, query, key = np.argwhere(seen)[0]
    grads[h, block, query, key] = np.inf
    largest, cells = in_units(emulator, given)
    assert np.isfinite(largest.view(np.float32)).all()
    places = [[h], sorted({0, (block * QUERIES + query) // 2}), [15 - key], [block * QUERIES + query + key]]
    for got in (cells, in_digits(emulator, given)):
        for one, place in zip(got, places, strict=True):
            assert np.flatnonzero(one["rest"]).tolist() == place
