"""Gradients of which some are not needed, computed by their kernels on the emulated device: those that are
have the bits of a call for all of them, but for dq, whose sums have any order.
"""

from __future__ import annotations

from typing import Any

import pytest
from emulator import Emulator
from full_cases import full_unless

from kit.mha import MhaCase
from rawmla.flex import backward as flex_backward
from rawmla.kernels.mha_backward_variants import ALL, Needs, specs

torch = pytest.importorskip("torch")

import rawmla  # noqa: E402
from operations.dense import SMALL as SEGMENTS  # noqa: E402
from operations.dense_backward import (  # noqa: E402
    BackwardCase,
    gradients_of_some,
    make_dense_backward_call,
)
from operations.flex_backward import SMALL_CASES, make_flex_backward_call  # noqa: E402

SOME = (
    Needs(True, False, False, False),
    Needs(False, True, False, False),
    Needs(False, False, True, True),
    Needs(True, True, False, True),
    Needs(True, False, True, False),
    Needs(False, True, True, False),
    Needs(False, False, False, True),
)
OF_192: dict[str, Any] = {"d_qk": 192, "d_v": 128}
OF_256: dict[str, Any] = {"d_qk": 256, "d_v": 256}
SMALL: dict[str, Any] = {"b": 1, "s_q": 150, "s_k": 200, "h_q": 2, "h_kv": 1}
DENSE_CASES = (
    (MhaCase(b=1, s_q=150, s_k=40, h_q=4, h_kv=2, causal=True, sink="infinite"), "both"),
    (MhaCase(b=1, s_q=200, s_k=300, h_q=2, h_kv=1, window=(30, 5), layout="slice", d_qk=64, d_v=64), "out"),
    (MhaCase(b=1, s_q=140, s_k=270, h_q=2, h_kv=2, softcap=15.0, alibi="heads", d_qk=64, d_v=64), "both"),
    (
        MhaCase(**SEGMENTS, q_used=(2, 0, 1, 100), k_used=(3, 0, 0, 141), rows_around=70, layout="slice"),
        "lse",
    ),
    (MhaCase(**SMALL, causal=True, d_qk=128, d_v=128, softcap=15.0, sink="float32"), "both"),
    (MhaCase(**SMALL, **OF_192, causal=True, sink="float32"), "out"),
    (MhaCase(**SMALL, **OF_192, window=(60, 10), softcap=15.0), "lse"),
    (MhaCase(**SMALL, **OF_256, causal=True, sink="float32"), "both"),
    (MhaCase(**SMALL, **OF_256, softcap=15.0, dtype="float16"), "out"),
)
DENSE = [BackwardCase(case, of, number % 2 == 1) for number, (case, of) in enumerate(DENSE_CASES)]
FLEX = [SMALL_CASES[i] for i in (0, 1, 2, 3, 7)]


def chosen(number: int, part: str, has_others: bool) -> tuple[Needs, ...]:
    """One of the sets for the case of a number, another for its neighbour, or those that are left. The last
    set has nothing where there is no further gradient.
    """
    usable = SOME if has_others else SOME[:-1]
    quick = usable[number % len(usable)]
    return tuple(needs for needs in usable if (needs == quick) == (part == "one"))


parts = pytest.mark.parametrize("part", full_unless(lambda part: part == "one", ("one", "others")))


def assert_alike(name: str, one: Any, wanted: Any, *, ordered: bool) -> None:
    """The same bits, or sums in another order."""
    if ordered:
        assert torch.equal(one.nan_to_num(), wanted.nan_to_num()), name
    else:
        step = 2.0**-7 if wanted.dtype == torch.bfloat16 else 2.0**-10
        torch.testing.assert_close(one.double(), wanted.double(), rtol=step, atol=1e-4, equal_nan=True)


@parts
@pytest.mark.parametrize("number", range(len(DENSE)), ids=lambda i: DENSE[i].id)
def test_dense_attention(emulator: Emulator, number: int, part: str) -> None:
    case = DENSE[number].forward
    call = make_dense_backward_call(DENSE[number], "cpu")
    function = getattr(rawmla, call.function)
    everything = gradients_of_some(ALL, function, **call.arguments)
    has_sink = everything[3] is not None
    flags = case.softcap > 0, case.alibi is not None, has_sink and DENSE[number].of != "out"
    for needs in chosen(number, part, has_sink):
        emulator.launched.clear()
        got = gradients_of_some(needs, function, **call.arguments)
        wanted = needs._replace(others=needs.others and has_sink)
        assert tuple(x is not None for x in got) == wanted
        names = [label.partition("[")[0] for label in emulator.launched]
        assert names == [
            "mha_backward_prepare",
            *[specs(case.dtype, case.d_qk, case.d_v, *flags, needs)[1].name] * needs.main,
            *["mha_backward_finish"] * (needs.dq or wanted.others),
            *["mha_backward_clear"] * (needs.main and case.q_lengths is not None),
        ]
        for i, (one, other) in enumerate(zip(got, everything, strict=True)):
            if one is not None:
                ordered = i > 0 or DENSE[number].deterministic
                assert_alike(f"{needs}, {i}", one, other, ordered=ordered)


@parts
@pytest.mark.parametrize("number", range(len(FLEX)), ids=lambda i: FLEX[i].id)
def test_flex_attention(emulator: Emulator, number: int, part: str) -> None:
    case, ordered = FLEX[number].forward, FLEX[number].deterministic
    a = make_flex_backward_call(FLEX[number], "cpu", "python").arguments
    arrays = flex_backward.Arrays(
        *(a[name] for name in ("query", "key", "value", "out", "grad_out", "lse", "grad_lse"))
    )
    options = flex_backward.Options(a.get("scale"), a.get("enable_gqa", False), ordered)

    def backward(needs: Needs) -> tuple[Any, ...]:
        *made, by_name = flex_backward.gradients(
            needs, arrays, a.get("score_mod"), a.get("block_mask"), options
        )
        return *made, by_name

    *everything, captured = backward(ALL)
    for needs in chosen(number, part, bool(captured)):
        emulator.launched.clear()
        *got, by_name = backward(needs)
        assert tuple(x is not None for x in got) == needs[:3]
        names = [label.partition("[")[0] for label in emulator.launched]
        main = "mha_backward_by_product" if max(case.d_qk, case.d_v) > 128 else "mha_backward"
        assert names.count(main) == needs.main
        assert ("mha_backward_finish" in names) == needs.dq
        assert ("flex_captured_gradients" in names) == (needs.others and bool(captured))
        assert needs.dq or "block_mask_ranks" not in names
        for i, (one, other) in enumerate(zip(got, everything, strict=True)):
            if one is not None:
                assert_alike(f"{needs}, {i}", one, other, ordered=i > 0 or ordered)
        assert set(by_name) == set(captured)
        for name, one in by_name.items():
            assert (one is not None) == needs.others
            if one is not None:
                assert_alike(f"{needs}, {name}", one, captured[name], ordered=ordered)
