"""The backward of dense attention on the published matrix of FlashAttention, by a covering design.

Every size is run with every kernel; heads,
masks, sinks, layouts, gradients and exact head dimensions go round by draws that are always the same. The
cases of one kernel are one test, which goes on after a mismatch, so that one run shows the whole pattern.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from gpu_support import torch
from mha_backward_calls import backward_inputs, backward_of, check_backward, gradient_buffers
from mha_calls import CANARY, assert_untouched_around
from test_mha_matrix import HEADS, MASKS, SINKS, SIZES

from rawmla.testing.mha import MhaCase, make_mha_inputs

# Head dimensions that one kernel serves, by their padding to multiples of 32.
DIMS = (
    ((64, 64), (40, 40), (59, 59)),
    ((96, 96), (80, 80)),
    ((128, 128), (111, 111)),
    ((128, 64),),
    ((64, 128),),
    ((8, 8), (16, 16), (32, 32)),
    ((192, 128), (161, 97)),
    ((256, 256), (225, 225)),
    ((64, 256), (40, 241)),
    ((192, 64),),
)
GRADIENTS = ("out", "lse", "both")
# A kernel's flags (softcap, ALiBi), which bfloat16 has: float16 has the others, so that each pair of head
# dimensions meets all of them, and each dtype does.
FLAGS = ((0, 3), (1, 2))
VARIANTS = tuple(
    (dims, dtype, (bool(code & 2), bool(code & 1)))
    for number, dims in enumerate(DIMS)
    for dtype in ("bfloat16", "float16")
    for code in FLAGS[(number + (dtype == "float16")) % len(FLAGS)]
)


def general_cases(
    dims: tuple[tuple[int, int], ...], dtype: str, flags: tuple[bool, bool]
) -> list[tuple[MhaCase, str, bool]]:
    """The cases of a variant, with what the gradients are of, and whether dq, dk and dv are given."""
    softcap, alibi = flags
    draw = random.Random(f"backward {dims} {dtype} {flags}")
    cases = []
    for number, (s_q, s_k) in enumerate(SIZES):
        d_qk, d_v = dims[number % len(dims)]
        mask = draw.choice((*MASKS[False], *MASKS[True]))
        left, right = draw.randrange(s_k + 1), draw.randrange(s_k + 1)
        h_q, h_kv = draw.choice(HEADS)
        case = MhaCase(
            b=9 if s_q < 4096 else 2,
            s_q=s_q,
            s_k=s_k,
            h_q=h_q,
            h_kv=h_kv,
            d_qk=d_qk,
            d_v=d_v,
            dtype=dtype,
            causal=mask == "causal",
            window=(
                left if mask in ("left", "random") else -1,
                right if mask in ("right", "random") else -1,
            ),
            softcap=15.0 if softcap else 0.0,
            sink=draw.choice(SINKS),
            alibi=draw.choice(("heads", "requests")) if alibi else None,
            layout=draw.choice(("plain", "slice", "heads")),
            seed=number,
        )
        cases.append((case, draw.choice(GRADIENTS), draw.random() < 0.5))
    return cases


@pytest.mark.parametrize(
    ("dims", "dtype", "flags"),
    [
        pytest.param(
            dims,
            dtype,
            flags,
            id="-".join(
                [f"{dims[0][0]}x{dims[0][1]}", dtype]
                + [name for name, on in zip(("softcap", "alibi"), flags, strict=True) if on]
            ),
        )
        for dims, dtype, flags in VARIANTS
    ],
)
def test_backward_general(dims: Any, dtype: str, flags: tuple[bool, bool]) -> None:
    """Against plain torch, and within the bounds of a dtype's products. Memory around tokens is NaN."""
    failures: list[str] = []
    cases = general_cases(dims, dtype, flags)
    for case, of, given in cases:
        call = backward_inputs(make_mha_inputs(case), of)
        try:
            buffers, arrays = gradient_buffers(call.inputs, CANARY) if given else ([], {})
            got = backward_of(call, **arrays)
            assert all(one is arrays[name] for one, name in zip(got, arrays, strict=False))
            torch.cuda.synchronize()
            check_backward(call, got, plain=True)
            for buffer, array in zip(buffers, arrays.values(), strict=True):
                assert_untouched_around(buffer, array)
        except AssertionError as error:
            failures.append(f"gradient of {of}: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"
