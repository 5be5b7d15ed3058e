"""Dense attention on the published matrices of FlashMLA and FlashAttention, forward and backward.

FlashMLA's is run whole with --full. Of FlashAttention's every size is run with every kernel, and with every
pair of head dimensions that it serves; heads, masks, sinks, layouts, gradients and the order of dq go round
by draws that are always the same. The cases of one kernel are one test, which goes on after a mismatch, so
that one run shows the whole pattern.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, torch

from kit import Tolerance, check_close
from kit.mha import HALF_STEP, MhaCase, check_mha, make_mha_inputs, reference
from kit.mha_backward import make_mha_gradients, reference_backward
from operations.dense import CANARY, assert_untouched_around, attend, out_buffer
from operations.dense_backward import (
    NAMES,
    BackwardInputs,
    backward_inputs,
    backward_of,
    check_backward,
    gradient_buffers,
)

# ---- FlashMLA's matrix

FLASH_MLA_OUT = Tolerance(absolute=1e-3, relative=8.01 / 128, cosine=7e-6)
FLASH_MLA_LSE = Tolerance(absolute=1e-6, relative=2.01 / 65536)
HEADS_TOGETHER = 8  # query heads that are compared at a time, whole groups, which need less memory


def ragged_lengths(mean: int, b: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Normal lengths with a deviation of half the mean; no request has fewer keys than query tokens."""
    draw = random.Random(seed)
    q = tuple(max(1, int(draw.normalvariate(mean, mean / 2))) for _ in range(b))
    return q, tuple(max(n, int(draw.normalvariate(mean, mean / 2))) for n in q)


@pytest.mark.parametrize(
    ("s", "ragged", "heads", "d_qk", "causal"),
    full_unless(
        lambda values: values[0] == 4096 and values[1] == values[4] and values[2] == (32, 4),
        list(product((4096, 8192), (False, True), ((128, 128), (32, 4)), (128, 192), (False, True))),
        several=True,
    ),
    ids=str,
)
def test_flash_mla(s: int, ragged: bool, heads: tuple[int, int], d_qk: int, causal: bool) -> None:
    """Five passes give the same bits, but for those of dq, within the published bounds. Relative L2 errors of
    gradients are at most a whole step of the dtype.

    The published runs have no backward with groups of heads. There the first keys, whose weights are large,
    sum up so many roundings to bf16 of each that single elements of millions pass the absolute bound.
    """
    q_lengths, k_lengths = ragged_lengths(s, 2, s + d_qk) if ragged else ((s, s), (s, s))
    case = MhaCase(
        q_lengths=q_lengths, k_lengths=k_lengths, h_q=heads[0], h_kv=heads[1], d_qk=d_qk, causal=causal,
        softmax_scale=(d_qk + 100) ** -0.5, spread=0.1, seed=s,
    )  # fmt: skip
    inputs = make_mha_inputs(case)
    out, lse = attend(inputs, is_varlen=ragged)
    call = BackwardInputs(inputs, make_mha_gradients(inputs), (out, lse))
    dq, dk, dv = backward_of(call, is_varlen=ragged)[:3]
    for _ in range(4):
        for name, one, want in zip(("out", "lse"), attend(inputs, is_varlen=ragged), (out, lse), strict=True):
            assert_same_bits(name, one, want)
        again = backward_of(call, is_varlen=ragged)[1:3]
        for name, one, want in zip(("dk", "dv"), again, (dk, dv), strict=True):
            assert_same_bits(name, one, want)
        del again, one
    group = heads[0] // heads[1]
    # Of dk and dv, which are sums over the heads of a group
    summed = replace(FLASH_MLA_OUT, absolute=FLASH_MLA_OUT.absolute * group**0.5)
    for first in range(0, heads[0], HEADS_TOGETHER):
        part = slice(first, first + HEADS_TOGETHER)
        part_k = slice(first // group, (first + HEADS_TOGETHER) // group)
        some = replace(inputs, q=inputs.q[:, part], k=inputs.k[:, part_k], v=inputs.v[:, part_k])
        got, want = (out[:, part], lse[:, part]), reference(some)
        check_close(f"{case.id} out", got[0], want[0], FLASH_MLA_OUT)
        check_close(f"{case.id} lse", got[1], want[1], FLASH_MLA_LSE)
        check_mha(some, got, want)
        wanted = reference_backward(some, replace(call.gradients, dout=call.gradients.dout[:, part])).values
        found = (dq[:, part], dk[:, part_k], dv[:, part_k])
        for name, x, exact in zip(NAMES, found, wanted, strict=False):
            label = f"{case.id} {name} of heads from {first} on"
            difference = check_close(label, x, exact, FLASH_MLA_OUT if name == "dq" else summed)
            assert difference.rel_l2 <= 2 * HALF_STEP[case.dtype], (label, difference)


# ---- FlashAttention's matrix

SIZES = (
    (1, 1), (1, 3), (2, 1), (3, 3), (64, 32), (64, 128), (128, 128), (128, 192), (256, 256), (255, 256),
    (239, 1), (799, 3), (511, 1), (3, 513), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256),
    (256, 512), (307, 256), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048), (4096, 4096), (4224, 4224),
)  # fmt: skip
HEADS = ((6, 6), (6, 3), (6, 2), (6, 1))
MASKS = ("full", "causal", "right", "random", "left")
SINKS = (None, "float32", "bfloat16", "float16", "infinite")
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
) -> list[tuple[MhaCase, str, bool, bool]]:
    """The cases of a variant, with what the gradients are of, whether results are given, and `deterministic`.
    A size that one variant has with some head dimensions, the next one has with others that the kernel
    serves.
    """
    softcap, alibi = flags
    draw = random.Random(f"backward {dims} {dtype} {flags}")
    cases = []
    for number, (s_q, s_k) in enumerate(SIZES):
        d_qk, d_v = dims[(number + turn) % len(dims)]
        mask = draw.choice(MASKS)
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
        of = draw.choice(("out", "lse", "both"))
        cases.append((case, of, draw.random() < 0.5, draw.random() < 0.5))
    return cases


def is_quick(variant: tuple[Any, ...]) -> bool:
    """One kernel for half of the head dimensions; for one of them, in float16 too."""
    (dims, *_), *_, turn = variant
    if turn == 0:
        return dims in ((64, 64), (128, 128), (128, 64), (8, 8), (192, 128), (256, 256))
    return turn == 3 and dims == (128, 128)


@pytest.mark.parametrize(
    ("dims", "dtype", "flags", "turn"),
    full_unless(is_quick, VARIANTS, several=True),
    ids=[
        "-".join(
            [f"{dims[0][0]}x{dims[0][1]}", dtype]
            + [name for name, on in zip(("softcap", "alibi"), flags, strict=True) if on]
        )
        for dims, dtype, flags, _ in VARIANTS
    ],
)
def test_general(dims: Any, dtype: str, flags: tuple[bool, bool], turn: int) -> None:
    """Against plain torch, and within the bounds of a dtype's products. Memory around tokens is NaN."""
    failures: list[str] = []
    cases = general_cases(dims, dtype, flags, turn)
    for case, of, given, deterministic in cases:
        inputs = make_mha_inputs(case)
        call = backward_inputs(inputs, of)
        try:
            buffer, out = out_buffer(inputs) if given else (None, None)
            results = attend(inputs, deterministic=deterministic, out=out)
            assert out is None or results[0] is out
            check_mha(inputs, results, plain=True)
            if buffer is not None:
                assert_untouched_around(buffer, out)
            buffers, arrays = gradient_buffers(inputs, CANARY) if given else ([], {})
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
