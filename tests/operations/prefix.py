"""Prefix prefill: calls of a case's inputs, into buffers of canaries, and its entries of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch

import rawmla
from kit.prefix import PrefixCase, PrefixInputs, check_prefix, make_prefix_inputs, written_rows

from .core import Arguments, Call, Operation, Pads, wrong_value

CANARY = 0x5A  # finite in every dtype of o

# ---- calls


def _bytes_of(array: Any) -> Any:
    """All memory of an array, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=array.device).set_(array.untyped_storage())


def dtype_of_o(inputs: PrefixInputs) -> Any:
    """The dtype that o has to have."""
    case = inputs.case
    if case.out_scale is None:
        return inputs.q.dtype
    return getattr(torch, "float8_e4m3fn" if case.bytes_dtype == "float8" else case.bytes_dtype)


class Target:
    """An o, with canaries around and between its rows, and in those that are not to be written; the others
    are NaN.

    `apart` leaves room between tokens and heads, and before the first.
    """

    def __init__(self, inputs: PrefixInputs, *, apart: bool = True) -> None:
        tokens, heads, d = inputs.q.shape
        columns = -(-d // 16) * 16 + (16 if apart else 0)
        first = 16 if apart else 0
        shape = (tokens + 2 * apart, heads + apart, columns)
        self._whole = torch.empty(shape, dtype=dtype_of_o(inputs), device=inputs.q.device)
        _bytes_of(self._whole).fill_(CANARY)
        rows = slice(1, 1 + tokens) if apart else slice(None)
        self.o = self._whole[rows, :heads, first : first + d]
        self._written = written_rows(inputs)
        self._fill(0xFF)

    def _fill(self, byte: int) -> None:
        """The rows that are written; 0xff is NaN in every dtype."""
        if self.o.element_size() == 1:
            self.o.view(torch.uint8)[self._written] = byte
        else:
            self.o.view(torch.int16)[self._written] = -1 if byte == 0xFF else byte << 8 | byte

    def assert_untouched_around(self) -> None:
        """Raise if anything but the rows to be written was; spoils these."""
        self._fill(CANARY)
        assert bool((_bytes_of(self._whole) == CANARY).all()), "the call wrote outside the rows of o"


def attend(inputs: PrefixInputs, o: Any = None, **changes: Any) -> Any:
    """o of a call, which is a contiguous one of its own if none is given."""
    if o is None:
        o = Target(inputs, apart=False).o
    result = rawmla.context_attention_fwd(**{**inputs.keywords(o), **changes})
    assert result is o
    return o


def checked(inputs: PrefixInputs, *, apart: bool = True, want: Any = None, **changes: Any) -> Any:
    """The rows that a call wrote, after they and their surroundings were looked at."""
    target = Target(inputs, apart=apart)
    attend(inputs, target.o, **changes)
    check_prefix(inputs, target.o, want)
    if target.o.element_size() > 1:
        written = target.o[written_rows(inputs)]
    else:
        written = target.o.view(torch.uint8)[written_rows(inputs)]
    target.assert_untouched_around()
    return written


def readdressed(inputs: PrefixInputs, k_cache: Any) -> Any:
    """The table for the same blocks in another cache of the same strides; garbage stays garbage."""
    table = inputs.b_loc
    if inputs.case.table != "pointers":
        return table
    return torch.where(table > 0, table + (k_cache.data_ptr() - inputs.k_cache.data_ptr()), table)


def run_cases(cases: Any) -> None:
    """Check every case, and go on after a mismatch, so that one run shows the whole pattern."""
    failures: list[str] = []
    case: PrefixCase
    for case in cases:
        try:
            checked(make_prefix_inputs(case))
            torch.cuda.synchronize()
        except AssertionError as error:
            failures.append(str(error) if case.id in str(error) else f"{case.id}: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"


# ---- entries


class PrefixCall(Call):
    """A call whose table may name blocks by their addresses, which change with the cache."""

    def mapped(self, change: Callable[[Any], Any], inside: Callable[[Any], Any] | None = None) -> Call:
        """See `Call.mapped`."""
        made = super().mapped(change, inside)
        cache, table = made.arguments["k_cache"], made.arguments["b_loc"]
        if self.inputs.case.table == "pointers" and isinstance(cache, torch.Tensor):
            moved = cache.data_ptr() - self.arguments["k_cache"].data_ptr()
            table.copy_(torch.where(table > 0, table + moved, table))
        return made


def make_prefix_call(case: PrefixCase, device: str = "cuda") -> Call:
    """The call of a case."""
    inputs = make_prefix_inputs(case, device)
    arguments = inputs.keywords(None)
    del arguments["o"]
    if case.room:
        arguments["max_input_len"] = case.room

    def nan_o() -> Any:
        o = torch.empty(inputs.q.shape, dtype=dtype_of_o(inputs), device=device)
        _bytes_of(o).fill_(0xFF)
        return o

    def check(got: tuple[Any, ...]) -> None:
        check_prefix(inputs, got[0])
        others = torch.ones(len(inputs.q), dtype=torch.bool, device=got[0].device)
        others[written_rows(inputs).to(got[0].device)] = False
        assert bool((got[0].view(torch.uint8)[others] == 0xFF).all()), "the call wrote rows of no request"

    return PrefixCall("context_attention_fwd", arguments, ("o",), check, inputs, written="o", fresh=nan_o)


BATCHES = (
    ((64, 130, 77, 1, 0, 300), (0, 600, 16, 500, 77, 3)),
    ((572, 0, 0, 0, 0, 0), (300, 200, 0, 0, 0, 0)),
    ((95, 95, 95, 95, 96, 96), (0, 0, 0, 0, 0, 0)),
    ((1, 1, 1, 1, 1, 567), (600, 1, 15, 16, 17, 33)),
)
"""Lengths and contexts of as many tokens as those of `LENGTHS`."""


def prefix_changes(call: Call) -> Iterator[None]:
    """Everything that the arrays hold, from other calls of the same sizes."""
    inputs, case = call.inputs, call.inputs.case
    yield
    for turn, (lengths, contexts) in enumerate(BATCHES, 1):
        scales = {"k_scale": 0.2 * (turn + 1), "v_scale": 0.4 * (turn + 1)} if case.device_scales else {}
        if case.device_scales and case.out_scale is not None:
            scales["out_scale"] = 0.01 * (turn + 1)
        other = make_prefix_inputs(
            replace(case, query_lengths=lengths, contexts=contexts, seed=turn, **scales), inputs.q.device
        )
        other.b_loc = readdressed(other, inputs.k_cache)
        for name in (field.name for field in fields(inputs)):
            if isinstance(getattr(inputs, name), torch.Tensor):
                getattr(inputs, name).copy_(getattr(other, name))
        yield
    inputs.b_start_loc.zero_()  # no tokens
    yield


def around_o(o: Any) -> Pads:
    """Room around o, whose rows begin at multiples of 16 bytes."""
    return ((1, 1), (0, 1), (16, 16 + -o.shape[-1] % 16))


LENGTHS: Arguments = {"query_lengths": (300, 0, 1, 77, 130, 64), "contexts": (257, 90, 40, 0, 131, 513)}
BY_TMA = PrefixCase(**LENGTHS, layout="slice", window=100, sinks="float32", padded=True)
GATHERED = PrefixCase(
    **LENGTHS, own_cached=True, block_size=12, table="int64", dtype="float16", causal=False, skip_decode=True
)
FP8_KIND: Arguments = {"kv_cache_dtype": "fp8_e4m3", "bytes_dtype": "uint8", "x": 16}
FP8 = PrefixCase(
    **LENGTHS, **FP8_KIND, k_scale=0.7, v_scale=1.3, out_scale=0.02, device_scales=True, alibi=True
)
MANY: Arguments = {
    "query_lengths": (100, 1, 0, 257, 16, 128, 300),
    "contexts": (333, 40, 100, 0, 1000, 512, 77),
    "h_q": 32,
    "h_kv": 8,
}
LONG: Arguments = {"query_lengths": (1024,) * 8, "contexts": (2048,) * 8, "h_q": 32, "h_kv": 8}
DECODES: Arguments = {"query_lengths": (1,) * 300, "contexts": (200, 30, 0) * 100, "h_q": 32, "h_kv": 4}
FEW: Arguments = {"query_lengths": (5, 0, 1, 140), "contexts": (3, 7, 90, 270)}
# Windows that begin in the middle of a page, and contexts that end there: values are trimmed at both ends.
TRIMMED: Arguments = {"query_lengths": (20, 3), "contexts": (205, 43), "window": 37}
TILES: Arguments = {"query_lengths": (5, 1, 3) * 50, "contexts": (40, 0, 130) * 50, "h_q": 1, "h_kv": 1}
SMALL_FP8: Arguments = {**FP8_KIND, "v_scale": 0.5}
WITHOUT_OWN: Arguments = {"query_lengths": (6, 4, 40), "contexts": (-2, -4, -1), "own_cached": True}
LISTS = ("b_loc", "b_start_loc", "b_seq_len")
ROWS = ("wide", "columns", "permuted", "unaligned", "odd")


def prefix_operation(
    name: str,
    case: PrefixCase,
    arrays: tuple[str, ...],
    small_cases: tuple[PrefixCase, ...],
    rerun_cases: tuple[PrefixCase, ...],
    kernels: tuple[str, ...],
) -> Operation:
    """Prefix prefill over one kind of cache, whose first case has these arrays."""
    floats = tuple(x for x in arrays if x not in LISTS and (case.float8 is None or not x.endswith("_cache")))
    roomy = replace(case, room=1200)
    return Operation(
        name=name,
        make=make_prefix_call,
        cases=(case,),
        arrays=arrays,
        floats=lambda case: floats,
        small_cases=small_cases,
        kernels=kernels,
        rerun_cases=rerun_cases,
        repeats=200,
        graph_cases=(roomy, replace(roomy, table="pointers")),
        strides={"q": ROWS, **({"v": ("transposed",)} if "v" in arrays else {}), "b_loc": ("columns", "odd")},
        odd_last=("q", "k", "v", "k_scale", "v_scale", "fp8_out_scale"),
        copied=("v",) if "v" in arrays else (),
        any_integer=("b_loc",),
        out=around_o,
        outputs=("o",),
        empty={
            "no query tokens": (
                lambda a: {x: None if a[x] is None else a[x][:0] for x in ("q", "k", "v", "o")},
                {"o": 0},
            )
        },
        bad={
            "scale 0": wrong_value("sm_scale", 0.0),
            "another cache": wrong_value("kv_cache_dtype", "fp4"),
            "one length too few": (ValueError, "b_start_loc", lambda a: {"b_seq_len": a["b_seq_len"][:-1]}),
        },
        changes=prefix_changes,
        writes=True,
    )


PREFIX = prefix_operation(
    "prefix",
    BY_TMA,
    ("q", "k", "v", "k_cache", "v_cache", *LISTS, "sinks"),
    (
        PrefixCase((1,), (1,), h_q=1, h_kv=1),
        PrefixCase((1,), (0,), h_q=1, h_kv=1),
        PrefixCase(**FEW),
        PrefixCase(**FEW, rows_around=2, layout="slice", padded=True, block_size=48, sinks="infinite"),
        PrefixCase(**FEW, own_cached=True, causal=False, h_q=3, h_kv=1),
        PrefixCase(**WITHOUT_OWN),
        PrefixCase(**FEW, skip_decode=True, table="pointers", h_q=8, h_kv=1),
        PrefixCase(**TRIMMED),
        PrefixCase(**TRIMMED, own_cached=True, padded=True),
        PrefixCase(**FEW, alibi=True, sinks="bfloat16", table="int64"),
        PrefixCase(**FEW, out_scale=0.02, rows_around=2, bytes_dtype="uint8"),
        PrefixCase(**FEW, d=256, h_q=2, h_kv=2),
        PrefixCase(**FEW, d=24, h_q=2, h_kv=2, dtype="float16"),
        PrefixCase(**TILES),
    ),
    (
        PrefixCase(**LONG),
        PrefixCase(**MANY),
        PrefixCase(**MANY, window=100, sinks="float32"),
        PrefixCase(**MANY, block_size=544, causal=False),
        PrefixCase(**MANY, out_scale=0.02, bytes_dtype="uint8"),
        PrefixCase(**DECODES),
        PrefixCase(**MANY, d=256),
    ),
    ("mha_forward",),
)
PREFIX_GATHERED = prefix_operation(
    "prefix_gathered",
    GATHERED,
    ("q", "k_cache", "v_cache", *LISTS),
    (
        PrefixCase((1,), (1,), h_q=1, h_kv=1, x=16),
        PrefixCase(**FEW, x=16, rows_around=2, layout="slice", padded=True, table="pointers"),
        PrefixCase(**FEW, block_size=1, own_cached=True, causal=False, h_q=3, h_kv=1),
        PrefixCase(**FEW, block_size=12, pack=4, skip_decode=True, sinks="float32"),
        PrefixCase(**WITHOUT_OWN, x=16),
        PrefixCase(**TRIMMED, block_size=7),
        PrefixCase(**TRIMMED, x=16, own_cached=True, padded=True),
        PrefixCase(**FEW, d=256, h_q=2, h_kv=2, x=16),
        PrefixCase(**FEW, d=17, x=1, h_q=2, h_kv=2, padded=True),
        PrefixCase(**TILES, x=16),
    ),
    (
        PrefixCase(**LONG, x=16),
        PrefixCase(**MANY, x=16, table="pointers"),
        PrefixCase(**MANY, window=100, x=16, block_size=7, own_cached=True),
        PrefixCase(**DECODES, x=16),
        PrefixCase(**MANY, d=256, x=16),
    ),
    ("mha_forward",),
)
PREFIX_FP8 = prefix_operation(
    "prefix_fp8",
    FP8,
    ("q", "k", "v", "k_cache", "v_cache", *LISTS, "k_scale", "v_scale", "alibi_slopes", "fp8_out_scale"),
    (
        PrefixCase(**FEW, **SMALL_FP8),
        PrefixCase(**FEW, **{**SMALL_FP8, "x": 8}, block_size=1, table="int64", padded=True),
        PrefixCase(**TRIMMED, **SMALL_FP8, device_scales=True),
        PrefixCase(**FEW, **SMALL_FP8, own_cached=True, out_scale=0.02, device_scales=True, skip_decode=True),
        PrefixCase(**FEW, **{**SMALL_FP8, "kv_cache_dtype": "fp8_e5m2"}, alibi=True, pack=8),
        PrefixCase(**TILES, **SMALL_FP8),
    ),
    (PrefixCase(**LONG, **FP8_KIND), PrefixCase(**{**MANY, "h_kv": 32}, **FP8_KIND, out_scale=0.02)),
    ("mha_forward",),
)
