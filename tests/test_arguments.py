"""Tables of arrays: what `check_arguments` binds, and its refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from calls.fakes import FakeFramework, contiguous

from rawmla.call.arguments import Arg, Sizes, check_arguments, check_once

TABLE = (
    Arg("q", "bfloat16 float16", "b s_q h_q 64"),
    Arg("k", "=q", "b s_k 64", has_rows=True),
    Arg("lengths", "int32", "b", has_rows=True),
    Arg("out", "=q", "b s_q h_q d_v"),
)
FRAMEWORK = FakeFramework()


def view(shape: tuple[int, ...], dtype: str = "bfloat16", strides: tuple[int, ...] | None = None) -> Any:
    return 0x1000, shape, strides or contiguous(shape), dtype, 0, FRAMEWORK, None


def views(**changes: Any) -> dict[str, Any]:
    good = {"q": view((3, 2, 8, 64)), "k": view((3, 5, 64)), "lengths": view((3,), "int32"), "out": None}
    return good | changes


def test_extents_are_bound_by_name() -> None:
    sizes = check_arguments(TABLE, views())
    assert sizes == {"b": 3, "s_q": 2, "h_q": 8, "s_k": 5}  # out is None, so d_v is not bound
    given = Sizes(d_v=16)
    assert check_arguments(TABLE, views(out=view((3, 2, 8, 16))), given) is given
    assert given == sizes | {"d_v": 16}


@pytest.mark.parametrize(
    ("name", "changed", "text"),
    (
        ("q", view((3, 2, 8, 64), "float32"), "dtype bfloat16 or float16, got float32"),
        ("k", view((3, 5, 64), "float16"), "dtype bfloat16, the dtype of q, got float16"),
        ("q", view((3, 2, 64)), "shape [b, s_q, h_q, 64], got [3, 2, 64]"),
        ("q", view((3, 2, 8, 65)), "shape [b, s_q, h_q, 64], got [3, 2, 8, 65]"),
        ("lengths", view((2,), "int32"), "shape [3] (b of q), got [2]"),
        ("lengths", view((3,), "int32", strides=(2,)), "a contiguous array, got stride 2 (elements)"),
        (
            "k",
            view((3, 5, 64), strides=(640, 128, 2)),
            "a contiguous last dimension, got strides [640, 128, 2] (elements)",
        ),
        (
            "out",
            view((3, 2, 9, 16)),
            "shape [3, 2, 8, d_v] (b of q, s_q of q, h_q of q), got [3, 2, 9, 16]",
        ),
    ),
)
def test_refusals(name: str, changed: Any, text: str) -> None:
    kind = TypeError if text.startswith("dtype") else ValueError
    with pytest.raises(kind, match=f"^{re.escape(f'{name}: expected {text}')}$"):
        check_arguments(TABLE, views(**{name: changed}))


def test_a_last_dimension_of_one_element_has_any_stride() -> None:
    table = (Arg("x", "int32", "b n", has_rows=True),)
    check_arguments(table, {"x": view((3, 1), "int32", strides=(7, 5))})


def test_errors_have_the_names_that_a_user_knows() -> None:
    aliases = {"q": "qkv", "k": "qkv"}
    with pytest.raises(TypeError, match="^qkv: expected dtype bfloat16, the dtype of qkv, got float16$"):
        check_arguments(TABLE, views(k=view((3, 5, 64), "float16")), aliases=aliases)


def test_arrays_of_a_kind_are_checked_once() -> None:
    checked: list[tuple[int, str]] = []

    def check(given: dict[str, Any], option: str) -> int:
        checked.append((given["x"][0], option))
        if option == "bad":
            raise ValueError("x: refused")
        return len(checked)

    def at(address: int) -> dict[str, Any]:
        return {"x": (address, *view((3, 4))[1:]), "y": None}

    assert [check_once(check, at(address), "good") for address in (0x1000, 0x2000, 0x3010)] == [1, 1, 1]
    assert check_once(check, at(0x1008), "good") == 2  # another alignment
    assert check_once(check, at(0x1000), "other") == 3
    for _ in range(2):  # what is refused is not kept
        with pytest.raises(ValueError, match="^x: refused$"):
            check_once(check, at(0x1000), "bad")
    assert [option for _, option in checked] == ["good", "good", "other", "bad", "bad"]
