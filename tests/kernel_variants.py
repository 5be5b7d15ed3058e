"""The kernel variants that tests compile: those of `python -m rawmla compile --all`, further ones of dense
attention's backward, and flex attention with functions.

`VARIANTS` has them by name. `QUICK` are the names that every run compiles; `pytest --full` compiles all.
"""

from __future__ import annotations

import itertools

from kernel_params import SPARSE_DECODE, family

from rawmla.flex.functions import header_of, within_blocks
from rawmla.flex.mods import Backward, Capture, CudaMod, Frame, Mod, Number, Reading, Site
from rawmla.jit import KernelSpec
from rawmla.kernels import all_specs, block_mask, mha_backward_variants, mha_forward_variants
from rawmla.kernels.flex_captured import IN_ANY_ORDER, IN_DIGITS, IN_UNITS, LARGEST, captured_spec
from rawmla.kernels.mha_backward_variants import Needs, forms_of, references_spec, specs
from rawmla.kernels.mha_decode import TILE_ROWS, Features
from rawmla.kernels.mha_decode import specs as decode_specs

SPECS = all_specs()
BY_KERNEL = {family(spec): spec for spec in reversed(SPECS)}
"""One variant of each kernel, for decoding and for prefill."""
DTYPES = ("bfloat16", "float16")

# ---- dense attention's backward

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
MORE_DIMS = (
    *((64, 128), (128, 96), (128, 32), (96, 64), (40, 40), (8, 8)),
    *((192, 64), (96, 160), (32, 224), (64, 256), (256, 96)),
)
FLAGS = tuple(itertools.product((False, True), repeat=3))  # softcap, ALiBi, sinks with dlse
NEEDS = [Needs(*some, True) for some in itertools.product((False, True), repeat=3) if any(some)]
BACKWARD = [
    *(
        specs(dtype, *dims, *flags)[1]
        for dims in DIMS + MORE_DIMS
        for dtype in DTYPES
        for flags in (FLAGS if dims in DIMS else (FLAGS[0], FLAGS[-1]))
    ),
    *(
        specs("bfloat16", *dims, *flags, needs)[1]
        for dims in DIMS
        for flags in (FLAGS[0], FLAGS[-1])
        for needs in NEEDS[:-1]
    ),
]
# All flags at each pair of dimensions; at d 128 the most that its form by keys has, at d 256 other registers;
# sets of gradients, each by another form.
QUICK_BACKWARD = (
    *(specs("bfloat16", *dims, *FLAGS[-1])[1] for dims in DIMS if dims != (128, 128)),
    specs("bfloat16", 128, 128, *FLAGS[-2])[1],
    specs("bfloat16", 256, 256, True, False, False)[1],
    specs("bfloat16", 96, 96, *FLAGS[-1], Needs(True, False, False, True))[1],
    specs("bfloat16", 192, 128, *FLAGS[0], Needs(False, True, True, True))[1],
    specs("bfloat16", 128, 128, *FLAGS[-1], Needs(False, False, True, True))[1],
    *specs("bfloat16", 128, 128)[::2],
    mha_backward_variants.CLEAR_SPEC,
)

# ---- attention over caches

DECODE = [
    spec
    for dims in (*DIMS, (48, 80))
    for rows in TILE_ROWS
    for features in (Features(True, True), Features(cache_fp8=True), Features(True, True, True, True))
    for spec in decode_specs("bfloat16", rows, *dims, features)
]
QUICK_DECODE = decode_specs("bfloat16", 64, 128, 128, Features(True, True, True, True))

# ---- flex attention: score and mask functions

