"""The emulated device itself: that it notices faults, and that it has all that the sources use.

Faults are small kernels. Each has a twin without the fault, which ends well under every seed.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator import EmulationError, Emulator, missing_reason
from emulator.build import build_kernel

from rawmla.jit import KernelSpec
from rawmla.jit.sources import find_source_root

torch = pytest.importorskip("torch")

ROOT = find_source_root()
SEEDS = range(1, 9)

KERNEL = """
#include "layout/swizzled_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "common/fp8.cuh"

struct Params {
    const float* in;
    float* out;
    long long is_faulty;
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    float* const values = reinterpret_cast<float*>(smem_bytes);
    const u32 smem = smem_address(smem_bytes), bar = smem + 65536;
    const int thread = threadIdx.x, lane = thread % 32;
"""


def twins(faulty: str, good: str) -> str:
    """The body that has both, in one source: headers take longer to compile than kernels."""
    return f"if (params.is_faulty) {{ {faulty} }} else {{ {good} }}"


@pytest.fixture
def run(emulator: Emulator, tmp_path: Path) -> Any:
    """`run(text)`: the `count` floats at `params.out` after a kernel with this body ran; of twins, the first
    if `is_faulty`.
    """
    for name in ("common", "layout", "ptx"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "kernels").mkdir()

    def run(
        text: str,
        threads: int = 128,
        count: int = 128,
        given: Any = None,
        ctas: int = 1,
        cluster: int = 1,
        seed: int = 1,
        is_faulty: bool = False,
    ) -> Any:
        (tmp_path / "kernels" / "probe.cu").write_text(KERNEL + text + "}\n")
        spec = KernelSpec("probe", (), threads=threads, smem_bytes=65536 + 64)
        emulator.seed = seed
        source = np.zeros(4) if given is None else given
        memory = np.full(count + 4, np.nan, np.float32)
        out = memory[-memory.ctypes.data % 16 // 4 :][:count]
        params = np.array([source.ctypes.data, out.ctypes.data, is_faulty], np.int64).tobytes()
        emulator.run(
            spec, build_kernel(spec, emulator.folder, tmp_path), (ctas, 1, 1), params, (cluster, 1, 1)
        )
        return out

    return run


STORE_A = """
    for (int i = thread % 128; i < 64 * 64; i += 128) {
        const u16 bits = __float_as_uint(i / 64 == i % 64 ? 2.0f : 0.0f) >> 16;
        memcpy(smem_bytes + SwizzledTile<64>::offset(i / 64, i % 64 / 8) + i % 8 * 2, &bits, 2);
    }
"""
MULTIPLY = """
    float d[4];
    for (int k = 0; k < 4; ++k)
        wgmma_ss<Dtype::kBf16>(d, SwizzledTile<64>::k_major(smem) + 2 * k,
                               SwizzledTile<8>::k_major(smem) + 2 * k, k > 0);
    wgmma_commit_group();
"""
SHOW = "params.out[thread] = d[0];"
SPIN = "while (load_acquire(reinterpret_cast<int*>(params.out))"
FAULTS = {
    "deadlock": (
        "if (thread == 0) mbarrier_init(bar, 2); __syncthreads(); if (thread == 0) mbarrier_arrive(bar);"
        "if (thread < 5) mbarrier_wait_parity(bar, 0); named_barrier_sync(3, 128);",
        ("mbarrier_init(bar, 2)", "mbarrier_init(bar, 1)"),
        r"deadlock\n"
        r"  CTA \(0, 0, 0\): 123 threads \(5 6 7 8 \.\. 127\) wait for named barrier 3: 123 of 128 threads\n"
        r"  CTA \(0, 0, 0\): 5 threads \(0 1 2 3 \.\. 4\) wait for parity 0 of the mbarrier at 65536: "
        r"phase 0, 1 of 2 arrivals and 0 bytes missing$",
    ),
    "lanes part": (
        "if (lane == 0) __syncwarp(); __shfl_xor_sync(0xffffffff, 1.0f, 1);",
        ("if (lane == 0)", ""),
        r"thread \d+ of CTA \(0, 0, 0\): lanes of a warp part: one is at \S+, others are at \S+$",
    ),
    "a lane stays away": (
        "if (lane != 7) __shfl_sync(0xffffffff, 1.0f, 0);",
        ("if (lane != 7)", ""),
        r"124 threads \(0 1 2 3 \.\. 127\) wait for the other lanes of the warp at shfl$",
    ),
    "too many arrivals": (
        "if (thread == 0) mbarrier_init(bar, 100); __syncthreads(); mbarrier_arrive_expect_tx(bar, 16);",
        ("100", "128"),
        "an mbarrier of 100 arrivals has more in a phase$",
    ),
    "beyond shared memory": (
        "load_shared_4(smem + 65600);",
        ("65600", "65596"),
        r"thread \d+ of CTA \(0, 0, 0\): 4 bytes at 65600 of shared memory$",
    ),
    "a barrier of two sizes": (
        "named_barrier_sync(1, thread < 64 ? 64 : 96);",
        ("96", "64"),
        r"named barrier 1 of \d\d threads and of \d\d$|wait for named barrier 1: 64 of 96 threads$",
    ),
    "wgmma under way": (
        f"{MULTIPLY} wgmma_wait_group<1>();",
        ("wait_group<1>", "wait_group<0>"),
        r"thread \d+ of CTA \(0, 0, 0\): the thread ends with wgmma under way$",
    ),
    "a copy that nobody waits for": (
        "if (thread == 0) { mbarrier_init(bar, 1); mbarrier_arrive_expect_tx(bar, 64 * 16);"
        "for (int i = 0; i < 64; ++i) bulk_load(smem + 16 * i, params.in, 16, bar);"
        "mbarrier_has_completed(bar, 0); }",
        ("has_completed", "wait_parity"),
        r"CTA \(0, 0, 0\): ends with \d+ copies of its shared memory under way$",
    ),
    "a value that nobody writes": (
        f"{SPIN} != 0) {{}}",
        ("!= 0", "== 0"),
        r"deadlock\n  CTA \(0, 0, 0\): 128 threads \S+ 1 2 3 .. 127\) wait for a value in global memory$",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(run: Any, name: str) -> None:
    text, (fault, correct), report = FAULTS[name]
    assert fault in text
    both = twins(text, text.replace(fault, correct))
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=report):
            run(both, seed=seed, is_faulty=True)
        run(both, seed=seed)


RACES = {
    "a read before the barrier": (
        "values[thread] = 3.0f; __syncthreads(); params.out[thread] = values[(thread + 32) % 128];",
        "__syncthreads();",
    ),
    "a read before a lane has written": (
        "values[thread] = 3.0f; __syncwarp(); params.out[thread] = values[thread ^ 1];",
        "__syncwarp();",
    ),
    "a read before TMA has landed": (
        "if (thread == 0) { mbarrier_init(bar, 1); mbarrier_arrive_expect_tx(bar, 512);"
        "bulk_load(smem, params.in, 512, bar); } __syncthreads(); mbarrier_wait_parity(bar, 0);"
        "params.out[thread] = values[thread]; mbarrier_wait_parity(bar, 0u); /* the CTA ends */",
        "mbarrier_wait_parity(bar, 0);",
    ),
    "a read before cp.async has landed": (
        "cp_async_4(smem + 4 * thread, params.in + thread); cp_async_wait_all(); __syncthreads();"
        "params.out[thread] = values[thread];",
        "cp_async_wait_all();",
    ),
    "cp.async that arrives": (
        "if (thread == 0) mbarrier_init(bar, 128); __syncthreads();"
        "cp_async_4(smem + 4 * thread, params.in + thread); cp_async_mbarrier_arrive(bar);"
        "mbarrier_wait_parity(bar, 0); params.out[thread] = values[(thread + 1) % 128];"
        "mbarrier_wait_parity(bar, 0u); /* the CTA ends */",
        "mbarrier_wait_parity(bar, 0);",
    ),
    "shared memory reused before a store has read it": (
        """
    if (thread == 0) {
        for (int i = 0; i < 128; ++i) values[i] = params.out[i] = 1.0f;
        bulk_reduce_add_f32(params.out, smem, 512);
        bulk_commit_group();
        bulk_wait_group_read<0>();
        for (int i = 0; i < 128; ++i) values[i] = 5.0f;
        bulk_wait_group<0>();
    }
    """,
        "bulk_wait_group_read<0>();",
    ),
    "wgmma before its operands are there": (
        f"if (thread >= 128) {{ {STORE_A} }} __syncthreads();"
        f"if (thread < 128) {{ {MULTIPLY} wgmma_wait_group<0>(); {SHOW} }}",
        "__syncthreads();",
    ),
    "accumulators before the wait": (
        f"{STORE_A} __syncthreads(); {MULTIPLY} wgmma_wait_group<0>(); {SHOW}",
        "wgmma_wait_group<0>();",
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_races_are_noticed(run: Any, name: str) -> None:
    """What is not there is NaN, or another number, under some seed; with the wait all seeds agree."""
    text, wait = RACES[name]
    given = np.arange(128, dtype=np.float32)
    assert wait in text
    both = twins(text.replace(wait, ""), text)
    run = partial(run, both, given=given, threads=256 if "thread >= 128" in text else 128)
    want = run()
    assert np.isfinite(want).all()
    wrong = 0
    for seed in SEEDS:
        np.testing.assert_array_equal(run(seed=seed), want)
        try:
            got = run(seed=seed, is_faulty=True)
            wrong += not np.array_equal(got, want)
        except EmulationError as error:  # the end of a thread is too early for its last products
            assert "wgmma under way" in str(error)
            wrong += 1
    assert wrong


def test_ctas_run_together(run: Any) -> None:
    """One waits for what a later one writes; more of them than there are multiprocessors come to an end."""
    text = """
    if (blockIdx.x == 2 && thread == 0) params.out[0] = 0.0f;
    if (blockIdx.x < 2) while (load_acquire(reinterpret_cast<int*>(params.out)) != 0) {}
    if (thread == 0) params.out[blockIdx.x] = 0.0f;
    """
    for seed in SEEDS:
        assert not run(text, threads=32, count=16, ctas=16, seed=seed).any()


CLUSTER = """
    if (thread == 0) mbarrier_init(bar, 1);
    cluster_arrive();
    cluster_wait();
    if (thread == 0) {
        const u32 other = cluster_ctarank() ^ 1;
        mbarrier_arrive_expect_tx(bar, 4);
        store_async_4(remote_address(smem, other), remote_address(bar, other), __float_as_uint(blockIdx.x));
        mbarrier_wait_parity(bar, 0);
        params.out[blockIdx.x] = values[0];
    }
"""


def test_clusters(run: Any) -> None:
    """Each CTA of a pair gets the other's number. Without the barrier of the cluster, it may be too early."""
    both = twins(CLUSTER.replace("cluster_wait();", ""), CLUSTER)
    late = 0
    for seed in SEEDS:
        out = run(both, ctas=8, cluster=2, count=8, seed=seed)
        np.testing.assert_array_equal(out, [1, 0, 3, 2, 5, 4, 7, 6])
        try:
            run(both, ctas=8, cluster=2, count=8, seed=seed, is_faulty=True)
        except EmulationError as error:
            assert "no mbarrier at 65536 of shared memory" in str(error)
            late += 1
    assert late


def test_a_cta_of_the_cluster_that_has_ended(run: Any) -> None:
    text = """
    if (cluster_ctarank() == 1) {
        *params.out = 0.0f;
    } else {
        while (load_acquire(reinterpret_cast<int*>(params.out)) != 0) {}
        mbarrier_arrive_remote(bar, 1);
    }
    """
    with pytest.raises(EmulationError, match="CTA 1 of the cluster has ended: its shared memory is gone$"):
        run(text, threads=1, ctas=2, cluster=2)


def test_tensor_maps_that_the_driver_refuses(emulator: Emulator) -> None:
    from rawmla import jit

