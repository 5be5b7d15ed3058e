"""Dense attention: calls of a case's inputs, and its entries of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import rawmla
from kit.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs

from .core import Arguments, Call, Operation, assert_same_bits, slices, spoilt, without, wrong_value
from .memory import CANARY, inner, padded_shape

# ---- calls


def named_arguments(inputs: MhaInputs) -> tuple[str, Arguments]:
    """The public function of a case, and its arguments by name."""
    case, options = inputs.case, inputs.options()
    if inputs.cu_seqlens_q is None:
        return "flash_attn_func", {"q": inputs.q, "k": inputs.k, "v": inputs.v, **options}
    used = {"seqused_q": inputs.seqused_q, "seqused_k": inputs.seqused_k}
    segments = {
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "max_seqlen_q": max(case.q_lengths or (0,)),
        "max_seqlen_k": max(case.k_lengths or (0,)),
    }
    if not case.packed:
        given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **segments}
        return "flash_attn_varlen_func", {**given, **used, **options}
    if not case.packed.endswith("4"):
        options["head_dim_qk"] = case.d_qk
    if case.packed.startswith("qkv"):
        given = {
            "qkv": inputs.parts,
            "cu_seqlens": inputs.cu_seqlens_q,
            "max_seqlen": segments["max_seqlen_q"],
        }
        return "flash_attn_varlen_qkvpacked_func", {**given, **used, **options}
    given = {"q": inputs.q, "kv": inputs.parts, **segments}
    return "flash_attn_varlen_kvpacked_func", {**given, **used, **options}


def function_and_arguments(inputs: MhaInputs, **more: Any) -> tuple[Any, tuple[Any, ...], Arguments]:
    """The public function of a case, and what it is called with; `more` are further keywords."""
    name, arguments = named_arguments(inputs)
    return getattr(rawmla, name), (), {**arguments, **more}


def attend(inputs: MhaInputs, **more: Any) -> tuple[Any, Any]:
    """out and lse."""
    out, lse = dense_call(inputs).run(**more)
    return out, lse


def buffer_like(result: Any, canary: float = CANARY) -> tuple[Any, Any]:
    """A buffer of canaries, and a slice of it in all dimensions, full of NaN, like a result."""
    buffer = result.new_full(padded_shape(result, slices(result)), canary)
    given = inner(buffer, result, slices(result))
    given.fill_(float("nan"))
    return buffer, given


def out_buffer(inputs: Any) -> tuple[Any, Any]:
    """A buffer of canaries, and a slice of it that can be given as `out`."""
    return buffer_like(inputs.q.new_empty((*inputs.q.shape[:-1], inputs.case.d_v)))


def assert_untouched_around(buffer: Any, given: Any) -> None:
    """Raise if anything but `given` was written; spoils `given`."""
    given.fill_(CANARY)
    assert bool((buffer == CANARY).all()), "the call wrote outside `out`"


def assert_same_results(name: str, inputs: MhaInputs, got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    """Raise unless the rows of requests have the same bits."""
    rows = covered_rows(inputs)
    for result, one, wanted in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(f"{name}: {inputs.case.id} {result}", one[rows], wanted[rows])


# ---- entries


def dense_call(inputs: MhaInputs) -> Call:
    """The call of a case's inputs."""
    function, arguments = named_arguments(inputs)
    return Call(
        function,
        arguments,
        ("out", "lse"),
        lambda got: check_mha(inputs, (got[0], got[1])),
        inputs,
        covered=lambda: covered_rows(inputs),
    )


def make_dense_call(case: MhaCase, device: str = "cuda") -> Call:
    """The call of a case."""
    return dense_call(make_mha_inputs(case, device))


def renew(array: Any, seed: int) -> None:
    """Other random numbers in place, the same on every device; NaN stays where it is."""
    numbers = torch.randn(array.shape, generator=torch.Generator().manual_seed(seed)).to(array)
    array.copy_(torch.where(array.isnan(), array, numbers))


