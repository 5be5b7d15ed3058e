"""The kernels of the backward of flex attention as the compiler makes them, and what their C++ and their
Python side have to agree on.
"""

from __future__ import annotations

from typing import Any

import pytest
from cuda_probe import assert_in_kernel, assert_no_losses
from full_cases import full_unless
from test_flex_kernels_compile import DIMS, GRID, MASK, bytes_of
from test_params import conditions_of, has_members

import rawmla
from rawmla import jit
from rawmla.flex.functions import header_of, within_blocks
from rawmla.flex.mods import Backward, Capture, CudaMod, Frame, Mod, Reading, Site
from rawmla.jit import KernelSpec
from rawmla.jit.params import ParamStruct
from rawmla.kernels import block_mask, flex_captured
from rawmla.kernels.flex_captured import IN_ANY_ORDER, IN_DIGITS, IN_UNITS, LARGEST, captured_spec
from rawmla.kernels.mha_backward import params_of
from rawmla.kernels.mha_backward_variants import (
    BY_KEYS,
    BY_PRODUCT,
    Needs,
    flex_spec,
    forms_of,
    references_spec,
)

CAUSAL = CudaMod("q_idx >= kv_idx").mod()
WINDOW = CudaMod("q_idx >= kv_idx && q_idx - kv_idx < width", {"width": 100}).mod()
DOCUMENTS = MASK._replace(text="return mod.t0(b, q_idx) == mod.t0(b, kv_idx) && q_idx >= kv_idx;")
ALIBI = CudaMod("score - slope * (q_idx - kv_idx)", {"slope": 0.5}, grad="grad").mod(backward=True)
SOFTCAP = CudaMod(
    "cap * torch_tanh(score / cap)",
    {"cap": 20.0},
    grad="const float t = torch_tanh(score / cap); return grad * (1.0f - t * t);",
).mod(backward=True)


def reading(indices: str, value: str, *sites: Site, rank: int) -> Mod:
    """A score function that adds what it reads, or multiplies by it."""
    return Mod(
        f"return score {'*' if 'score' in value else '+'} mod.t0({indices});",
        (Capture(None, "float32", rank, "kSmallRows"),),
        (),
        Backward(
            f"return {{score * mod.t0({indices}), mod.t0({indices})}};"
            if "score" in value
            else f"return {{score + mod.t0({indices}), 1.0f}};",
            "score" not in value,
            f"gradient_sink.template add<0>(mod.t0.place({indices}), {value});",
            (0,),
            sites,
        ),
    )


RELATIVE = reading("h, q_idx - kv_idx + 500", "grad", Site(0, True, True), rank=2)
BY_QUERY = reading("h, q_idx", "grad", Site(0, True, False), rank=2)
BY_KEY = reading("b, kv_idx", "grad", Site(0, False, True), rank=2)
FACTOR = reading("h", "grad * score", Site(0, False, False), rank=1)
FUNCTIONS: dict[str, tuple[Mod | None, Mod | None]] = {
    "neither": (None, None),
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
ALL_DIMS = (*DIMS, (96, 96))
MAIN = {
    (dims, name, form.by_product): flex_spec("bfloat16", *dims, form, header_of(*functions))
    for dims in ALL_DIMS
    for name, functions in FUNCTIONS.items()
    for form in forms_of(*dims)
    if form == forms_of(*dims)[0] or (dims, name) == ((128, 128), "softcap, causal")
}
MAIN |= {
    (dims, f"fp16 {name}", forms_of(*dims)[0].by_product): flex_spec(
        "float16", *dims, forms_of(*dims)[0], header_of(*FUNCTIONS[name])
    )
    for dims in ((128, 128), (256, 256))
    for name in ("causal", "softcap, causal")
}
SOME = {
    (dims, name, needs): flex_spec(
        "bfloat16", *dims, forms_of(*dims)[0], header_of(*FUNCTIONS[name]), Needs(*needs, True)
    )
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256))
    for name in ("causal", "softcap, documents")
    for needs in ((True, False, False), (False, True, True), (False, False, True))
}
CAPTURED = {
    (dims, name, pass_): captured_spec("bfloat16", *dims, pass_, header_of(score, mask))
    for dims in ((64, 64), (128, 128), (256, 256))
    for name, score, mask, pass_ in (
        ("relative", RELATIVE, None, IN_ANY_ORDER),
        ("relative", RELATIVE, CAUSAL, IN_UNITS),
        ("by query", BY_QUERY, CAUSAL, IN_ANY_ORDER),
        ("by query", BY_QUERY, CAUSAL, LARGEST),
        ("by query", BY_QUERY, CAUSAL, IN_DIGITS),
        ("by key", BY_KEY, DOCUMENTS, IN_ANY_ORDER),
        ("by key", BY_KEY, DOCUMENTS, IN_DIGITS),
        ("factor", FACTOR, CAUSAL, IN_ANY_ORDER),
        ("factor", FACTOR, CAUSAL, IN_DIGITS),
    )
}
AROUND = (
    flex_captured.FINISH_SPEC,
    block_mask.RANKS_SPEC,
    *(
        references_spec("bfloat16", d, keys, header_of(*FUNCTIONS["softcap, documents"]))
        for d, keys in ((128, 128), (256, 64))
    ),
)


