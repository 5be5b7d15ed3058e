"""Attention over caches: calls of a case's inputs, and their entries of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kit.kvcache import (
    ARRAYS,
    FP8,
    KvCacheCase,
    KvCacheInputs,
    check_kvcache,
    covered_rows,
    make_kvcache_inputs,
    named_arguments,
)

from .core import Arguments, Call, Operation, slices, spoilt, without, wrong_value

# ---- calls


@dataclass
class KvCacheCall(Call):
    """A call that may write to its caches, which are checked too once it was made with them."""

    has_run: bool = False

    def run(self, form: str = "object", /, *, invariant: bool = False, **changes: Any) -> tuple[Any, ...]:
        """See `Call.run`."""
        self.has_run |= not {"k_cache", "v_cache"} & changes.keys()
        return super().run(form, invariant=invariant, **changes)

    def all_arrays(self) -> list[Any]:
        """All that the call reads and does not write."""
        written = ("k_cache", "v_cache") if self.arguments["k"] is not None else ()
        return [x for name, x in self.arrays().items() if name not in written]


def kvcache_call(inputs: KvCacheInputs) -> KvCacheCall:
    """The call of a case's inputs."""

    def check(got: tuple[Any, ...]) -> None:
        check_kvcache(inputs, got, with_caches=call.has_run)

    case = inputs.case
    call = KvCacheCall(
        "flash_attn_with_kvcache",
        {name: x for name, x in named_arguments(inputs).items() if x is not None or name == "k"},
        ("out", "lse"),
        check,
        inputs,
        covered=(lambda: covered_rows(inputs)) if case.rows_around else None,
    )
    return call


def make_kvcache_call(case: KvCacheCase, device: str = "cuda") -> Call:
    """The call of a case."""
    return kvcache_call(make_kvcache_inputs(case, device))


def copy_inputs(inputs: KvCacheInputs, other: KvCacheInputs) -> None:
    """Give the arrays the contents of another case's, whose sizes are the same."""
    names = (*(name for name in ARRAYS if name not in ("k_cache", "v_cache")), "memory", "before")
    for name in names:
        targets, sources = getattr(inputs, name), getattr(other, name)
        if isinstance(targets, torch.Tensor):
            targets, sources = [targets], [sources]
        if isinstance(targets, list):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)


def kvcache_changes(call: Call) -> Iterator[None]:
    """Everything that the arrays hold, from other calls of the same sizes; then requests without tokens."""
    inputs, case = call.inputs, call.inputs.case
    yield
    for turn in range(1, 4):
        changes: Arguments = {"seed": turn, "lengths": rolled(case.lengths, turn)}
        for name in ("q_lengths", "new_lengths", "leftpad"):
            if (given := getattr(case, name)) is not None:
                changes[name] = rolled(given, turn)
        copy_inputs(inputs, make_kvcache_inputs(replace(case, **changes), inputs.q.device))
        yield
    changes = {"lengths": (-max(1, *case.new_tokens),) * case.b, "leftpad": case.leftpad and (0,) * case.b}
    copy_inputs(inputs, make_kvcache_inputs(replace(case, **changes), inputs.q.device))
    yield


def rolled(numbers: tuple[int, ...], turn: int) -> tuple[int, ...]:
    """The numbers in another order."""
    return (*numbers[turn:], *numbers[:turn])


# ---- entries

D64: Arguments = {"d_qk": 64, "d_v": 64}
LENGTHS: Arguments = {"lengths": (300, 1, 0, -1, 513, 64)}
DECODE = KvCacheCase(
    **LENGTHS, new=1, rotary=0.5, causal=True, batch_idx=True, leftpad=(7, 0, 0, 0, 130, 64), alibi="heads",
    sink="float32",
)  # fmt: skip
SEVERAL = KvCacheCase(lengths=(200, 30), s_q=3, new=3, page=48, dtype="float16", softcap=15.0, **D64)
ENGINE: Arguments = {"cache_layout": "interleaved", "causal": True, "h_q": 8, "h_kv": 1}
MIXED = KvCacheCase(
    **LENGTHS, q_lengths=(1, 3, 2, 1, 130, 60), new_lengths=(1, 3, 2, 1, 9, 60), rotary=1.0, window=(200, 0),
    rotary_from=(9, 0, 4, 0, 30, 2), interleaved=False, alibi="requests",
)  # fmt: skip
CHUNKS = KvCacheCase(
    lengths=(300, 77, 5, -1, 600, 64), q_lengths=(300, 1, 5, 1, 130, 1), rows_around=3, **ENGINE
)
FEW: Arguments = {"lengths": (5, 0, -1, 140), "h_q": 4, "h_kv": 2}
FEW_ROWS: Arguments = {**FEW, "q_lengths": (1, 2, 1, 70)}
# Windows and padding that begin in the middle of a page.
TRIMMED: Arguments = {"lengths": (205, 43), "window": (37, 0), "leftpad": (9, 30), "h_q": 4, "h_kv": 2}
MANY: Arguments = {"lengths": (1, 400, 0, 33, 64, 1300) * 10, "h_q": 32, "h_kv": 8}
IN_PLACE = ("wide", "columns", "permuted")
ROWS = (*IN_PLACE, "unaligned", "odd")


