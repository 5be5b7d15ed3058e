"""Which calls share a kernel: only dtypes, head dimensions (in steps of 32), flags and the text of functions
choose one. Lengths, heads, strides, scales, numbers and tensors of functions do not. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.flex import FlexCase, make_flex_inputs, with_mask_mod  # noqa: E402
from kit.mha import MhaCase  # noqa: E402
from kit.prefix import PrefixCase  # noqa: E402
from operations.core import Call  # noqa: E402
from operations.dense import OF_SEGMENTS, RAGGED, SAME, SEGMENTS, make_dense_call  # noqa: E402
from operations.dense_backward import BackwardCase, make_dense_backward_call  # noqa: E402
from operations.flex import attend, make_traced_call  # noqa: E402
from operations.flex_backward import make_flex_backward_call  # noqa: E402
from operations.prefix import make_prefix_call  # noqa: E402

if TYPE_CHECKING:
    from emulator import Emulator

Groups = Sequence[tuple[Sequence[Any], int]]
"""Cases, and how many kernels they and those before them take, all together."""
SIZES: dict[str, Any] = {"s_q": 70, "s_k": 90}
SHAPES: tuple[dict[str, Any], ...] = (
    {"b": 1, "s_q": 1, "s_k": 1, "h_q": 1, "h_kv": 1},
    {"b": 3, "s_q": 150, "s_k": 300, "h_q": 8, "h_kv": 2, "layout": "slice"},
    {"b": 2, "s_q": 70, "s_k": 3, "h_q": 6, "h_kv": 6, "layout": "heads"},
    {"b": 40, "s_q": 5, "s_k": 200, "h_q": 32, "h_kv": 1},
    {**SIZES, "causal": True},
    {**SIZES, "window": (-1, 9)},
    {**SIZES, "softmax_scale": 0.3},
    {**SIZES, "sink": "bfloat16"},
    {**SIZES, "sink": "float32"},
    {**SIZES, "d_qk": 111, "d_v": 97},
    {**SIZES, "d_qk": 104},
)
PLAIN = [MhaCase(**shape) for shape in SHAPES]
SOFTCAPS = [MhaCase(**SIZES, softcap=softcap) for softcap in (1.0, 15.0, 50.0)]
SLOPES = [MhaCase(**SIZES, alibi=alibi) for alibi in ("heads", "requests")]

DENSE: Groups = (
    (
        [*PLAIN, MhaCase(**RAGGED), MhaCase(**SAME, packed="qkv", h_kv=4)],
        2,
    ),  # and the one that combines splits
    ([MhaCase(b=n + 1, **SIZES, window=(left, n - 1)) for n, left in enumerate((0, 5, 100, 1000))], 3),
    (SOFTCAPS, 4),
    ([*SLOPES, replace(SEGMENTS, window=(-1, -1))], 5),
)


def backwards(cases: Sequence[MhaCase], *of: str) -> list[BackwardCase]:
    """In a fixed order and in any."""
    return [BackwardCase(case, one, n % 2 == 1) for one in of for n, case in enumerate(cases)]


DENSE_BACKWARD: Groups = (
    ([*backwards(PLAIN, "out"), BackwardCase(MhaCase(**SIZES), "both")], 3),
    (backwards([MhaCase(**RAGGED), MhaCase(**RAGGED, sink="float32", causal=True)], "out"), 4),
    (backwards(SOFTCAPS, "out"), 5),
    (backwards(SLOPES, "out"), 6),
    (backwards([MhaCase(**SIZES, sink=sink) for sink in ("float32", "bfloat16", "float16")], "both"), 7),
)

SHORT: dict[str, Any] = {"query_lengths": (40, 1, 0), "contexts": (70, 9, 3)}
OF_PREFIX: tuple[tuple[Sequence[dict[str, Any]], int], ...] = (
    (
        (
            *({"block_size": 32}, {"block_size": 544}, {"h_q": 8, "h_kv": 1}, {"h_q": 5, "h_kv": 5}),
            *({"d": 104}, {"table": "int64"}, {"table": "pointers"}, {"padded": True, "layout": "slice"}),
            *({"causal": False}, {"own_cached": True}, {"skip_decode": True}, {"sm_scale": 0.3}),
            *({"sinks": "bfloat16"}, {"sinks": "float32"}, {"pack": 16}),
            {"query_lengths": (1,) * 300, "contexts": (5,) * 300},
        ),
        2,
    ),
    (
        (
            *({"x": 16}, {"block_size": 1}, {"block_size": 12}, {"pack": 4}, {"d": 111, "x": 1}),
            {"x": 128, "block_size": 544, "table": "pointers", "own_cached": True},
        ),
        3,
    ),
    (
        (
            {"kv_cache_dtype": "fp8", "bytes_dtype": "uint8"},
            {"kv_cache_dtype": "fp8_e4m3", "x": 16, "k_scale": 3.0, "device_scales": True},
            {"kv_cache_dtype": "fp8_e4m3", "block_size": 7, "bytes_dtype": "int8"},
        ),
        4,
    ),
    (({"window": 1}, {"window": 100, "causal": False}, {"window": 10**6}), 5),
)
PREFIX: Groups = [([PrefixCase(**{**SHORT, **one}) for one in group], n) for group, n in OF_PREFIX]

BASE = FlexCase(**SIZES, score="alibi table", mask="window")
ALIKE = (
    BASE,
    replace(BASE, b=5, h_q=12, h_kv=3, s_q=300, s_k=1000, layout="slice"),
    replace(BASE, b=3, b_kv=1, s_q=1, s_k=2000, layout="tokens"),
    replace(BASE, d_qk=59, d_v=40, scale=0.3, seed=3),
    replace(BASE, block=(256, 128), separate=False),
    replace(BASE, h_q=40, h_kv=40),
)
FLEX: Groups = (
    (ALIKE, 1),
    # The function that hides small blocks is another mask; two kernels make its lists.
    ((replace(BASE, block=(64, 64)), replace(BASE, s_q=300, block=(96, 32))), 4),
)
FLEX_BACKWARD: Groups = (
    ([BackwardCase(case, of, False) for case in ALIKE for of in ("out", "both")], 6),
    # Sums of digits, and two kernels that count along the rows of the mask.
    ([BackwardCase(case, of) for case in ALIKE for of in ("out", "both")], 9),
)


@pytest.fixture
def loaded(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The kernels that calls ask for; they are neither built nor run."""
    from emulator import device

    monkeypatch.setattr(device, "build_kernel", lambda spec, folder: None)
    monkeypatch.setattr(emulator, "run", lambda *arguments: None)
    return emulator.kernels


