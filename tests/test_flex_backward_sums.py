"""Sums of captured gradients in the backward of flex attention: the C++ of cuda_src/flex/captured_sums.cuh
for the CPU, where threads are the lanes of a warp.
"""

from __future__ import annotations

import ctypes
import math
import re
from typing import Any

import numpy as np
import pytest
from cuda_probe import source
from host_mods import compiled, needs_host_compiler

pytestmark = needs_host_compiler
KEYS, QUERIES = 16, 64  # of a warp, and of a block
BLOCKS, HEADS = 3, 2
Q_LEN, KV_LEN = QUERIES * BLOCKS - 10, 13
TERMS_LOG2 = 20

_BEFORE = """
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
constexpr float kInfinity = INFINITY;
constexpr int kBlockRows = 64;
struct Site { int gradient; bool by_q, by_kv; };
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
struct Params { ScoreMod score_mod; int seqlen_q, seqlen_k, terms_log2; u32* largest; };

static std::mutex lock;
static thread_local int lane;
static std::barrier<> turn(32);
static u32 exchanged[32];
inline int lane_index() { return lane; }
inline float __shfl_xor_sync(u32, float x, int distance) {
    memcpy(&exchanged[lane], &x, 4);
    turn.arrive_and_wait();
    float y;
    memcpy(&y, &exchanged[lane ^ distance], 4);
    turn.arrive_and_wait();
    return y;
}
inline u32 __reduce_max_sync(u32, u32 x) {
    exchanged[lane] = x;
    turn.arrive_and_wait();
    u32 most = 0;
    for (u32 one : exchanged) most = one > most ? one : most;
    turn.arrive_and_wait();
    return most;
}
template <class T>
inline void atomicAdd(T* place, T x) { std::lock_guard<std::mutex> guard(lock); *place += x; }
inline void atomicMax(u32* place, u32 x) {
    std::lock_guard<std::mutex> guard(lock);
    *place = x > *place ? x : *place;
}
inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(i64 x) { double y; memcpy(&y, &x, 8); return y; }
inline i64 __double2ll_rn(double x) { return llrint(x); }
"""
_RUN = """
// Scores and their gradients `[heads, blocks, 64 queries, 16 keys]`, and which are seen, for a warp whose
// first key is 0, as flex_captured_gradients.cu goes through them.
extern "C" void run(const Params* params, const float* scores, const float* grads, const bool* seen,
                    int heads, int blocks) {
    std::vector<std::thread> lanes;
    for (int i = 0; i < 32; ++i)
        lanes.emplace_back([=] {
            lane = i;
            CapturedSums sums(*params);
            const int keys[2] = {lane / 4, lane / 4 + 8};
            for (int h = 0; h < heads; ++h) {
                for (int block = 0; block < blocks; ++block) {
                    CapturedSums::Block of_queries;
                    of_queries.clear();
                    for (int j = 0; j < 8; ++j)
                        for (int c = 0; c < 4; ++c) {
                            const int r = c >> 1, query = 8 * j + 2 * (lane % 4) + (c & 1);
                            const int at = ((h * blocks + block) * 64 + query) * 16 + keys[r];
                            CapturedSums::Sink sink{sums, of_queries, 2 * j + (c & 1), r, seen[at]};
                            const int q_idx = block * 64 + query;
                            params->score_mod.captured_gradients(grads[at], scores[at], 0, h, q_idx, keys[r],
                                                                 0, 0, sink);
                        }
                    sums.flush_queries(of_queries, 0, h, 64 * block);
                }
                sums.flush_head(0, h, keys[0], keys[1]);
            }
            sums.finish();
        });
    for (auto& one : lanes) one.join();
}
// The sums of an array.
extern "C" void sum_digits(const CapturedDigits* sums, int count, double* out) {
    for (int i = 0; i < count; ++i)
        out[i] = sum_of_digits(sums[i / kElementsTogether], i % kElementsTogether);
}
extern "C" void add_digits(CapturedDigits* sums, const float* values, int count) {
    for (int i = 0; i < count; ++i) {
        u32 bits;
        memcpy(&bits, &values[i], 4);
        const TwoDigits two(bits);
        sums->digits[two.first][0] += two.low;
        sums->digits[two.first + 1][0] += two.high;
    }
}
extern "C" double unit(u32 largest, int terms_log2) {
    return power_of_two(-units_exponent(largest, terms_log2));
}
"""
SIZES = (HEADS, Q_LEN, KEYS, Q_LEN + KV_LEN)


class _Params(ctypes.Structure):
    _fields_ = [
        ("gradients", ctypes.c_void_p * 4),
        ("seqlen_q", ctypes.c_int),
        ("seqlen_k", ctypes.c_int),
        ("terms_log2", ctypes.c_int),
        ("largest", ctypes.c_void_p),
    ]


def library(pass_: int) -> ctypes.CDLL:
    parts = [source(f"flex/{name}.cuh") for name in ("captured_cells", "captured_sums")]
    text = re.sub(r"^#(include|pragma).*$", "", "\n".join(parts), flags=re.MULTILINE)
    made = compiled(f"{_BEFORE}\n#define PASS {pass_}\n{text}{_RUN}")
    made.unit.restype = ctypes.c_double
    return made