def floats(case: KvCacheCase) -> tuple[str, ...]:
    """The arrays of floating point that a case has."""
    given = {
        "k": case.appends,
        "v": case.appends,
        "rotary_cos": case.rotary,
        "rotary_sin": case.rotary,
        "alibi_slopes": case.alibi,
        "attn_sink": case.sink,
    }
    return ("q", "k_cache", "v_cache", *(name for name, is_given in given.items() if is_given))


def without_new(arguments: Arguments) -> Arguments:
    """No new tokens, and nothing that goes with them."""
    names = ("k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_k_new", "rotary_seqlens")
    return {name: None for name in names if name in arguments}


KVCACHE = Operation(
    name="kvcache",
    make=make_kvcache_call,
    cases=(DECODE, SEVERAL),
    arrays=(
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "alibi_slopes", "attn_sink",
    ),
    floats=floats,
    small_cases=(
        KvCacheCase(lengths=(1,), h_q=1, h_kv=1),
        KvCacheCase(**FEW),
        KvCacheCase(**FEW, **D64, page=1, sink="float32"),
        KvCacheCase(**{**FEW, **ENGINE}, page=64, s_q=2),
        KvCacheCase(**FEW, page=12, alibi="requests", softcap=15.0, dtype="float16"),
        KvCacheCase(**TRIMMED),
        KvCacheCase(**TRIMMED, page=48, new=3, s_q=3, rotary=0.5),
        KvCacheCase(**FEW, new=1, causal=True, rotary=1.0, interleaved=False),
        KvCacheCase(**FEW, new=2, page=None, cache_layout="interleaved"),
        KvCacheCase(**FEW, d_qk=256, d_v=256),
        KvCacheCase(**FEW, d_qk=56, d_v=104, new=1),
        KvCacheCase(lengths=(2100, 5), h_q=2, h_kv=1, page=64, sink="bfloat16"),  # whose keys are split
        KvCacheCase(lengths=(2100, 5), h_q=2, h_kv=1, page=64, num_splits=1),
    ),
    kernels=("mha_",),
    rerun_cases=(
        KvCacheCase(**MANY, page=64),
        KvCacheCase(**MANY, new=1, rotary=1.0, causal=True),
        KvCacheCase(lengths=(8000,), h_q=32, h_kv=8, page=64),
    ),
    repeats=200,
    graph_cases=(replace(DECODE, room=600), replace(DECODE, room=600, page=None)),
    strides={
        "q": ROWS, "k": ROWS, "v": (*ROWS, "transposed"), "k_cache": IN_PLACE, "v_cache": IN_PLACE,
        "block_table": ("columns", "odd"),
    },
    odd_last=("q", "k", "v", "rotary_cos", "rotary_sin"),
    copied=("v",),
    ordered_like="q",
    out=slices,
    empty={
        "no query tokens": (lambda a: without("q", axis=1)(a) | without_new(a), {"out": 1, "lse": 2}),
    },
    bad={
        "scale 0": wrong_value("softmax_scale", 0.0),
        "softcap below 0": wrong_value("softcap", -1.0),
        "splits below 0": wrong_value("num_splits", -1),
        "v_cache of other heads": spoilt("v_cache", lambda x: x[..., :1, :]),
        "k of another dtype": spoilt("k", lambda x: x.half(), TypeError),
        "k without v": (ValueError, "v", lambda a: {"v": None}),
        "cos without sin": (ValueError, "rotary_sin", lambda a: {"rotary_sin": None}),
        "rotary without k": (ValueError, "rotary_cos", lambda a: {"k": None, "v": None}),
        "k without lengths": wrong_value("cache_seqlens", None),
        "no angles": (
            ValueError, "rotary_cos", lambda a: {name: a[name][:0] for name in ("rotary_cos", "rotary_sin")},
        ),
        "a row too few": spoilt("cache_seqlens", lambda x: x[:-1]),
        "lengths twice": (
            ValueError, "cu_seqlens_k", lambda a: {"cu_seqlens_k": a["cache_seqlens"].new_zeros(7)},
        ),
    },
    changes=kvcache_changes,
)  # fmt: skip

