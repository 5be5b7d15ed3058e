"""Merging the states of attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kit import torch_reference

from .core import Call, Operation, Sizes, spoilt, without

MERGE_CASES = (
    Sizes("3_parts", "bfloat16", 3),
    Sizes("40_parts", "float16", 40),
    Sizes("5_parts_float32", "float32", 5),
)
MERGE_SHAPE = (2, 3, 16, 512)
MERGE_RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 4e-6}


def make_parts(
    parts: int, shape: tuple[int, ...], dtype: str, seed: int = 0, device: str = "cuda"
) -> tuple[list[Any], list[Any]]:
    """Random states; some rows are empty, with NaN in their out, and the first one is so in all parts."""
    draw = torch.Generator(device).manual_seed(seed + parts)
    lse_shape = (shape[0], shape[2], shape[1]) if len(shape) == 4 else shape[:2]
    outs, lses = [], []
    for i in range(parts):
        out = torch.randn(shape, generator=draw, device=device).to(getattr(torch, dtype))
        lse = torch.randn(lse_shape, generator=draw, device=device) * 4
        empty = torch.rand(lse_shape, generator=draw, device=device) < 0.2
        empty.view(-1)[0] = True
        lse[empty] = float("inf") if i % 2 else -float("inf")
        out[empty.transpose(1, 2) if len(shape) == 4 else empty] = float("nan")
        outs.append(out)
        lses.append(lse)
    return outs, lses


def check_merged(outs: list[Any], lses: list[Any], got: tuple[Any, ...]) -> None:
    """Compare with the float64 reference."""
    dtype = str(outs[0].dtype).removeprefix("torch.")
    want_out, want_lse = torch_reference.merge_attn_states(outs, lses)
    out, lse = got
    assert out.dtype == outs[0].dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want_out, rtol=MERGE_RELATIVE[dtype], atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def merge_call(case: Sizes, device: str = "cuda") -> Call:
    """The call of `merge_attn_states`."""
    outs, lses = make_parts(case.n, MERGE_SHAPE, case.kind, device=device)
    return Call(
        "merge_attn_states",
        {"outs": outs, "lses": lses},
        ("out", "lse"),
        partial(check_merged, outs, lses),
        case,
    )


def merge_changes(call: Call) -> Iterator[None]:
    """New states."""
    case, device = call.inputs, str(call.arguments["outs"][0].device)
    for seed in (1, 2):
        parts = make_parts(case.n, MERGE_SHAPE, case.kind, seed, device)
        for name, news in zip(("outs", "lses"), parts, strict=True):
            for old, new in zip(call.arguments[name], news, strict=True):
                old.copy_(new)
        yield


MERGE = Operation(
    name="merge_attn_states",
    make=merge_call,
    cases=MERGE_CASES,
    kernels=("mla_merge_states",),
    arrays=("outs", "lses"),
    floats=lambda case: ("outs", "lses"),
    strides={
        "outs": ("wide", "columns", "permuted"),
        "lses": ("wide", "columns", "odd", "unaligned", "transposed"),
    },
    odd_last=("lses",),
    out=lambda out: ((1, 1), (0, 2), (4, 7), (0, 0)),
    empty={
        "no requests": (without("outs", "lses"), {"out": 0, "lse": 0}),
        "no query tokens": (
            lambda a: {"outs": [x[:, :0] for x in a["outs"]], "lses": [x[..., :0] for x in a["lses"]]},
            {"out": 1, "lse": 2},
        ),
    },
    bad={
        "no parts": (ValueError, "lses", lambda a: {"outs": [], "lses": []}),
        "one lse too few": spoilt("lses", lambda x: x[:-1]),
        "a tensor of parts": spoilt("outs", lambda x: torch.stack(x), TypeError),
    },
    changes=merge_changes,
)