GRID = block_mask.Grid(2, 3, 300, 500, 32, 96)
CAUSAL = CudaMod("q_idx >= kv_idx").mod()
WINDOW = CudaMod("q_idx >= kv_idx && q_idx - kv_idx < width", {"width": 100}).mod()
SAME = Mod("return mod.t0(b, q_idx) == mod.t0(b, kv_idx);", (Capture(None, "int32", 2, "kSmallRows"),), ())
DOCUMENTS = SAME._replace(text="return mod.t0(b, q_idx) == mod.t0(b, kv_idx) && q_idx >= kv_idx;")
BIAS = Mod(
    "return score + mod.n0 * static_cast<float>(q_idx - kv_idx) + mod.t0(h, q_idx);",
    (Capture(None, "bfloat16", 2, "kSmallRows"),),
    (Number(0.5, False),),
)
ALIBI = CudaMod("score - slope * (q_idx - kv_idx)", {"slope": 0.5}, grad="grad").mod(backward=True)
DERIVATIVE = "const float t = torch_tanh(score / cap); return grad * (1.0f - t * t);"
SOFTCAP = CudaMod("cap * torch_tanh(score / cap)", {"cap": 20.0}, grad=DERIVATIVE).mod(backward=True)


def reading(indices: str, value: str, site: Site, rank: int) -> Mod:
    """A score function that adds what it reads, or multiplies by it, and whose capture needs a gradient."""
    is_factor = "score" in value
    read = f"mod.t0({indices})"
    derivative = f"score * {read}, {read}" if is_factor else f"score + {read}, 1.0f"
    add = f"gradient_sink.template add<0>(mod.t0.place({indices}), {value});"
    return Mod(
        f"return score {'*' if is_factor else '+'} {read};",
        (Capture(None, "float32", rank, "kSmallRows"),),
        (),
        Backward(f"return {{{derivative}}};", not is_factor, add, (0,), (site,)),
    )


RELATIVE = reading("h, q_idx - kv_idx + 500", "grad", Site(0, True, True), 2)
BY_QUERY = reading("h, q_idx", "grad", Site(0, True, False), 2)
BY_KEY = reading("b, kv_idx", "grad", Site(0, False, True), 2)
FACTOR = reading("h", "grad * score", Site(0, False, False), 1)

Functions = tuple[Mod | None, Mod | None]
NEITHER: Functions = (None, None)
FORWARD: dict[str, Functions] = {
    "neither": NEITHER,
    "mask": (None, WINDOW),
    "score": (BIAS, None),
    "both": (BIAS, WINDOW),
    "both read": (BIAS, SAME),
    "small blocks": (None, within_blocks(Reading(Frame(SAME), (), ()), GRID).frame.mod),
}
GRADIENTS: dict[str, Functions] = {
    "neither": NEITHER,
    "causal": (None, CAUSAL),
    "window": (None, WINDOW),
    "documents": (None, DOCUMENTS),
    "ALiBi, causal": (ALIBI, CAUSAL),
    "softcap, causal": (SOFTCAP, CAUSAL),
    "softcap, documents": (SOFTCAP, DOCUMENTS),
    "relative": (RELATIVE, None),
    "factor, causal": (FACTOR, CAUSAL),
    "small blocks": (None, within_blocks(Reading(Frame(DOCUMENTS), (), ()), GRID, by_columns=True).frame.mod),
}
FLEX_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def forward_spec(
    dtype: str,
    dims: tuple[int, int],
    functions: str,
    max_scores: bool = False,
    halves: int = 1,
    grouped: bool = False,
) -> KernelSpec:
    """The flex forward with some functions, on tiles of as many keys as it has, or of a half of them;
    `grouped`: for query heads that share tiles.
    """
    keys = mha_forward_variants.tile_in_blocks(*dims).keys // halves
    header = header_of(*FORWARD[functions])
    return mha_forward_variants.flex_spec(dtype, *dims, keys, max_scores, header, grouped)


def gradient_spec(
    dims: tuple[int, int], functions: str, dtype: str = "bfloat16", form: int = 0, needs: str = "qkv"
) -> KernelSpec:
    """The flex backward with some functions, in one of its forms."""
    needed = Needs("q" in needs, "k" in needs, "v" in needs, True)
    header = header_of(*GRADIENTS[functions])
    return mha_backward_variants.flex_spec(dtype, *dims, forms_of(*dims)[form], header, needed)


