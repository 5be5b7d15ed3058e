"""The parts of cuda_src that any attention kernel can use, also those that no kernel uses yet.

Each is compiled in a kernel of its own: the PTX has its instruction, and ptxas takes it.
"""

from __future__ import annotations

import itertools
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


LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"
TMA = {
    "tma_load_{}d(64, &map, 8, ": f"{LOAD}.L2::cache_hint",
    "tma_load_{}d_multicast(64, &map, 8, 3, ": f"{LOAD}.multicast::cluster.L2::cache_hint",
    "tma_prefetch_{}d(&map, ": "cp.async.bulk.prefetch.tensor.{}d.L2.global.tile",
    "tma_store_{}d(&map, 64, ": "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group",
}
"""Calls up to the coordinates, and their instructions."""


@pytest.mark.parametrize("dims", (2, 3, 4, 5))
@pytest.mark.parametrize("call", TMA)
def test_tma(dims: int, call: str) -> None:
    """Each coordinate comes once, in order, after what the instruction has before."""
    body = f"{call.format(dims)}{', '.join(COORDINATES[:dims])}); bulk_commit_group(); bulk_wait_group<0>();"
    ptx = assemble(kernel(("ptx/tma.cuh",), "const __grid_constant__ TensorMap map", body))
    name = re.escape(TMA[call].format(dims))
    found = re.search(rf"{name} (?:\[[^\]]*\], )?\[%rd\d+, \{{([^}}]*)\}}\]", ptx)
    assert found, ptx
    registers = found[1].split(", ")
    values = {target: axis for target, axis in re.findall(r"mov\.u32\s+(%r\d+), %ctaid\.([xyz]);", ptx)}
    for target, given in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), 1;", ptx):
        values[target] = f"{values[given]} + 1"
    assert [values[register] for register in registers] == list(COORDINATES[:dims])


def test_headers_leave_no_macros() -> None:
    """tma.cuh and wgmma.cuh in both orders, without a word from the compiler; no macro of theirs remains."""
    root = find_source_root()
    for names in (("tma", "wgmma"), ("wgmma", "tma")):
        texts = [(root / f"ptx/{name}.cuh").read_text() for name in names]
        macros = sorted(set(re.findall(r"#define (RAWMLA_\w+)", "".join(texts))))
        assert len(macros) > 70
        text = "".join(f'#include "ptx/{name}.cuh"\n' for name in names)
        text += "".join(f"\n#ifdef {macro}\n#error {macro} is left\n#endif" for macro in macros)
        sources = SourceSet("probe.cu", text.encode(), headers())
        result = nvrtc.compile_source(sources, ("-arch=sm_90a", "-std=c++20"))
        assert result.status == "NVRTC_SUCCESS" and not result.log.strip("\0\n "), result.log


# wgmma

MAJORS = {"0": "Major::kK", "1": "Major::kMn"}
DTYPES = {"bf16": "Dtype::kBf16", "f16": "Dtype::kF16"}
PRODUCT = """
    float d[{count}];
    u32 a[4] = {{u32(x), u32(y), u32(z), 7}};
    for (int i = 0; i < {count}; ++i) d[i] = out[i];
    wgmma_pin(d);
    wgmma_fence();
    wgmma_{kind}<{given}>(d, {a}, desc_b, x > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_pin(d);
    for (int i = 0; i < {count}; ++i) out[i * 128 + threadIdx.x] = d[i] + a[i % 4];
"""


@pytest.mark.parametrize(
    "widths", full_unless(lambda widths: len(widths) == 4, (range(64, 257, 64), range(8, 257, 8))), ids=len
)
def test_wgmma_of_every_width(widths: range) -> None:
    """All accumulators, each once and in the order in which they are stored. One source: headers take longer
    than kernels.
    """
    kinds = {  # dtype, what A is, majors of A and B
        "ss_{}_0": ("bf16", "desc_a", "0", "1"),
        "ss_{}_1": ("f16", "desc_a", "1", "0"),
        "rs_{}_0": ("bf16", "a", "0"),
        "rs_{}_1": ("bf16", "a", "1"),
    }
    kernels = []
    for n, (kind, (dtype, a, *majors)) in itertools.product(widths, kinds.items()):
        given = ", ".join([DTYPES[dtype], *[MAJORS[one] for one in majors]])
        body = PRODUCT.format(count=n // 2, kind=kind[:2], given=given, a=a)
        parameters = "float* out, unsigned long long desc_a, unsigned long long desc_b"
        kernels.append(kernel(("ptx/wgmma.cuh",), parameters, body, kind.format(n)))
    ptx = dict(re.findall(r"\.visible \.entry (\w+)\((.*?)\n}", assemble("".join(kernels)), re.DOTALL))
    assert len(ptx) == len(kernels) == 4 * len(widths)
    for n, (kind, (dtype, a, *majors)) in itertools.product(widths, kinds.items()):
        pattern = r"(wgmma\.mma_async\S+) \{([^}]*)\}, (\{[^}]*\}|%rd\d+), %rd\d+, p, (.*);"
        ((name, accumulators, found, rest),) = re.findall(pattern, ptx[kind.format(n)])
        assert name == f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
        numbers = [int(register[2:]) for register in accumulators.split(", ")]
        assert len(set(numbers)) == n // 2 and (kind[:2] == "rs" or numbers == sorted(numbers))
        assert len({*found[1:-1].split(", ")}) == 4 if a == "a" else found.startswith("%rd")
        assert rest.split(", ") == ["1", "1", *majors]


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