    good: dict[str, Any] = dict(
        ptr=1024, dtype="bfloat16", dims=(64, 8), strides_bytes=(128,), box=(64, 8), swizzle="128b",
        l2_promotion="none",
    )  # fmt: skip
    assert len(jit.tensor_map(**good)) == jit.TENSOR_MAP_BYTES
    for name, *values in (
        ("ptr", 8),
        ("dims", (64, 0)),
        ("strides_bytes", (24,)),
        ("box", (128, 8), (64, 257), (4, 1)),
    ):
        for value in values:
            with pytest.raises(EmulationError, match="^tensor_map: ptr="):
                jit.tensor_map(**{**good, name: value})


def test_nothing_remains(emulator_folder: Path) -> None:
    """Behind the block rawmla is as it was, with its own framework and kernels."""
    if missing_reason() is not None:
        pytest.skip(str(missing_reason()))
    import rawmla
    from rawmla import jit
    from rawmla.call import arrays

    before = {name: getattr(jit, name) for name in jit.__all__}
    readers = dict(arrays.READERS), dict(arrays._frameworks)
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with Emulator(emulator_folder).installed():
        rawmla.flash_attn_func(q, q, q)
        assert jit.get_kernel != before["get_kernel"]
    assert {name: getattr(jit, name) for name in jit.__all__} == before
    assert (dict(arrays.READERS), dict(arrays._frameworks)) == readers
    with pytest.raises(ValueError, match="^q: expected a tensor in CUDA memory"):
        rawmla.flash_attn_func(q, q, q)


def test_command(tmp_path: Path, emulator_folder: Path, emulator: Emulator) -> None:
    command = ["-m", "tests.emulator", "mha", "b=1", "s_q=8", "s_k=8", "d_qk=64", "d_v=64", "layout=heads"]
    command += ["--seeds", "2", "--folder", str(emulator_folder)]
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("seed 1: good, ") and second.startswith("seed 2: good, ")
    assert "mha_forward[" in first
    error = float(first.split("error ")[1].split(",")[0])
    assert 1e-4 < error < 5e-3, "of bfloat16, beside float64"
