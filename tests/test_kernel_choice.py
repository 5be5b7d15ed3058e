"""What chooses a kernel: dtype, head dimensions (in steps of 32), flags and the text of functions; in flex
attention also whether query heads share tiles. Everything else shares one: numbers, lengths, heads, strides,
tables, and tensors that functions read.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from kit.flex import FlexCase, make_flex_inputs  # noqa: E402
from kit.mha import MhaCase  # noqa: E402
from kit.prefix import PrefixCase  # noqa: E402
from operations import dense, dense_backward, flex, flex_backward, prefix  # noqa: E402
from operations.dense_backward import BackwardCase  # noqa: E402
from rawmla.kernels.mha_decode import teams_of  # noqa: E402

if TYPE_CHECKING:
    from emulator import Emulator


@pytest.fixture
def kernels(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels that calls ask for; none is built or run."""
    from rawmla import jit

    asked: set[Any] = set()

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def get_kernel(spec: Any, *_: Any, **__: Any) -> Any:
        asked.add(spec)
        prepared = SimpleNamespace(launch=nothing)
        return SimpleNamespace(spec=spec, device=0, launch=nothing, prepare=lambda *_, **__: prepared)

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    return asked


Groups = list[tuple[list[Any], int]]
"""Calls, made one group after the other, and how many kernels were asked for after each."""
SIZES: dict[str, Any] = {"s_q": 70, "s_k": 90}
SHAPES: list[dict[str, Any]] = [
    {"b": 1, "s_q": 1, "s_k": 1, "h_q": 1, "h_kv": 1},
    {"b": 3, "s_q": 150, "s_k": 300, "h_q": 8, "h_kv": 2, "layout": "slice"},
    {"b": 2, "s_q": 70, "s_k": 3, "h_q": 6, "h_kv": 6, "layout": "heads"},
    {"b": 40, "s_q": 5, "s_k": 200, "h_q": 32, "h_kv": 1},
]
OF_CAUSAL: list[dict[str, Any]] = [
    {"causal": True, "softmax_scale": 0.3, "sink": "bfloat16", "d_qk": 111, "d_v": 97},
    {"window": (-1, 9), "sink": "float32", "d_qk": 104, "d_v": 128},
]
SHORT: dict[str, Any] = {"query_lengths": (40, 1, 0), "contexts": (70, 9, 3)}
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
OF_PREFIX: list[list[dict[str, Any]]] = [
    [  # by TMA
        {"block_size": 32, "h_q": 8, "h_kv": 1, "table": "int64", "causal": False},
        {"block_size": 544, "h_q": 5, "h_kv": 5, "d": 104, "table": "pointers", "own_cached": True},
        {"padded": True, "layout": "slice", "skip_decode": True, "sm_scale": 0.3, "sinks": "bfloat16"},
        {"pack": 16, "sinks": "float32", "query_lengths": (1,) * 300, "contexts": (5,) * 300},
    ],
    [  # gathered
        {"x": 16},
        {"block_size": 1},
        {"block_size": 12},
        {"pack": 4},
        {"d": 111, "x": 1},
        {"x": 128, "block_size": 544, "table": "pointers", "own_cached": True},
    ],
    [
        {"kv_cache_dtype": "fp8", "bytes_dtype": "uint8"},
        {**FP8, "x": 16, "k_scale": 3.0, "device_scales": True},
        {**FP8, "block_size": 7, "bytes_dtype": "int8"},
    ],
    [{"window": 1}, {"window": 100, "causal": False}, {"window": 10**6}],
]
BASE = FlexCase(s_q=70, s_k=90, score="alibi table", mask="window")
OF_FLEX = (
    BASE,
    replace(BASE, b=5, h_q=12, h_kv=3, s_q=128, s_k=260, layout="slice"),
    replace(BASE, b=3, b_kv=1, s_q=1, s_k=300, layout="tokens"),
    replace(BASE, d_qk=59, d_v=40, scale=0.3, seed=3),
    replace(BASE, block=(256, 128), separate=False),
    replace(BASE, h_q=40, h_kv=40),
)


def assert_counts(kernels: set[Any], groups: Groups) -> None:
    kernels.clear()
    for calls, count in groups:
        for call in calls:
            call.run()
        assert len(kernels) == count, sorted(spec.label for spec in kernels)


