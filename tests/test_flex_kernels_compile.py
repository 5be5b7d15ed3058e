"""The kernels of flex attention as the compiler makes them, with functions and without, and what their C++
and their Python side have to agree on.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cuda_probe import assert_in_kernel, assert_no_losses, assert_products_are_not_serialised
from full_cases import full_unless
from host_mods import pack
from test_params import conditions_of, has_members

import rawmla
from rawmla import jit
from rawmla.flex.functions import header_of, within_blocks
from rawmla.flex.mods import NO_BYTES, Capture, CudaMod, Frame, Mod, Number, Place, Reading, reading_of
from rawmla.jit import KernelSpec
from rawmla.jit.builder import Builder
from rawmla.jit.cache import DiskCache
from rawmla.jit.params import ParamStruct
from rawmla.jit.sources import find_source_root
from rawmla.kernels import block_mask
from rawmla.kernels.mha_forward import params_of
from rawmla.kernels.mha_forward_variants import flex_spec, tile_in_blocks

GRID = block_mask.Grid(2, 3, 300, 500, 32, 96)
SCORE = Mod(
    "return score + mod.n0 * static_cast<float>(q_idx - kv_idx) + mod.t0(h, q_idx);",
    (Capture(None, "bfloat16", 2, "kSmallRows"),),
    (Number(0.5, False),),
)
MASK = Mod("return mod.t0(b, q_idx) == mod.t0(b, kv_idx);", (Capture(None, "int32", 2, "kSmallRows"),), ())
CAUSAL = CudaMod("q_idx >= kv_idx && q_idx - kv_idx < width", {"width": 100}).mod()
FUNCTIONS: dict[str, tuple[Mod | None, Mod | None]] = {
    "neither": (None, None),
    "mask": (None, CAUSAL),
    "score": (SCORE, None),
    "both": (SCORE, CAUSAL),
    "both read": (SCORE, MASK),
    "small blocks": (None, within_blocks(Reading(Frame(MASK), (), ()), GRID).frame.mod),
}
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


class Variant(NamedTuple):
    """One of `flex_spec`."""

    dtype: str
    dims: tuple[int, int]
    functions: str
    max_scores: bool

    def of_tile(self, keys: int) -> KernelSpec:
        return flex_spec(self.dtype, *self.dims, keys, self.max_scores, header_of(*FUNCTIONS[self.functions]))

    @property
    def spec(self) -> KernelSpec:
        return self.of_tile(tile_in_blocks(*self.dims).keys)


VARIANTS = [
    Variant(dtype, dims, functions, max_scores)
    for dims in DIMS
    for dtype, functions, max_scores in (
        ("bfloat16", "neither", False),
        ("float16", "neither", True),
        ("bfloat16", "mask", True),
        ("float16", "mask", False),
        ("bfloat16", "score", False),
        ("float16", "score", True),
        ("bfloat16", "both", False),
        ("bfloat16", "both", True),
    )
]
HALVES = {variant.spec: variant.of_tile(64) for variant in VARIANTS if variant.dims == (192, 128)}
SPECS = [
    *[variant.spec for variant in VARIANTS],
    block_mask.states_spec(header_of(None, CAUSAL)),
    block_mask.states_spec(header_of(None, MASK)),
    block_mask.LISTS_SPEC,
    block_mask.SCATTER_SPEC,
]
IDS = [
    *[f"{v.dtype} {v.dims[0]}x{v.dims[1]} {v.functions}{' max' * v.max_scores}" for v in VARIANTS],
    *("states", "states that read", "lists", "scatter"),
]


QUICK = {
    "bfloat16 128x128 both max",
    "float16 192x128 mask",
    *IDS[len(VARIANTS) :],
}


@pytest.mark.parametrize("which", full_unless(lambda which: which in QUICK, IDS))
def test_compiles_without_spills(which: str) -> None:
    """These functions leave the kernel as good as one without, at d 192/128 those of scores with half the
    tile: users' own may not.
    """
    spec = SPECS[IDS.index(which)]
    defines = dict(spec.defines)
    if defines.get("D_QK") == 192 and jit.build(spec).losses:
        half = HALVES[spec]
        assert dict(half.defines)["TILE_KEYS"] == defines["TILE_KEYS"] // 2
        spec = half
    assert_no_losses(spec)


@pytest.mark.parametrize(
    "which",
    full_unless(
        lambda which: which == ((256, 256), "both read"),
        itertools.product(DIMS, ("both read", "small blocks")),
    ),
    ids=str,
)
def test_functions_that_read_along_keys(which: tuple[tuple[int, int], str]) -> None:
    """They may cost registers, as users' own may, but products do not wait for each other."""
    dims, functions = which
    assert_products_are_not_serialised(jit.build(Variant("bfloat16", dims, functions, False).spec))


@pytest.mark.parametrize("dims", DIMS)
def test_tiles(dims: tuple[int, int]) -> None:
    spec = Variant("bfloat16", dims, "both", False).spec
    tile = tile_in_blocks(*dims)
    assert_in_kernel(
        spec,
        [
            f"kTileKeys == {tile.keys} && 128 % kTileKeys == 0",
            f"64 * kConsumers == {128}",
        ],
    )