CONTIGUOUS = KvCacheCase(
    **LENGTHS, page=None, batch_idx=True, s_q=2, window=(200, 0), softcap=15.0, sink="bfloat16"
)
KVCACHE_ROWS = replace(
    KVCACHE,
    name="kvcache_rows",
    cases=(CONTIGUOUS,),
    arrays=("q", "k_cache", "v_cache", "cache_seqlens", "cache_batch_idx", "attn_sink"),
    small_cases=(
        KvCacheCase(**FEW, page=None, s_q=3, causal=True, batch_idx=True),
        KvCacheCase(**TRIMMED, page=None, cache_layout="interleaved", s_q=70),
    ),
    rerun_cases=(KvCacheCase(**MANY, page=None, s_q=5, window=(300, 0), sink="float32", **D64),),
    graph_cases=(replace(CONTIGUOUS, room=600),),
    strides={"q": ROWS, "k_cache": IN_PLACE, "v_cache": IN_PLACE},
    odd_last=("q",),
    copied=(),
    bad={
        "k_cache of fewer columns": spoilt("k_cache", lambda x: x[..., :-8]),
        "lengths twice": KVCACHE.bad["lengths twice"],
        "rotary without k": (
            ValueError, "rotary_cos", lambda a: dict.fromkeys(("rotary_cos", "rotary_sin"), a["q"][0, 0]),
        ),
    },
)  # fmt: skip

KVCACHE_VARLEN = replace(
    KVCACHE,
    name="kvcache_varlen",
    cases=(MIXED, CHUNKS),
    arrays=(
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "block_table",
        "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens", "alibi_slopes",
    ),
    small_cases=(
        KvCacheCase(**FEW_ROWS),
        KvCacheCase(**FEW_ROWS, rows_around=3, causal=True, page=None, batch_idx=True),
        KvCacheCase(**{**FEW_ROWS, **ENGINE}, lengths_as="bounds", page=32),
        KvCacheCase(**FEW_ROWS, new_lengths=(1, 2, 1, 30), causal=True, rotary=1.0),
        KvCacheCase(lengths=(40, 3, 130) * 30, q_lengths=(1, 0, 3) * 30, h_q=4, h_kv=4, **D64),
    ),
    rerun_cases=(KvCacheCase(**MANY, q_lengths=(1, 300, 0, 33, 1, 1) * 10, causal=True),),
    graph_cases=(replace(MIXED, room=700), replace(CHUNKS, room=700)),
    strides={"q": ROWS, "k_cache": IN_PLACE, "v_cache": IN_PLACE, "block_table": ("columns", "odd")},
    empty={"no query tokens": (lambda a: without("q")(a) | without_new(a), {"out": 0, "lse": 0})},
    bad={
        "scale 0": wrong_value("softmax_scale", 0.0),
        "rotary positions without rotary": (
            ValueError,
            "rotary_seqlens",
            lambda a: {"rotary_seqlens": a["cache_seqlens"], "rotary_cos": None, "rotary_sin": None},
        ),
    },
)  # fmt: skip

BYTES: Arguments = {"cache_dtype": FP8, "descales": True}
OF_BYTES = KvCacheCase(**LENGTHS, **BYTES, new=1, sink="float32", alibi="heads")
KVCACHE_FP8 = replace(
    KVCACHE,
    name="kvcache_fp8",
    cases=(
        OF_BYTES,
        KvCacheCase(**LENGTHS, **BYTES, new=3, s_q=3, dtype=FP8, causal=True, page=64),
    ),
    arrays=(
        "q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table", "k_descale", "v_descale",
        "alibi_slopes", "attn_sink",
    ),
    floats=lambda case: (
        *floats(case), "k_descale", "v_descale", *(["q_descale"] if case.dtype == FP8 else []),
    ),
    small_cases=(
        KvCacheCase(**FEW, **BYTES),
        KvCacheCase(**FEW, **BYTES, page=None, s_q=3, causal=True, dtype="float16", **D64),
        KvCacheCase(**FEW, **BYTES, page=12, new=2, dtype=FP8, cache_layout="interleaved"),
        KvCacheCase(**FEW_ROWS, cache_dtype=FP8, page=1, window=(37, 0), sink="bfloat16"),
        KvCacheCase(**FEW, **BYTES, d_qk=256, d_v=256, page=64),
        KvCacheCase(lengths=(2100, 5), h_q=2, h_kv=1, page=64, **BYTES, dtype=FP8),
    ),
    rerun_cases=(KvCacheCase(**MANY, **BYTES, page=64), KvCacheCase(**MANY, **BYTES, dtype=FP8, new=1)),
    graph_cases=(replace(OF_BYTES, room=600),),
    strides={"q": IN_PLACE, "k": IN_PLACE, "v": IN_PLACE, "k_cache": IN_PLACE, "v_cache": IN_PLACE},
    any_framework=False,  # CuPy has no FP8
    odd_last=("q", "q_descale", "k_descale", "v_descale"),
    copied=(),
    bad={
        "scale 0": wrong_value("softmax_scale", 0.0),
        "k of another dtype": spoilt("k", lambda x: x.half(), TypeError),
        "factors of query heads": spoilt("k_descale", lambda x: x.repeat(1, 4)),
    },
)  # fmt: skip