QUICK = {
    ((128, 128), "softcap, documents", False),
    ((64, 64), "ALiBi, causal", False),
    ((192, 128), "small blocks", True),
    ((256, 256), "relative", True),
}
QUICK_SOME = {
    ((64, 64), "softcap, documents", (True, False, False)),
    ((64, 64), "causal", (False, False, True)),
}
QUICK_CAPTURED = {
    ((128, 128), "relative", IN_UNITS),
    ((128, 128), "by query", LARGEST),
    ((128, 128), "by key", IN_ANY_ORDER),
    ((128, 128), "factor", IN_DIGITS),
}


def test_the_quick_ones_are_among_them() -> None:
    assert set(MAIN) > QUICK and set(SOME) > QUICK_SOME and set(CAPTURED) > QUICK_CAPTURED


@pytest.mark.parametrize("which", full_unless(lambda which: which in QUICK, MAIN), ids=str)
def test_compiles_without_spills(which: Any) -> None:
    """These functions leave the kernel as good as one without: users' own may not."""
    assert_no_losses(MAIN[which])


@pytest.mark.parametrize("which", full_unless(lambda which: which in QUICK_SOME, SOME), ids=str)
def test_some_gradients_compile_without_spills(which: Any) -> None:
    assert_no_losses(SOME[which])


@pytest.mark.parametrize("which", full_unless(lambda which: which in QUICK_CAPTURED, CAPTURED), ids=str)
def test_captured_gradients_compile_without_spills(which: Any) -> None:
    assert_no_losses(CAPTURED[which])


@pytest.mark.parametrize("spec", AROUND, ids=lambda spec: spec.label)
def test_others_compile(spec: KernelSpec) -> None:
    assert_no_losses(spec)


@pytest.mark.parametrize("dims", ALL_DIMS, ids=str)
def test_constants_of_the_forms(dims: tuple[int, int]) -> None:
    for form in forms_of(*dims):
        one = flex_spec("bfloat16", *dims, form, header_of(*FUNCTIONS["softcap, causal"]))
        conditions = [f"kTileKeys == {form.tile_keys}", f"kThreads == {form.threads}"]
        assert_in_kernel(one, [*conditions, "kFlex && kTrims && kHasDerivative"])


def test_constants_without_functions() -> None:
    for dims in ((128, 128), (256, 256)):
        plain = flex_spec("bfloat16", *dims, forms_of(*dims)[0], header_of(None, None))
        assert_in_kernel(plain, ["kFlex && !kTrims && !kHasDerivative"])


@pytest.mark.parametrize("pass_", (IN_ANY_ORDER, LARGEST, IN_UNITS, IN_DIGITS))
def test_constants_of_captured_gradients(pass_: int) -> None:
    assert_in_kernel(
        captured_spec("bfloat16", 128, 128, pass_, header_of(BY_QUERY, CAUSAL)),
        [
            f"kTileKeys == {flex_captured.CAPTURED_KEYS}",
            f"sizeof(CapturedCell) == {flex_captured._CELL_BYTES}",
            f"sizeof(CapturedDigits) == {flex_captured._DIGITS_BYTES}",
            f"kElementsTogether == {flex_captured._ELEMENTS_TOGETHER}",
            "2 * kRegisters + kProducerRegisters <= 3 * 168",
        ],
    )


def test_forms() -> None:
    assert forms_of(128, 128) == forms_of(17, 96) == (BY_KEYS, BY_PRODUCT)
    assert forms_of(192, 128) == forms_of(64, 129) == (BY_PRODUCT,)


STRUCTS: list[tuple[KernelSpec, ParamStruct]] = [
    *[
        (
            MAIN[(64, 64), name, False],
            params_of((bytes_of(FUNCTIONS[name][0]), bytes_of(FUNCTIONS[name][1]))),
        )
        for name in FUNCTIONS
    ],
    (
        MAIN[(256, 256), "softcap, documents", True],
        params_of((bytes_of(SOFTCAP), bytes_of(DOCUMENTS))),
    ),
    (
        CAPTURED[(64, 64), "by key", IN_ANY_ORDER],
        params_of((bytes_of(BY_KEY), bytes_of(DOCUMENTS))),
    ),
    (flex_captured.FINISH_SPEC, flex_captured.CAPTURED_FINISH_PARAMS),
    (block_mask.RANKS_SPEC, block_mask.RANKS_PARAMS),
]


@pytest.mark.parametrize(
    ("spec", "declared"), STRUCTS, ids=[*FUNCTIONS, "by product", "captured gradients", "finish", "ranks"]
)
def test_cpp_has_the_same_members(spec: KernelSpec, declared: ParamStruct) -> None:
    count = len(declared.members)
    conditions = [f"sizeof(Params) == {declared.size}", f"Has{count}<Params> && !Has{count + 1}<Params>"]
    for member in declared.members:
        conditions += conditions_of(member.name, member.type, member.length, member.offset)
    assert_in_kernel(spec, conditions, has_members(count) + has_members(count + 1))


def test_without_a_score_function_there_is_room_for_a_gradient() -> None:
    """ScoreMod of no function has the bytes that the host packs for it."""
    assert bytes_of(None) == 8


def test_a_mistake_in_a_gradient_is_shown_where_it_is() -> None:
    mod = CudaMod("score", grad="grad * wrong_name").mod(backward=True)
    with pytest.raises(rawmla.CompileError) as caught:
        jit.build(flex_spec("bfloat16", 64, 64, BY_KEYS, header_of(mod, None)))
    assert 'identifier "wrong_name" is undefined' in caught.value.user_lines