@pytest.mark.parametrize(
    ("make", "groups"),
    (
        (make_dense_call, DENSE),
        (make_dense_backward_call, DENSE_BACKWARD),
        (make_prefix_call, PREFIX),
        (make_traced_call, FLEX),
        (lambda case, device: make_flex_backward_call(case, device, "python"), FLEX_BACKWARD),
    ),
    ids=("dense", "dense backward", "prefix", "flex", "flex backward"),
)
def test_kernels_are_used_again(
    loaded: dict[Any, Any], make: Callable[[Any, str], Call], groups: Groups
) -> None:
    for cases, count in groups:
        for case in cases:
            make(case, "cpu").run()
        assert len(loaded) == count, sorted(spec.label for spec in loaded)


def test_strides_and_absent_arrays_choose_no_kernel(loaded: dict[Any, Any]) -> None:
    call = make_dense_call(SEGMENTS, "cpu")
    for name in (*OF_SEGMENTS[2:], "attn_sink"):
        call.run(**{name: None})
    assert len(loaded) == 2


def test_numbers_of_a_mask_choose_no_kernel(loaded: dict[Any, Any]) -> None:
    inputs = make_flex_inputs(BASE, "cpu")
    assert inputs.block_mask is not None
    for width in range(3):

        def mask(b: Any, h: Any, q: Any, k: Any, width: int = width) -> Any:
            return (q >= k) & (q - k <= width)

        attend(inputs, block_mask=with_mask_mod(inputs.block_mask, mask))
    assert len(loaded) == 1
    attend(inputs, max_scores=True)
    assert len(loaded) == 2