HALF_TILES: dict[KernelSpec, KernelSpec] = {}
"""By a variant of d 192/128 the one with half the tile, which calls take where the first one spills."""
FLEX: dict[str, KernelSpec] = {
    "flex states": block_mask.states_spec(header_of(None, WINDOW)),
    "flex states that read": block_mask.states_spec(header_of(None, SAME)),
    "flex references 128": references_spec("bfloat16", 128, 128, header_of(SOFTCAP, DOCUMENTS)),
    "flex references 256": references_spec("bfloat16", 256, 64, header_of(SOFTCAP, DOCUMENTS)),
}
for dims, functions in itertools.product(FLEX_DIMS, ("neither", "mask", "score", "both")):
    dtypes = ("bfloat16", "bfloat16" if functions == "both" else "float16")
    for dtype, max_scores in zip(dtypes, (functions == "mask", functions != "mask"), strict=True):
        spec = forward_spec(dtype, dims, functions, max_scores)
        FLEX[f"flex {dtype} {dims} {functions}{' max' * max_scores}"] = spec
        if dims == (192, 128):
            HALF_TILES[spec] = forward_spec(dtype, dims, functions, max_scores, halves=2)
for dims in FLEX_DIMS:
    spec = forward_spec("bfloat16", dims, "both", True, grouped=True)
    FLEX[f"flex grouped {dims} both max"] = spec
    if dims == (192, 128):
        HALF_TILES[spec] = forward_spec("bfloat16", dims, "both", True, halves=2, grouped=True)
for dims in (*FLEX_DIMS, (96, 96)):
    for functions in GRADIENTS:
        FLEX[f"flex gradients {dims} {functions}"] = gradient_spec(dims, functions)
FLEX["flex gradients (128, 128) by product"] = gradient_spec((128, 128), "softcap, causal", form=1)
for dims, functions in itertools.product(((128, 128), (256, 256)), ("causal", "softcap, causal")):
    FLEX[f"flex gradients {dims} fp16 {functions}"] = gradient_spec(dims, functions, "float16")
for dims, functions, needs in itertools.product(
    FLEX_DIMS, ("causal", "softcap, documents"), ("q", "kv", "v")
):
    FLEX[f"flex gradients {dims} {functions}, d{needs}"] = gradient_spec(dims, functions, needs=needs)
for dims in ((64, 64), (128, 128), (256, 256)):
    for name, score, mask, passes in (
        ("relative", RELATIVE, None, (IN_ANY_ORDER,)),
        ("relative, causal", RELATIVE, CAUSAL, (IN_UNITS,)),
        ("by query", BY_QUERY, CAUSAL, (IN_ANY_ORDER, LARGEST, IN_DIGITS)),
        ("by key", BY_KEY, DOCUMENTS, (IN_ANY_ORDER, IN_DIGITS)),
        ("factor", FACTOR, CAUSAL, (IN_ANY_ORDER, IN_DIGITS)),
    ):
        for pass_ in passes:
            FLEX[f"flex captured {dims} {name} {pass_}"] = captured_spec(
                "bfloat16", *dims, pass_, header_of(score, mask)
            )
QUICK_FLEX = {
    "flex states",
    "flex references 128",
    "flex bfloat16 (128, 128) both max",
    "flex float16 (192, 128) mask",
    "flex grouped (128, 128) both max",
    "flex gradients (128, 128) softcap, documents",
    "flex gradients (64, 64) ALiBi, causal",
    "flex gradients (192, 128) small blocks",
    "flex gradients (256, 256) relative",
    "flex gradients (64, 64) softcap, documents, dq",
    "flex gradients (64, 64) causal, dv",
    f"flex captured (128, 128) relative, causal {IN_UNITS}",
    f"flex captured (128, 128) by query {LARGEST}",
    f"flex captured (128, 128) by key {IN_ANY_ORDER}",
    f"flex captured (128, 128) factor {IN_DIGITS}",
}

VARIANTS: dict[str, KernelSpec] = {spec.label: spec for spec in (*SPECS, *BACKWARD, *DECODE)} | FLEX
# Sparse attention as for prefill, which has more to do.
QUICK: set[str] = (
    QUICK_FLEX
    | {spec.label for spec in (*QUICK_BACKWARD, *QUICK_DECODE)}
    | {
        spec.label
        for (name, prefill), spec in BY_KERNEL.items()
        if (prefill or name not in SPARSE_DECODE) and not name.startswith("mha_backward")
    }
)
