"""Dense attention on the published matrices of FlashMLA and FlashAttention.

FlashMLA's is run whole with --full. Of FlashAttention's every size is run with every pair of head dimensions
in both dtypes, and heads, masks, sinks and layouts go round: tests/test_mha_testing.py counts that every pair
of values occurs. The cases of one kernel are one test, which goes on after a mismatch, so that one run shows
the whole pattern.
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
from kit.mha import MhaCase, check_mha, make_mha_inputs, reference
from operations.dense import assert_untouched_around, attend, out_buffer

# ---- FlashMLA's matrix

FLASH_MLA_OUT = Tolerance(absolute=1e-3, relative=8.01 / 128, cosine=7e-6)
FLASH_MLA_LSE = Tolerance(absolute=1e-6, relative=2.01 / 65536)


def ragged_lengths(mean: int, b: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Normal lengths with a deviation of half the mean; no request has fewer keys than query tokens."""
    draw = random.Random(seed)
    q = tuple(max(1, int(draw.normalvariate(mean, mean / 2))) for _ in range(b))
    return q, tuple(max(n, int(draw.normalvariate(mean, mean / 2))) for n in q)


def flash_mla_case(s: int, ragged: bool, heads: tuple[int, int], d_qk: int, causal: bool) -> MhaCase:
    q_lengths, k_lengths = ragged_lengths(s, 2, s + d_qk) if ragged else ((s, s), (s, s))
    return MhaCase(
        q_lengths=q_lengths, k_lengths=k_lengths, h_q=heads[0], h_kv=heads[1], d_qk=d_qk, causal=causal,
        softmax_scale=(d_qk + 100) ** -0.5, spread=0.1, seed=s,
    )  # fmt: skip


on_flash_mla_matrix = pytest.mark.parametrize(
    ("s", "ragged", "heads", "d_qk", "causal"),
    full_unless(
        lambda values: values[0] == 4096 and values[1] == values[4],
        list(product((4096, 8192), (False, True), ((128, 128), (32, 4)), (128, 192), (False, True))),
        several=True,
    ),
    ids=str,
)


@on_flash_mla_matrix
def test_flash_mla(s: int, ragged: bool, heads: tuple[int, int], d_qk: int, causal: bool) -> None:
    """Five calls give the same bits, within the published bounds and within those of a dtype's products."""
    case = flash_mla_case(s, ragged, heads, d_qk, causal)
    inputs = make_mha_inputs(case)
    out, lse = attend(inputs, is_varlen=ragged)
    for _ in range(4):
        again = attend(inputs, is_varlen=ragged)
        assert_same_bits("out", again[0], out)
        assert_same_bits("lse", again[1], lse)
        del again
    group = heads[0] // heads[1]
    for first in range(0, heads[0], 16):  # in parts, which need less memory
        part, part_k = slice(first, first + 16), slice(first // group, (first + 16) // group)
        some = replace(inputs, q=inputs.q[:, part], k=inputs.k[:, part_k], v=inputs.v[:, part_k])
        got, want = (out[:, part], lse[:, part]), reference(some)
        check_close(f"{case.id} out", got[0], want[0], FLASH_MLA_OUT)
        check_close(f"{case.id} lse", got[1], want[1], FLASH_MLA_LSE)
        check_mha(some, got, want)


# ---- FlashAttention's matrix

SIZES = (
    (1, 1), (1, 3), (2, 1), (3, 3), (64, 32), (64, 128), (128, 128), (128, 192), (256, 256), (255, 256),
    (239, 1), (799, 3), (511, 1), (3, 513), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256),
    (256, 512), (307, 256), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048), (4096, 4096), (4224, 4224),
)  # fmt: skip
HEADS = ((6, 6), (6, 3), (6, 2), (6, 1))
MASKS = {False: ("full", "causal", "right"), True: ("random", "left")}  # by whether they hide the first keys
SINKS = (None, "float32", "bfloat16", "float16", "infinite")
# Head dimensions that one kernel serves, by their padding.
DIMS = (
    ((64, 64), (40, 40), (59, 59)),
    ((96, 96), (80, 80)),
    ((128, 128), (111, 111)),
    ((192, 128),),
    ((192, 192),),
    ((128, 64),),
    ((256, 256),),
    ((8, 8), (16, 16), (32, 32)),
    ((160, 160),),
    ((224, 224),),
)
# Of a kernel's flags (window, softcap, ALiBi), which bfloat16 has: float16 has the opposite ones, so that
# each pair of head dimensions meets both values of each flag, and all flags meet in both dtypes.
FLAGS = ((0, 3), (6,), (0, 5), (1,), (2,), (4,), (7, 2), (3,), (5,), (6,))
VARIANTS = tuple(
    (dims, dtype, (bool(code & 4), bool(code & 2), bool(code & 1)))
    for dims, codes in zip(DIMS, FLAGS, strict=True)
    for chosen in codes
    for dtype, code in (("bfloat16", chosen), ("float16", 7 - chosen))
)


def general_cases(
    dims: tuple[tuple[int, int], ...], dtype: str, flags: tuple[bool, bool, bool]
) -> list[tuple[MhaCase, str, bool, bool]]:
    """The cases of a variant, with the name of their mask, `deterministic`, and whether out is given."""
    window, softcap, alibi = flags
    draw = random.Random(f"{dims} {dtype} {flags}")
    cases = []
    for (s_q, s_k), (d_qk, d_v) in product(SIZES, dims):
        mask = draw.choice(MASKS[window])
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
            window=(left if window else -1, right if mask in ("right", "random") else -1),
            softcap=15.0 if softcap else 0.0,
            sink=draw.choice(SINKS),
            alibi=draw.choice(("heads", "requests")) if alibi else None,
            layout=draw.choice(("plain", "slice", "heads")),
            seed=len(cases),
        )
        cases.append((case, mask, draw.random() < 0.5, draw.random() < 0.5))
    return cases


@pytest.mark.parametrize(
    ("dims", "dtype", "flags"),
    full_unless(lambda variant: variant in VARIANTS[::3], VARIANTS, several=True),
    ids=[
        "-".join(
            [f"{dims[0][0]}x{dims[0][1]}", dtype]
            + [name for name, on in zip(("window", "softcap", "alibi"), flags, strict=True) if on]
        )
        for dims, dtype, flags in VARIANTS
    ],
)
def test_general(dims: Any, dtype: str, flags: tuple[bool, bool, bool]) -> None:
    """Against plain torch, and within the bounds of a dtype's products. Memory around tokens is NaN."""
    failures: list[str] = []
    cases = general_cases(dims, dtype, flags)
    for case, _, deterministic, out_given in cases:
        inputs = make_mha_inputs(case)
        try:
            buffer, given = out_buffer(inputs) if out_given else (None, None)
            got = attend(inputs, deterministic=deterministic, out=given)
            assert given is None or got[0] is given
            torch.cuda.synchronize()
            check_mha(inputs, got, plain=True)
            if buffer is not None:
                assert_untouched_around(buffer, given)
        except AssertionError as error:
            failures.append(str(error))
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"
