"""The parts of cuda_src that any attention kernel can use, also those that no kernel uses yet.

Each is compiled in a kernel of its own: the PTX has its instruction, and ptxas takes it.
"""

from __future__ import annotations

import re

import pytest
from cuda_probe import assemble, headers
from full_cases import full_unless

from rawmla.jit import nvrtc
from rawmla.jit.sources import SourceSet, find_source_root

COORDINATES = ("x", "y", "z", "x + 1", "y + 1")


def kernel(includes: tuple[str, ...], parameters: str, body: str, name: str = "probe") -> str:
    """A kernel of one warpgroup, whose body can use x, y and z, which the compiler does not know."""
    return "".join(f'#include "{name}"\n' for name in includes) + (
        f'extern "C" __global__ void __launch_bounds__(128, 1) {name}({parameters}) {{\n'
        "    [[maybe_unused]] const int x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;\n"
        f"    {body}\n}}\n"
    )


# TMA


@pytest.mark.parametrize("dims", (2, 3, 4, 5))
@pytest.mark.parametrize(
    ("function", "arguments", "instruction"),
    [
        (
            "tma_load_{}d",
            "64, &map, 8",
            "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
        ),
        (
            "tma_load_{}d_multicast",
            "64, &map, 8, 3",
            "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            ".L2::cache_hint",
        ),
        ("tma_prefetch_{}d", "&map", "cp.async.bulk.prefetch.tensor.{}d.L2.global.tile"),
        ("tma_store_{}d", "&map, 64", "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"),
    ],
    ids=("load", "load_multicast", "prefetch", "store"),
)
def test_tma(dims: int, function: str, arguments: str, instruction: str) -> None:
    """Each coordinate comes once, in order, behind what the instruction has before."""
    given = ", ".join(COORDINATES[:dims])
    ptx = assemble(
        kernel(
            ("ptx/tma.cuh",),
            "const __grid_constant__ TensorMap map",
            f"{function.format(dims)}({arguments}, {given}); bulk_commit_group(); bulk_wait_group<0>();",
        )
    )
    name = re.escape(instruction.format(dims))
    found = re.search(rf"{name} (?:\[[^\]]*\], )?\[%rd\d+, \{{([^}}]*)\}}\]", ptx)
    assert found, ptx
    registers = found[1].split(", ")
    assert len(set(registers)) == dims
    ids = {"%ctaid.x": "x", "%ctaid.y": "y", "%ctaid.z": "z"}
    values: dict[str, str] = {}
    for target, source in re.findall(r"mov\.u32\s+(%r\d+), (%ctaid\.[xyz]);", ptx):
        values[target] = ids[source]
    for target, source in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), 1;", ptx):
        values[target] = f"{values[source]} + 1"
    assert [values[register] for register in registers] == list(COORDINATES[:dims])


def test_headers_leave_no_macros() -> None:
    """tma.cuh and wgmma.cuh in both orders, without a word from the compiler; no macro of theirs remains."""
    root = find_source_root()
    for names in (("tma", "wgmma"), ("wgmma", "tma")):
        macros = {
            macro
            for name in names
            for macro in re.findall(r"#define (RAWMLA_\w+)", (root / f"ptx/{name}.cuh").read_text())
        }
        assert len(macros) > 70
        left = "".join(f"\n#ifdef {macro}\n#error {macro} is left\n#endif" for macro in sorted(macros))
        sources = SourceSet(
            "probe.cu",
            "".join(f'#include "ptx/{name}.cuh"\n' for name in names).encode() + left.encode(),
            headers(),
        )
        result = nvrtc.compile_source(sources, ("-arch=sm_90a", "-std=c++20"))
        assert result.status == "NVRTC_SUCCESS" and not result.log.strip("\0\n "), result.log


# wgmma

MAJORS = {0: "Major::kK", 1: "Major::kMn"}


def product(name: str, n: int, call: str) -> str:
    """A kernel that stores what a wgmma of n columns leaves in its accumulators."""
    return kernel(
        ("ptx/wgmma.cuh",),
        "float* out, unsigned long long desc_a, unsigned long long desc_b",
        f"float d[{n // 2}]; u32 a[4] = {{u32(x), u32(y), u32(z), 7}};\n"
        f"    for (int i = 0; i < {n // 2}; ++i) d[i] = out[i];\n"
        "    wgmma_pin(d); wgmma_fence();\n"
        f"    {call}\n"
        "    wgmma_commit_group(); wgmma_wait_group<0>(); wgmma_pin(d);\n"
        f"    for (int i = 0; i < {n // 2}; ++i) out[i * 128 + threadIdx.x] = d[i] + a[i % 4];",
        name,
    )


def wgmma_of(ptx: str) -> tuple[str, list[str], str, list[str]]:
    """The one wgmma of a PTX text: its name, accumulators, A, and what follows B."""
    (found,) = re.findall(r"(wgmma\.mma_async\S+) \{([^}]*)\}, (\{[^}]*\}|%rd\d+), %rd\d+, p, (.*);", ptx)
    name, accumulators, a, rest = found
    return name, accumulators.split(", "), a, rest.split(", ")


@pytest.mark.parametrize(
    "widths", full_unless(lambda widths: len(widths) == 4, (range(64, 257, 64), range(8, 257, 8))), ids=len
)
def test_wgmma_of_every_width(widths: range) -> None:
    """All accumulators, each once and in the order in which they are stored. One source: headers take longer
    than kernels.
    """
    of_descriptors, of_registers = ((0, 1, "bf16"), (1, 0, "f16")), (0, 1)
    codes = {"bf16": "Dtype::kBf16", "f16": "Dtype::kF16"}
    kernels = []
    for n in widths:
        for a_major, b_major, dtype in of_descriptors:
            template = f"wgmma_ss<{codes[dtype]}, {MAJORS[a_major]}, {MAJORS[b_major]}>"
            kernels.append(product(f"ss_{n}_{dtype}", n, f"{template}(d, desc_a, desc_b, x > 0);"))
        for b_major in of_registers:
            template = f"wgmma_rs<Dtype::kBf16, {MAJORS[b_major]}>"
            kernels.append(product(f"rs_{n}_{b_major}", n, f"{template}(d, a, desc_b, x > 0);"))
    ptx = dict(re.findall(r"\.visible \.entry (\w+)\((.*?)\n}", assemble("".join(kernels)), re.DOTALL))
    assert len(ptx) == len(kernels) == 4 * len(widths)
    for n in widths:
        for a_major, b_major, dtype in of_descriptors:
            name, accumulators, a, rest = wgmma_of(ptx[f"ss_{n}_{dtype}"])
            assert name == f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
            assert len(set(accumulators)) == n // 2 and a.startswith("%rd")
            assert rest == ["1", "1", str(a_major), str(b_major)]
            numbers = [int(register[2:]) for register in accumulators]
            assert numbers == sorted(numbers)
        for b_major in of_registers:
            name, accumulators, a, rest = wgmma_of(ptx[f"rs_{n}_{b_major}"])
            assert name == f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
            assert len(set(accumulators)) == n // 2 and len(set(a[1:-1].split(", "))) == 4
            assert rest == ["1", "1", str(b_major)]


def test_lines_fit_the_column_limit() -> None:
    """clang-format leaves comments and the text of macros alone."""
    limit = 110  # ColumnLimit of .clang-format
    root = find_source_root()
    longer = [
        f"{path.relative_to(root)}:{number}: {len(line)} columns"
        for path in sorted(root.rglob("*.cu*"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > limit
    ]
    assert not longer, "\n".join(longer)
