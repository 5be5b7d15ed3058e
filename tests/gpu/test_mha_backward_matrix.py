"""The backward of dense attention on the published matrix of FlashAttention, by a covering design.

Every size is run with every kernel, and with every pair of head dimensions that it serves; heads, masks,
sinks, layouts, gradients and the order of dq go round by draws that are always the same. The cases of one
kernel are one test, which goes on after a mismatch, so that one run shows the whole pattern.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import torch
from test_mha_matrix import HEADS, MASKS, SINKS, SIZES

from kit.mha import MhaCase, make_mha_inputs
from operations.dense import CANARY, assert_untouched_around
from operations.dense_backward import backward_inputs, backward_of, check_backward, gradient_buffers

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
    ((160, 160),),
    ((192, 192),),
    ((224, 224),),
)
GRADIENTS = ("out", "lse", "both")
# Kernels' flags (softcap, ALiBi), as numbers, which bfloat16 and float16 have: between them each pair of head
# dimensions meets all four, the last three both values of each flag.
FLAGS = (*(((0, 3), (1, 2)), ((1, 2), (0, 3))) * 5, ((1,), (2,)), ((2,), (1,)), ((0,), (3,)))
# With the number of a variant among those of its head dimensions
VARIANTS = tuple(
    (dims, dtype, (bool(code & 2), bool(code & 1)), turn)
    for dims, (of_bfloat16, of_float16) in zip(DIMS, FLAGS, strict=True)
    for turn, (dtype, code) in enumerate(
        [*(("bfloat16", code) for code in of_bfloat16), *(("float16", code) for code in of_float16)]
    )
)


def general_cases(
    dims: tuple[tuple[int, int], ...], dtype: str, flags: tuple[bool, bool], turn: int
) -> list[tuple[MhaCase, str, str, bool, bool]]:
    """The cases of a variant, with the name of their mask, what the gradients are of, whether dq, dk and dv
    are given, and `deterministic`. A size that one variant has with some head dimensions, the next one has
    with others that the kernel serves.
    """
    softcap, alibi = flags
    draw = random.Random(f"backward {dims} {dtype} {flags}")
    cases = []
    for number, (s_q, s_k) in enumerate(SIZES):
        d_qk, d_v = dims[(number + turn) % len(dims)]
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
        cases.append((case, mask, draw.choice(GRADIENTS), draw.random() < 0.5, draw.random() < 0.5))
    return cases


@pytest.mark.parametrize(
    ("dims", "dtype", "flags", "turn"),
    full_unless(lambda variant: variant[3] == 0 and variant[0] in DIMS[::4], VARIANTS, several=True),
    ids=[
        "-".join(
            [f"{dims[0][0]}x{dims[0][1]}", dtype]
            + [name for name, on in zip(("softcap", "alibi"), flags, strict=True) if on]
        )
        for dims, dtype, flags, _ in VARIANTS
    ],
)
def test_backward_general(dims: Any, dtype: str, flags: tuple[bool, bool], turn: int) -> None:
    """Against plain torch, and within the bounds of a dtype's products. Memory around tokens is NaN."""
    failures: list[str] = []
    cases = general_cases(dims, dtype, flags, turn)
    for case, _, of, given, deterministic in cases:
        call = backward_inputs(make_mha_inputs(case), of)
        try:
            buffers, arrays = gradient_buffers(call.inputs, CANARY) if given else ([], {})
            got = backward_of(call, deterministic=deterministic, **arrays)
            assert all(one is arrays[name] for one, name in zip(got, arrays, strict=False))
            torch.cuda.synchronize()
            check_backward(call, got, plain=True)
            for buffer, array in zip(buffers, arrays.values(), strict=True):
                assert_untouched_around(buffer, array)
        except AssertionError as error:
            order = "a fixed order" if deterministic else "any order"
            failures.append(f"gradient of {of}, dq in {order}: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"
