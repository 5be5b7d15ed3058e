"""Host side of the gradients of captured arrays: cuda_src/kernels/flex_captured_gradients.cu and
flex_captured_finish.cu.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import jit
from ..jit.params import I32, I64, POINTER, ParamStruct, changing
from ..jit.spec import MAX_SMEM_BYTES
from .common import CHUNK, DTYPES, FLOAT_DTYPES, ceil_div, padded
from .mha_backward_variants import BLOCK_ROWS

if TYPE_CHECKING:
    from .mha_backward import BackwardCall, BackwardMods

CAPTURED_KEYS = 128
"""Keys of a tile of flex_captured_gradients.cu."""
_CAPTURED_THREADS = 384
_BARRIER_BYTES = 512
_CELL_BYTES = 16
_DIGITS_BYTES, _ELEMENTS_TOGETHER = 3200, 32  # of CapturedDigits
_MOST_ELEMENTS = 1 << 20
"""The most elements of captured gradients that are summed digit by digit: their sums take 100 MiB."""
_MOST_TERMS_LOG2 = 39
"""The exponent of the most terms that can be added before a digit overflows."""
_FINISH_THREADS, _FINISH_CTAS = 256, 1024


class CapturedGradient(NamedTuple):
    """The gradient of a captured array: how many elements it has, and its dtype."""

    elements: int
    dtype: str


CAPTURED_FINISH_PARAMS = ParamStruct(
    changing(POINTER("sums", "largest", "out")),
    I64("count"),
    I32("sums_are", "dtype", "terms_log2"),
)
FINISH_SPEC = jit.KernelSpec("flex_captured_finish", (), threads=_FINISH_THREADS, smem_bytes=0)

IN_ANY_ORDER, LARGEST, IN_UNITS, IN_DIGITS = range(4)
"""Values of the define PASS of flex_captured_gradients.cu."""
FLOATS, CELLS, DIGITS = range(3)
"""Values of the parameter sums_are of flex_captured_finish.cu."""
_PASSES = {FLOATS: (IN_ANY_ORDER,), CELLS: (LARGEST, IN_UNITS), DIGITS: (IN_DIGITS,)}


def captured_spec(dtype: str, d_qk: int, d_v: int, pass_: int, header: tuple[str, str]) -> jit.KernelSpec:
    """The variant of flex_captured_gradients.cu for head dimensions."""
    d_qk, d_v = padded(d_qk), padded(d_v)
    row_bytes = 2 * CHUNK * (ceil_div(d_qk, CHUNK) + ceil_div(d_v, CHUNK))
    stages, smem_bytes = next(
        (n, smem_bytes)
        for n in (2, 1)
        for smem_bytes in [CAPTURED_KEYS * row_bytes + n * BLOCK_ROWS * (row_bytes + 12) + _BARRIER_BYTES]
        if smem_bytes <= MAX_SMEM_BYTES
    )
    return jit.KernelSpec(
        "flex_captured_gradients",
        (
            *(("DTYPE", DTYPES[dtype]), ("D_QK", d_qk), ("D_V", d_v)),
            *(("FLEX", True), ("PASS", pass_), ("STAGES", stages)),
        ),
        threads=_CAPTURED_THREADS,
        smem_bytes=smem_bytes,
        headers=(header,),
    )


class PreparedCaptured:
    """The passes over all scores that find gradients of captured arrays, and what brings these to their
    dtypes.

    Attributes
    ----------
    scratch_sizes : list of int
        Bytes of the parts of the scratch that `launch` takes.
    """

    def __init__(
        self,
        call: BackwardCall,
        mods: BackwardMods,
        prepare_tiles: Callable[[jit.Kernel, int], Callable[..., object]],
        capturing: Callable[[], bool],
    ) -> None:
        """Load the kernels. ``prepare_tiles``: from a kernel and the keys of a tile to its launch."""
        self._device = call.device
        sums_are = _what_sums_are(call, mods)
        self._has_largest = sums_are == CELLS
        self._sum_bytes = [_sum_bytes(sums_are, one.elements) for one in mods.captured]
        summed = [sums_are != FLOATS or one.dtype != "float32" for one in mods.captured]
        sums = [size * is_summed for size, is_summed in zip(self._sum_bytes, summed, strict=True)]
        self.scratch_sizes = [4 * len(mods.captured) * self._has_largest, *sums]
        self._passes: list[Callable[..., object]] = []
        self._finish: list[Callable[..., object] | None] = []
        for pass_ in _PASSES[sums_are] if mods.captured else ():
            one = captured_spec(call.dtype, call.d_qk, call.d_v, pass_, mods.header)
            kernel = jit.get_kernel(one, call.device, capturing=capturing)
            self._passes.append(prepare_tiles(kernel, CAPTURED_KEYS))
        for gradient, is_summed in zip(mods.captured, summed, strict=True):
            finish = None
            if is_summed:
                kernel = jit.get_kernel(FINISH_SPEC, call.device, capturing=capturing)
                params = CAPTURED_FINISH_PARAMS.pack(
                    count=gradient.elements,
                    sums_are=sums_are,
                    dtype=FLOAT_DTYPES[gradient.dtype],
                    terms_log2=terms_log2(call, mods),
                )
                grid = (min(ceil_div(gradient.elements, _FINISH_THREADS), _FINISH_CTAS), 1, 1)
                finish = kernel.prepare(grid, params, CAPTURED_FINISH_PARAMS.changing, pdl=True).launch
            self._finish.append(finish)

    def largest(self, scratch: Sequence[int]) -> int:
        """Where the passes keep the largest terms; 0: they keep none."""
        return scratch[0] if self._has_largest else 0

    def launch(
        self,
        stream: int,
        arguments: Callable[[int, bytes], tuple[Any, ...]],
        score_mod: bytes,
        results: Sequence[int],
        scratch: Sequence[int],
    ) -> None:
        """Enqueue the kernels.

        ``arguments`` makes the arguments of a pass from the keys of a tile and the parameters of score_mod.
        ``results`` and ``scratch`` are addresses.
        """
        if not results:
            return
        largest, (_, *sums) = self.largest(scratch), scratch
        places = [x if finish else y for x, y, finish in zip(sums, results, self._finish, strict=True)]
        if largest:
            jit.clear(largest, 4 * len(places), stream, self._device)
        for place, size in zip(places, self._sum_bytes, strict=True):
            jit.clear(place, size, stream, self._device)
        with_gradients = score_mod[: -8 * len(places)] + struct.pack(f"<{len(places)}Q", *places)
        for launch in self._passes:
            launch(*arguments(CAPTURED_KEYS, with_gradients))
        for i, finish in enumerate(self._finish):
            if finish is not None:
                finish(stream, places[i], largest + 4 * i if largest else 0, results[i])


def terms_log2(call: BackwardCall, mods: BackwardMods) -> int:
    """The exponent of a power of 2 that is no less than how often any element is added to."""
    return (max(1, mods.sites) * call.b * call.h_q * call.max_seqlen_q * call.max_seqlen_k - 1).bit_length()


def _what_sums_are(call: BackwardCall, mods: BackwardMods) -> int:
    """The value of sums_are for captured gradients. Digits take one pass over the scores where cells take
    two, and six times the memory.
    """
    if not call.deterministic:
        return FLOATS
    elements = sum(one.elements for one in mods.captured)
    are_few = elements <= _MOST_ELEMENTS and terms_log2(call, mods) <= _MOST_TERMS_LOG2
    return DIGITS if are_few and not mods.scattered else CELLS


def _sum_bytes(sums_are: int, elements: int) -> int:
    """Scratch for the sums of a captured gradient."""
    if sums_are == DIGITS:
        return _DIGITS_BYTES * ceil_div(elements, _ELEMENTS_TOGETHER)
    return elements * (_CELL_BYTES if sums_are == CELLS else 4)