def test_dense_attention(kernels: set[Any]) -> None:
    """The kernel that combines splits is loaded with the first."""

    def made(*options: dict[str, Any]) -> list[Any]:
        return [dense.make_dense_call(MhaCase(**one), "cpu") for one in options]

    segments = [
        {**dense.RAGGED},
        {**dense.RAGGED, **dense.USED, "rows_around": 9, "layout": "slice", "sink": "bfloat16"},
        {**dense.SAME, "packed": "qkv", "h_kv": 4},
    ]
    windows = [{"b": n + 1, **SIZES, "window": (left, n - 1)} for n, left in enumerate((0, 5, 100, 1000))]
    softcaps = [{**SIZES, "softcap": softcap} for softcap in (1.0, 15.0, 50.0)]
    plain = made(*SHAPES, *({**SIZES, **one} for one in OF_CAUSAL), *segments)
    assert_counts(kernels, [(plain, 2), (made(*windows), 3), (made(*softcaps), 4)])


def test_prefix_prefill(kernels: set[Any]) -> None:
    """Also how pages lie chooses."""
    for count, group in enumerate(OF_PREFIX, start=1):
        for options in group:
            prefix.make_prefix_call(PrefixCase(**{**SHORT, **options}), "cpu").run()
        labels = [spec.label for spec in kernels if spec.name == "mha_forward"]
        assert len(labels) == count, labels


def test_flex_attention(kernels: set[Any]) -> None:
    """A combine, too. The function that hides small blocks is another mask; two kernels make its lists."""
    for case in OF_FLEX:
        for _ in range(2):
            flex.attend(make_flex_inputs(case, "cpu"))
    assert len(kernels) == 2
    for case in (replace(BASE, block=(64, 64)), replace(BASE, s_q=300, block=(96, 32))):
        flex.attend(make_flex_inputs(case, "cpu"))
    assert len(kernels) == 5
    flex.attend(make_flex_inputs(BASE, "cpu"), max_scores=True)
    assert len(kernels) == 6
    few = replace(BASE, s_q=5, h_kv=1)
    for case in (few, replace(few, s_q=140, h_q=64, h_kv=8), replace(few, h_q=64, b=3)):
        flex.attend(make_flex_inputs(case, "cpu"))
    assert len(kernels) == 7
    for case in (replace(few, h_q=3), replace(few, h_q=128)):  # no power of two, too many
        flex.attend(make_flex_inputs(case, "cpu"))
    assert len(kernels) == 7


def test_backward_of_dense_attention(kernels: set[Any]) -> None:
    """Three do the work of a call, with segments a fourth clears what belongs to none."""

    def made(of: str, *options: dict[str, Any]) -> list[Any]:
        return [
            dense_backward.make_dense_backward_call(BackwardCase(MhaCase(**one), of, ordered), "cpu")
            for one in options
            for ordered in (False, True)
        ]

    slopes = [{**SIZES, "alibi": alibi, "seed": seed} for seed, alibi in enumerate(("heads", "requests"))]
    sinks = [{**SIZES, "sink": sink} for sink in ("float32", "bfloat16", "float16")]
    plain = made("out", *SHAPES, *({**SIZES, **one} for one in OF_CAUSAL), {**SIZES, "window": (5, 3)})
    plain += made("both", SIZES)
    segments = made("out", dense.RAGGED, {**dense.RAGGED, "sink": "float32", "causal": True})
    softcaps = made("out", *({**SIZES, "softcap": softcap} for softcap in (1.0, 15.0, 50.0)))
    groups = [(plain, 3), (segments, 4), (softcaps, 5), (made("out", *slopes), 6), (made("both", *sinks), 7)]
    assert_counts(kernels, groups)


def test_backward_of_flex_attention(kernels: set[Any]) -> None:
    """In a fixed order there are sums of digits, and two kernels that count along the rows of the mask."""

    def made(ordered: bool) -> list[Any]:
        return [
            flex_backward.make_flex_backward_call(BackwardCase(case, of, ordered), "cpu", "python")
            for case in OF_FLEX
            for of in ("out", "both")
        ]

    assert_counts(kernels, [(made(False), 6), (made(True), 9)])


def test_teams_of_decoding() -> None:
    """Few of 132 multiprocessors have no CTA; teams have whole tiles or equal parts of one if they can."""
    for h_kv in (1, 2, 3, 5, 8, 32, 40, 71, 96, 128, 140, 256):
        for tiles in (0, 1, 7, 32, 1000):
            teams, team = teams_of(h_kv, tiles, 132)
            assert h_kv % team == 0 and 126 <= teams * team <= 132
    assert teams_of(4, 32, 132) == (32, 4)
    assert teams_of(4, 31, 132) == (33, 4)
    assert teams_of(8, 1, 132) == (16, 8)