def changes_of_numbers(arguments: Arguments, softcap: float) -> Iterator[int]:
    """Change q, k, v, sinks and slopes in place, several times."""
    for turn in range(1, 4):
        for number, name in enumerate(("q", "k", "v")):
            renew(arguments[name], 10 * turn + number)
        if softcap:
            arguments["q"].mul_(softcap / 4)
        if arguments["attn_sink"] is not None:
            arguments["attn_sink"].add_(1)
        if arguments["alibi_slopes"] is not None:
            arguments["alibi_slopes"].mul_(0.5)
        yield turn


def changes_of_segments(inputs: MhaInputs) -> Iterator[None]:
    """Change where requests begin and how long they are, in place, in several ways."""
    case, sides = inputs.case, ("q", "k")
    bounds = {side: getattr(inputs, f"cu_seqlens_{side}").clone() for side in sides}
    used = {side: getattr(inputs, f"seqused_{side}") for side in sides}
    for turn in range(1, 4):  # shorter requests, which begin elsewhere
        for side, first in zip(sides, (turn, 5 - turn), strict=True):
            lengths = bounds[side].diff() // turn
            bound = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            getattr(inputs, f"cu_seqlens_{side}").copy_(first + bound)
            if used[side] is not None:
                used[side].copy_(lengths * turn // 3)
        yield
    for side in sides:  # no tokens at all, then one request with all of them
        getattr(inputs, f"cu_seqlens_{side}").zero_()
    yield
    for side, lengths in zip(sides, (case.q_lengths, case.k_lengths), strict=True):
        assert lengths is not None
        getattr(inputs, f"cu_seqlens_{side}")[1:] = max(lengths)
        if used[side] is not None:
            used[side].zero_()[0] = 250
    yield


def dense_changes(call: Call) -> Iterator[None]:
    """Change arrays, then segments."""
    yield
    arguments = {"attn_sink": None, "alibi_slopes": None, **vars(call.inputs)}
    for _ in changes_of_numbers(arguments, call.inputs.case.softcap):
        yield
    if "cu_seqlens_k" in call.arguments:
        yield from changes_of_segments(call.inputs)


def floats_of(arrays: tuple[str, ...]) -> Callable[[MhaCase], tuple[str, ...]]:
    """A function that gives the names of the floating-point arrays that a case has."""

    def floats(case: MhaCase) -> tuple[str, ...]:
        absent = {"attn_sink": case.sink is None, "alibi_slopes": case.alibi is None}
        return tuple(name for name in arrays if not absent.get(name, False))

    return floats


D64: Arguments = {"d_qk": 64, "d_v": 64}
D256: Arguments = {"d_qk": 256, "d_v": 256}
PAIR: Arguments = {"h_q": 2, "h_kv": 2}
ONE_KV: Arguments = {"h_q": 2, "h_kv": 1}
RAGGED: Arguments = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
SAME: Arguments = {"q_lengths": RAGGED["q_lengths"], "k_lengths": RAGGED["q_lengths"]}
USED: Arguments = {"q_used": (290, 0, 0, 77, 3, 60), "k_used": (250, 90, 0, 5, 129, 513)}
BATCH = MhaCase(b=3, s_q=150, s_k=200, causal=True, sink="float32", alibi="heads", layout="heads")
SEGMENTS = MhaCase(
    **RAGGED, **USED, rows_around=9, layout="slice", window=(100, 3), alibi="requests", sink="bfloat16"
)
IN_PLACE = replace(SEGMENTS, gap=0.0, layout="plain")  # its requests may begin anywhere
RERUNS = ((1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (257, 257), (2048, 2048))
MANY: Arguments = {"q_lengths": (1, 400, 0, 33, 64, 130) * 10, "k_lengths": (300, 401, 90, 0, 64, 17) * 10}
SMALL: Arguments = {"q_lengths": (5, 0, 1, 140), "k_lengths": (3, 7, 0, 270)}
SMALL_SAME: Arguments = {"q_lengths": (5, 0, 1, 140), "k_lengths": (5, 0, 1, 140), "h_q": 2, "h_kv": 2}
ARRAYS = ("q", "k", "v", "attn_sink", "alibi_slopes")
OF_SEGMENTS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
ROWS = ("wide", "columns", "permuted", "unaligned", "odd")
BAD = {
    "scale 0": wrong_value("softmax_scale", 0.0),
    "softcap below 0": wrong_value("softcap", -1.0),
    "dropout": wrong_value("dropout_p", 0.1),
}
UNPACKED_BAD = {
    "v of other heads": spoilt("v", lambda x: x[..., :1, :]),
    "k of another dtype": spoilt("k", lambda x: x.half(), TypeError),
}

MHA = Operation(
    name="mha",
    make=make_dense_call,
    cases=(BATCH, MhaCase(b=2, s_q=70, s_k=300, d_qk=192, softcap=15.0, dtype="float16")),
    arrays=ARRAYS,
    floats=floats_of(ARRAYS),
    small_cases=(
        MhaCase(b=1, s_q=1, s_k=1, h_q=1, h_kv=1),
        MhaCase(b=2, s_q=150, s_k=300, **PAIR),
        MhaCase(b=2, s_q=150, s_k=300, **PAIR, causal=True, layout="heads"),
        MhaCase(b=1, s_q=150, s_k=40, **PAIR, causal=True),
        MhaCase(b=1, s_q=300, s_k=400, **ONE_KV, window=(30, 5), layout="slice"),
        MhaCase(b=1, s_q=140, s_k=270, **PAIR, softcap=15.0, dtype="float16"),
        MhaCase(b=2, s_q=140, s_k=270, **PAIR, alibi="requests"),
        MhaCase(
            b=1, s_q=70, s_k=140, h_q=3, h_kv=1, window=(40, -1), softcap=15.0, alibi="heads", sink="infinite"
        ),
        MhaCase(b=1, s_q=70, s_k=140, sink="float32", causal=True),
        MhaCase(b=1, s_q=70, s_k=140, sink="bfloat16"),
        MhaCase(b=3, s_q=3, s_k=150, h_q=8, h_kv=1, causal=True),
        MhaCase(b=1, s_q=200, s_k=300, **PAIR, **D64, causal=True),
        MhaCase(b=1, s_q=140, s_k=270, **PAIR, d_qk=192, d_v=128, causal=True),
        MhaCase(b=1, s_q=140, s_k=270, **PAIR, **D256),
        MhaCase(b=1, s_q=140, s_k=270, **PAIR, d_qk=96, d_v=96, causal=True, dtype="float16"),
        MhaCase(b=1, s_q=200, s_k=300, **ONE_KV, **D64, softcap=15.0, alibi="heads"),
        MhaCase(b=2, s_q=70, s_k=90, **PAIR, d_qk=59, d_v=111, layout="slice"),
        MhaCase(b=1, s_q=40, s_k=2100, h_q=1, h_kv=1, causal=True, sink="float32"),  # whose keys are split
        # Tiles that a CTA takes one after the other, by turns, or causal ones from the counter.
        MhaCase(b=150, s_q=5, s_k=130, **PAIR),
        MhaCase(b=150, s_q=5, s_k=130, **PAIR, causal=True),
    ),
    kernels=("mha_forward", "mha_combine"),
    rerun_cases=(
        *(
            MhaCase(b=60, s_q=s_q, s_k=s_k, h_kv=4, **D64, causal=causal)
            for causal in (False, True)
            for s_q, s_k in RERUNS
        ),
        MhaCase(b=60, s_q=257, s_k=257, h_kv=1, causal=True),
        MhaCase(b=60, s_q=3, s_k=799, h_kv=1),
        MhaCase(b=60, s_q=97, s_k=300, d_qk=192, sink="float32", causal=True),
        MhaCase(b=60, s_q=257, s_k=97, **D256),
        MhaCase(b=60, s_q=257, s_k=257, window=(50, 3), softcap=15.0, alibi="requests", dtype="float16"),
    ),
    repeats=1000,
    graph_cases=(replace(BATCH, gap=0.0),),
    strides={"q": ROWS, "k": ROWS, "v": (*ROWS, "transposed")},
    odd_last=("q", "k", "v"),
    copied=("v",),
    ordered_like="q",
    grads=("q", "k", "v", "attn_sink"),
    out=slices,
    empty={
        "no requests": (without("q", "k", "v"), {"out": 0, "lse": 0}),
        "no query tokens": (without("q", axis=1), {"out": 1, "lse": 2}),
    },
    bad={**BAD, **UNPACKED_BAD},
    changes=dense_changes,
)

MHA_VARLEN = replace(
    MHA,
    name="mha_varlen",
    cases=(SEGMENTS, MhaCase(**RAGGED, h_q=8, h_kv=1, causal=True)),
    arrays=(*ARRAYS, *OF_SEGMENTS),
    floats=floats_of(ARRAYS),
    small_cases=(
        MhaCase(**SMALL, causal=True),
        MhaCase(**SMALL, q_used=(2, 0, 1, 100), k_used=(3, 0, 0, 141), rows_around=3, layout="slice"),
        MhaCase(**SMALL, window=(20, 3), k_used=(1, 7, 0, 269)),
        MhaCase(q_lengths=(1, 0, 2) * 50, k_lengths=(3, 1, 2) * 50, h_q=4, h_kv=2),
        MhaCase(**SMALL, h_q=8, h_kv=2, causal=True),
        MhaCase(**SMALL, **D64, k_used=(3, 5, 0, 200)),
        MhaCase(**SMALL, d_qk=59, d_v=111),
    ),
    kernels=("mha_forward",),
    rerun_cases=(MhaCase(**MANY, causal=True),),
    graph_cases=(IN_PLACE, replace(IN_PLACE, causal=True, window=(-1, -1))),
    empty={"no query tokens": (without("q"), {"out": 0, "lse": 0})},
)

MHA_QKV = replace(
    MHA_VARLEN,
    name="mha_qkvpacked",
    cases=(MhaCase(**SAME, packed="qkv", d_qk=192, h_kv=4, causal=True),),
    arrays=("qkv", "cu_seqlens"),
    floats=floats_of(("qkv",)),
    small_cases=(
        MhaCase(**SMALL_SAME, packed="qkv", d_qk=192, causal=True),
        MhaCase(**SMALL_SAME, packed="qkv4"),
    ),
    rerun_cases=(),
    repeats=20,
    graph_cases=(MhaCase(**SAME, packed="qkv", d_qk=192, h_kv=4, causal=True, gap=0.0),),
    strides={"qkv": ("wide", "columns")},
    odd_last=("qkv",),
    copied=(),
    ordered_like="qkv",
    grads=("qkv",),
    empty={"no tokens": (without("qkv"), {"out": 0, "lse": 0})},
    bad=BAD,
)

MHA_KV = replace(
    MHA_QKV,
    name="mha_kvpacked",
    cases=(MhaCase(**RAGGED, packed="kv4", **D64, dtype="float16"),),
    arrays=("q", "kv", "cu_seqlens_q", "cu_seqlens_k"),
    floats=floats_of(("q", "kv")),
    small_cases=(MhaCase(**SMALL, packed="kv4", **D64),),
    graph_cases=(MhaCase(**RAGGED, packed="kv4", **D64, rows_around=9, gap=0.0),),
    strides={"q": ("wide", "columns"), "kv": ("wide", "columns")},
    odd_last=("q", "kv"),
    ordered_like="q",
    grads=("q", "kv"),
    empty={"no query tokens": (without("q"), {"out": 0, "lse": 0})},
)