def bytes_of(mod: Mod | None) -> int:
    """Bytes of a function's parameters."""
    if mod is None:
        return len(NO_BYTES)
    return len(pack(mod, [Place(0, (1,) * one.rank, (1,) * one.rank) for one in mod.captures]))


STRUCTS: list[tuple[KernelSpec, ParamStruct]] = [
    *[
        (
            Variant("bfloat16", (64, 64), functions, False).spec,
            params_of((bytes_of(FUNCTIONS[functions][0]), bytes_of(FUNCTIONS[functions][1]))),
        )
        for functions in FUNCTIONS
    ],
    *[
        (block_mask.states_spec(header_of(None, mask)), block_mask.states_params(bytes_of(mask)))
        for _, mask in FUNCTIONS.values()
    ],
]


@pytest.mark.parametrize(
    ("spec", "declared"),
    STRUCTS,
    ids=[*FUNCTIONS, *[f"states {name}" for name in FUNCTIONS]],
)
def test_cpp_has_the_same_members(spec: KernelSpec, declared: ParamStruct) -> None:
    count = len(declared.members)
    conditions = [f"sizeof(Params) == {declared.size}", f"Has{count}<Params> && !Has{count + 1}<Params>"]
    for member in declared.members:
        conditions += conditions_of(member.name, member.type, member.length, member.offset)
    assert_in_kernel(spec, conditions, has_members(count) + has_members(count + 1))


def test_other_functions_have_other_structs() -> None:
    """The comparison above can fail."""
    spec = Variant("bfloat16", (64, 64), "both", False).spec
    with pytest.raises(AssertionError, match="static assert"):
        assert_in_kernel(spec, [f"sizeof(Params) == {params_of((800, 8)).size}"])


def test_states() -> None:
    """The three states have the numbers that the mask function of small blocks compares with."""
    assert_in_kernel(block_mask.LISTS_SPEC, ["kEmpty == 0 && kPartial == 1 && kFull == 2"])
    mask = within_blocks(None, GRID).frame.mod
    assert "if (block_state != 1) return block_state == 2;" in mask.text


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(find_source_root(), DiskCache(tmp_path / "cache", 10**8))


@pytest.mark.parametrize("kernel", ("attention", "states"))
@pytest.mark.parametrize(
    "lines", (("q_idx >= wrong_name",), ("int x = q_idx;", "x += 1;", "return x >= wrong_name;"))
)
def test_a_mistake_is_shown_where_it_is(builder: Builder, kernel: str, lines: tuple[str, ...]) -> None:
    header = header_of(None, CudaMod("\n".join(lines), {"width": 5}).mod())
    spec = (
        block_mask.states_spec(header)
        if kernel == "states"
        else flex_spec("bfloat16", 64, 64, 128, False, header)
    )
    with pytest.raises(rawmla.CompileError) as caught:
        builder.build(spec)
    wrong = header[1].split("\n").index(lines[-1] if len(lines) > 1 else f"return {lines[-1]}") + 1
    assert (
        f'user/mods.cuh, line {wrong}: error: identifier "wrong_name" is undefined' in caught.value.user_lines
    )
    assert re.search(rf"> {wrong} \| .*{re.escape(lines[-1])}\n +\| +\^", caught.value.user_lines)
    assert caught.value.user_lines in str(caught.value)


@pytest.mark.parametrize(
    ("code", "captures", "text"),
    (
        ("score +", {}, "expected an expression"),
        ("score + bias(h)", {"bias": 2}, "bias"),
        ("return missing;", {}, "missing"),
    ),
)
def test_mistakes_of_score_functions(builder: Builder, code: str, captures: Any, text: str) -> None:
    header = header_of(CudaMod(code, captures).mod(), CAUSAL)
    with pytest.raises(rawmla.CompileError) as caught:
        builder.build(flex_spec("bfloat16", 64, 64, 128, False, header))
    assert "user/mods.cuh, line " in caught.value.user_lines and text in caught.value.user_lines


def test_text_with_comments_and_names_of_the_kernel() -> None:
    """What a user calls things does not meet the names of the kernel."""
    captures = {"params": 2.0, "tile": 3, "block": 1, "kTileKeys": 5.0, "stage": 1.0}
    mod = CudaMod("score * params + tile + block + kTileKeys * stage  // all of them", captures).mod()
    assert_in_kernel(flex_spec("bfloat16", 64, 64, 128, False, header_of(mod, None)), [])


def test_two_functions_with_the_same_names() -> None:
    score = CudaMod("const float x = score * n; return x;", {"n": 2.0}).mod()
    text = "const int x = q_idx + n, block_state = 3; return x > kv_idx + block_state;"
    mask = CudaMod(text, {"n": 2}).mod()
    header = header_of(score, within_blocks(reading_of(mask), GRID).frame.mod)
    assert_in_kernel(flex_spec("bfloat16", 64, 64, 128, False, header), [])