def inputs() -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    shape = (HEADS, BLOCKS, QUERIES, KEYS)
    scores, grads = (draw.standard_normal(shape).astype(np.float32) for _ in range(2))
    q_idx = np.arange(BLOCKS * QUERIES).reshape(1, BLOCKS, QUERIES, 1)
    seen = (draw.random(shape) < 0.7) & (q_idx < Q_LEN) & (np.arange(KEYS) < KV_LEN)
    grads[~seen] = np.nan  # to be left out
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


def run(pass_: int, arrays: list[Any], largest: Any, scores: Any, grads: Any, seen: Any) -> None:
    params = _Params(
        (ctypes.c_void_p * 4)(*[x.ctypes.data for x in arrays]),
        Q_LEN,
        KV_LEN,
        TERMS_LOG2,
        largest.ctypes.data,
    )
    pointers = [_pointer(x) for x in (scores, grads, seen)]
    library(pass_).run(ctypes.byref(params), *pointers, HEADS, BLOCKS)


def test_in_any_order() -> None:
    given = inputs()
    got = [np.zeros(size, np.float32) for size in SIZES]
    run(0, got, np.zeros(4, np.uint32), *given)
    for one, want in zip(got, wanted(*given), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=1e-4)


def test_in_units() -> None:
    """Of the largest sums; the same bits every time, whatever the order of lanes is."""
    scores, grads, seen = inputs()
    scores *= 1000  # an array of larger sums
    results = []
    for _ in range(3):
        largest = np.zeros(4, np.uint32)
        run(1, [np.zeros(1)] * 4, largest, scores, grads, seen)
        got = [np.zeros(size, CELLS) for size in SIZES]
        run(2, got, largest, scores, grads, seen)
        results.append((largest, got))
    for largest, got in results[1:]:
        assert (largest == results[0][0]).all()
        assert all((one == other).all() for one, other in zip(got, results[0][1], strict=True))
    for bits, one, want in zip(largest, got, wanted(scores, grads, seen), strict=True):
        most = float(bits.view(np.float32))
        assert 0 < most <= 2 * np.abs(want).max() + 1e3 and not one["rest"].any()
        unit = library(2).unit(ctypes.c_uint(int(bits)), TERMS_LOG2)
        assert most < unit * 2.0 ** (62 - TERMS_LOG2) <= 2 * most * (1 + 1e-6)
        np.testing.assert_allclose(one["units"] * unit, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


DIGITS = np.dtype([("digits", "<i8", (12, 32)), ("rest", "<f4", 32)])
CELLS = np.dtype({"names": ("units", "rest"), "formats": ("<i8", "<f4"), "itemsize": 16})


def run_in_digits(scores: Any, grads: Any, seen: Any) -> list[Any]:
    got = [np.zeros(-(-size // 32), DIGITS) for size in SIZES]
    run(3, got, np.zeros(4, np.uint32), scores, grads, seen)
    return got


def sum_of(digits: Any, size: int) -> Any:
    sums = np.zeros(size)
    library(3).sum_digits(_pointer(digits), size, _pointer(sums))
    return sums


def _pointer(array: Any) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)


def test_in_digits() -> None:
    """The same bits every time, whatever the order of lanes is."""
    scores, grads, seen = inputs()
    scores *= 1000
    results = [run_in_digits(scores, grads, seen) for _ in range(3)]
    for got in results[1:]:
        assert all((one == other).all() for one, other in zip(got, results[0], strict=True))
    for one, size, want in zip(results[0], SIZES, wanted(scores, grads, seen), strict=True):
        assert not one["rest"].any()
        np.testing.assert_allclose(sum_of(one, size), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_digits_of_any_exponent() -> None:
    """From the smallest float32 to the largest, of both signs: the sum is exact."""
    draw = np.random.default_rng(1)
    bits = draw.integers(0, 2**32, 5000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    extremes = [np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal, 1.0, -0.0]
    values = np.concatenate([values, np.array(extremes, np.float32)])
    for some in (values, values[:1], values[-1:], values[-3:-2], values[np.abs(values) < 1e-30]):
        sums = np.zeros(1, DIGITS)
        library(3).add_digits(_pointer(sums), _pointer(np.ascontiguousarray(some)), len(some))
        assert sum_of(sums, 1)[0] == pytest.approx(math.fsum(some.astype(float).tolist()), rel=1e-15, abs=0)


def test_what_is_not_finite() -> None:
    """Goes where it belongs, and nowhere else."""
    scores, grads, seen = inputs()
    h, block, query, key = np.argwhere(seen)[0]
    grads[h, block, query, key] = np.inf
    largest = np.zeros(4, np.uint32)
    run(1, [np.zeros(1)] * 4, largest, scores, grads, seen)
    assert np.isfinite(largest.view(np.float32)).all()
    got = [np.zeros(size, CELLS) for size in SIZES]
    run(2, got, largest, scores, grads, seen)
    places = [[h], sorted({0, (block * QUERIES + query) // 2}), [15 - key], [block * QUERIES + query + key]]
    for one, place in zip(got, places, strict=True):
        assert np.flatnonzero(one["rest"]).tolist() == place
    for one, place in zip(run_in_digits(scores, grads, seen), places, strict=True):
        assert np.flatnonzero(one["rest"]).tolist() == place
