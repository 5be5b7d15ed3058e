"""Inputs of sparse decoding: caches in every layout, indices with everything that may stand between them.

As with the dense inputs, what a kernel must not read is made to be noticed. Every byte of a cache that no
valid index names is poison: slots nobody selected (slot 0 among them), the last page's tail, pages without an
owner, the pad bytes of scales and the gaps between blocks. Indices past topk_length and between the rows of
`indices` name poisoned slots, or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .generators import SHARP_FACTOR, sharp_rows

INT_MIN = -(2**31)
INT_MAX = 2**31 - 1

LAYOUTS = ("v32", "model1", "bf16")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Places of the fields of a token, in bytes.

    A block holds `row_bytes` per token, token after token, then `tail_bytes` per token likewise. Rows hold
    `values` e4m3 (none in a bf16 cache) and `rope` bf16. Scales, one per `tile` values, are in the row
    ("v32": float32) or in the tail ("model1": e8m0, and a pad byte).
    """

    d_qk: int
    row_bytes: int
    tail_bytes: int
    values: int
    rope: int
    rope_offset: int
    scales: int
    tile: int

    @property
    def token_bytes(self) -> int:
        """Bytes per token altogether; the last dimension of a cache of bytes."""
        return self.row_bytes + self.tail_bytes


_FORMATS = {
    ("v32", 576): RowFormat(576, 656, 0, 512, 64, 528, 4, 128),
    ("model1", 512): RowFormat(512, 576, 8, 448, 64, 448, 7, 64),
    ("bf16", 576): RowFormat(576, 1152, 0, 0, 576, 0, 0, 0),
    ("bf16", 512): RowFormat(512, 1024, 0, 0, 512, 0, 0, 0),
}


def row_format(layout: str, d_qk: int) -> RowFormat:
    """The format of a layout; a layout of FP8 has one d_qk only."""
    return _FORMATS[layout, d_qk]


@dataclass(frozen=True, slots=True)
class SparseCase:
    """One sparse decoding problem.

    Attributes:
        b, s_q, h_q: the shape, as in `flash_mla_with_kvcache`.
        s_k: tokens per request, of which its query tokens select `topk`.
        topk: columns of `indices`. Those that s_k does not suffice for are -1.
        page_block_size: tokens per page, any number.
        layout: "v32" (656 bytes a token), "model1" (584) or "bf16".
        d_qk: of a bf16 cache, 576 or 512. None: as the layout has it.
        lengths: topk_length of each request; or "random", from 0 to topk, both included; or None.
        extra_s_k, extra_topk, extra_page_block_size, extra_lengths: the same of an extra cache, which there
            is when extra_topk is positive.
        sink: attn_sink is given: random, with +inf, -inf and large values among the heads.
        invalid: share of the indices that are negative or past the cache.
        duplicates: share of the indices that repeat another one of their row.
        empty_rows: share of the query tokens without any valid index.
        sharp: every second query row is scaled up so that its softmax has few large entries.
        shared: all requests select from the same s_k tokens, as the query tokens of a prefill call do.
        power_of_two_scales: round the scales of "v32" up to powers of two, so that bf16 holds every value.
        poison: "nan", "inf" or "none" (zeros): what bytes hold that no valid index names.
        poison_slot_0: no request owns block 0.
        block_gap: unused space after each block: that many tokens; with "model1" one pads the block to a
            multiple of 576 bytes, and each further one adds 576.
        index_gap: unused columns between consecutive rows of `indices`.
        seed: of everything random.
    """

    b: int
    s_q: int = 1
    h_q: int = 128
    s_k: int = 512
    topk: int = 64
    page_block_size: int = 64
    layout: str = "v32"
    d_qk: int | None = None
    lengths: tuple[int, ...] | str | None = None
    extra_s_k: int = 512
    extra_topk: int = 0
    extra_page_block_size: int = 64
    extra_lengths: tuple[int, ...] | str | None = None
    sink: bool = False
    invalid: float = 0.1
    duplicates: float = 0.05
    empty_rows: float = 0.0
    sharp: bool = False
    shared: bool = False
    power_of_two_scales: bool = False
    poison: str = "nan"
    poison_slot_0: bool = True
    block_gap: int = 0
    index_gap: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS or self.poison not in ("nan", "inf", "none"):
            raise ValueError(f"unknown layout {self.layout!r} or poison {self.poison!r}")
        if (self.layout, self.width) not in _FORMATS:
            raise ValueError(f"`d_qk`: the layout {self.layout!r} does not have {self.d_qk}")
        for name in ("lengths", "extra_lengths"):
            lengths = getattr(self, name)
            if (
                isinstance(lengths, tuple)
                and len(lengths) != self.b
                or isinstance(lengths, str) != (lengths == "random")
            ):
                raise ValueError(f"`{name}`: expected {self.b} entries, 'random' or None, got {lengths!r}")

    @property
    def width(self) -> int:
        """d_qk, as given or as the layout has it."""
        return self.d_qk or (512 if self.layout == "model1" else 576)

    @property
    def format(self) -> RowFormat:
        """Places of the fields of a token."""
        return row_format(self.layout, self.width)

    @property
    def id(self) -> str:
        """A name for people and for pytest."""
        words = [
            f"{self.layout}{self.width if self.layout == 'bf16' else ''}",
            f"b{self.b}",
            f"sq{self.s_q}",
            f"h{self.h_q}",
            f"sk{self.s_k}",
            f"top{self.topk}",
            f"page{self.page_block_size}",
        ]
        if self.lengths is not None:
            words.append("lengths" if self.lengths == "random" else "given_lengths")
        if self.extra_topk:
            words.append(f"extra{self.extra_topk}of{self.extra_s_k}page{self.extra_page_block_size}")
        if self.extra_lengths is not None:
            words.append("extra_lengths" if self.extra_lengths == "random" else "given_extra_lengths")
        words += [word for word in ("sink", "sharp", "shared", "power_of_two_scales") if getattr(self, word)]
        words += [
            f"{word}{getattr(self, word)}"
            for word in ("block_gap", "index_gap", "empty_rows", "seed")
            if getattr(self, word)
        ]
        return "-".join(words)


@dataclass(slots=True)
class SparseInputs:
    """Arrays of one framework for one case, ready to be passed on; None for what the case does not have."""

    case: SparseCase
    q: Any
    k_cache: Any
    indices: Any
    topk_length: Any = None
    extra_k_cache: Any = None
    extra_indices: Any = None
    extra_topk_length: Any = None
    attn_sink: Any = None

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `flash_mla_with_kvcache` besides the positional ones and the plan."""
        return {
            "is_fp8_kvcache": self.case.layout != "bf16",
            "indices": self.indices,
            "attn_sink": self.attn_sink,
            "extra_k_cache": self.extra_k_cache,
            "extra_indices_in_kvcache": self.extra_indices,
            "topk_length": self.topk_length,
            "extra_topk_length": self.extra_topk_length,
        }


@dataclass(frozen=True, slots=True)
class _Selection:
    """What a batch selects from one cache: built on the host, the same for every framework."""

    num_blocks: int
    indices: NDArray[np.int32]  # [b, s_q, topk + gap]
    live: NDArray[np.int64]  # slots that a valid index names
    lengths: NDArray[np.int32] | None


def make_sparse_inputs(case: SparseCase, framework: str = "torch", device: Any = "cuda") -> SparseInputs:
    """Inputs for `case` in the arrays of `framework`: "torch" (built on `device`), "numpy" or "cupy".

    q is normal, clamped to [-1, 1], in bfloat16; keys are normal with deviation 0.1, quantised as an engine
    does it. One seed gives one set of values per framework and device; indices are the same for all.
    """
    if framework == "torch":
        kit: _NumpyKit = _TorchKit(case.seed, device)
    elif framework == "cupy":
        kit = _CupyKit(case.seed)
    elif framework == "numpy":
        kit = _NumpyKit(case.seed)
    else:
        raise ValueError(f"`framework`: expected 'torch', 'numpy' or 'cupy', got {framework!r}")
    draw = np.random.default_rng([case.seed, 2])
    main = _select(case, draw, case.s_k, case.topk, case.page_block_size, case.lengths)
    extra = None
    if case.extra_topk:
        extra = _select(
            case, draw, case.extra_s_k, case.extra_topk, case.extra_page_block_size, case.extra_lengths
        )
    place = kit.finish if framework == "cupy" else kit.place
    inputs = SparseInputs(
        case=case,
        q=kit.finish(_queries(case, kit)),
        k_cache=_fill_cache(case, kit, main.num_blocks, case.page_block_size, main.live),
        indices=place(main.indices)[..., : case.topk],
    )
    if main.lengths is not None:
        inputs.topk_length = place(main.lengths)
    if extra is not None:
        inputs.extra_k_cache = _fill_cache(
            case, kit, extra.num_blocks, case.extra_page_block_size, extra.live
        )
        inputs.extra_indices = place(extra.indices)[..., : case.extra_topk]
        if extra.lengths is not None:
            inputs.extra_topk_length = place(extra.lengths)
    if case.sink:
        inputs.attn_sink = place(_sinks(case.h_q, draw))
    return inputs


def block_fields(k_cache: Any, form: RowFormat) -> tuple[Any, Any]:
    """The bytes of a cache's rows `[num_blocks, page_block_size, row_bytes]` and, where the format has them,
    of its tails `[num_blocks, page_block_size, tail_bytes]`, as views (torch, NumPy, CuPy).
    """
    num_blocks, page = k_cache.shape[:2]
    blocks = _strided(k_cache, (num_blocks, page * form.token_bytes))
    rows = blocks[:, : page * form.row_bytes]
    tails = blocks[:, page * form.row_bytes :]
    return (
        _strided(rows, (num_blocks, page, form.row_bytes)),
        _strided(tails, (num_blocks, page, form.tail_bytes)) if form.tail_bytes else None,
    )


def _strided(array: Any, shape: tuple[int, ...]) -> Any:
    """Bytes that are contiguous within a block, from an array's first byte on, in another shape."""
    inner = [1]
    for extent in reversed(shape[2:]):
        inner.insert(0, inner[0] * extent)
    if hasattr(array, "as_strided"):
        return array.as_strided(shape, (array.stride(0), *inner), array.storage_offset())
    if isinstance(array, np.ndarray):
        return np.lib.stride_tricks.as_strided(array, shape, (array.strides[0], *inner))
    import cupy

    return cupy.lib.stride_tricks.as_strided(array, shape, (array.strides[0], *inner))


# ---- which slots


def _select(
    case: SparseCase,
    draw: np.random.Generator,
    s_k: int,
    topk: int,
    page: int,
    lengths: tuple[int, ...] | str | None,
) -> _Selection:
    """Choose pages and indices, with everything invalid and garbage that the case wants."""
    rows = (case.b, case.s_q)
    owners = 1 if case.shared else case.b
    pages = -(-s_k // page)
    num_blocks = owners * pages + 2 + owners * pages // 16
    order = draw.permutation(np.arange(1, num_blocks))[: owners * pages]
    if not case.poison_slot_0:
        order[order.argmin()] = 0
    table = order.reshape(owners, pages)

    token = draw.permuted(
        np.broadcast_to(np.arange(max(s_k, topk), dtype=np.int32), (*rows, max(s_k, topk))), axis=-1
    )[..., :topk]
    owner = np.arange(case.b)[:, None, None] % owners
    slot = table[owner, np.minimum(token, s_k - 1) // page] * page + token % page
    slot = np.where(token < s_k, slot, -1)
    repeated = draw.random(slot.shape) < case.duplicates
    slot = np.where(repeated, np.roll(slot, 1, axis=-1), slot)
    nowhere = draw.random(slot.shape) < case.invalid
    slot = np.where(nowhere, draw.choice(_nowhere(num_blocks * page), slot.shape), slot)
    empty = draw.random((*rows, 1)) < case.empty_rows
    slot = np.where(empty, draw.choice(_nowhere(num_blocks * page), slot.shape), slot)

    counts = _lengths(case, draw, topk, lengths)
    counted = np.ones(slot.shape, dtype=bool)
    if counts is not None:
        counted = np.broadcast_to(np.arange(topk) < counts[:, None, None], slot.shape)
    named = np.zeros(num_blocks * page, dtype=bool)
    named[slot[counted & (slot >= 0) & (slot < len(named))]] = True
    dead = np.flatnonzero(~named)
    garbage = np.concatenate([_nowhere(len(named)), draw.choice(dead, 18)])  # mostly slots of the cache
    indices = draw.choice(garbage, (*rows, topk + case.index_gap)).astype(np.int32)
    indices[..., :topk] = np.where(counted, slot, indices[..., :topk])
    return _Selection(num_blocks, indices, np.flatnonzero(named), counts)


def _nowhere(slots: int) -> NDArray[np.int64]:
    """Indices that name no slot of a cache."""
    return np.array([-1, -1, -123456, INT_MIN, slots, INT_MAX])


def _lengths(
    case: SparseCase, draw: np.random.Generator, topk: int, lengths: tuple[int, ...] | str | None
) -> NDArray[np.int32] | None:
    if lengths is None:
        return None
    if isinstance(lengths, str):
        counts = draw.integers(0, topk, case.b, endpoint=True, dtype=np.int32)
        counts[draw.permutation(case.b)[:3]] = (0, topk, 1)[: min(case.b, 3)]
        return counts
    return np.array(lengths, dtype=np.int32)


def _sinks(h_q: int, draw: np.random.Generator) -> NDArray[np.float32]:
    """Sinks near the usual log-sum-exp, every eighth head one of the extremes."""
    sink = draw.normal(4.0, 2.0, h_q)
    extremes = np.array([-np.inf, np.inf, 0.0, 30.0, -30.0])
    sink[1::8] = np.resize(extremes, len(sink[1::8]))
    return sink.astype(np.float32)


# ---- what is in them


class _NumpyKit:
    """What building a cache needs of NumPy."""

    def __init__(self, seed: int) -> None:
        import ml_dtypes

        self.draw = np.random.default_rng([seed, 3])
        self.dtypes: dict[str, Any] = {
            "e4m3": ml_dtypes.float8_e4m3fn,
            "bfloat16": ml_dtypes.bfloat16,
            "float32": np.float32,
        }

    def place(self, array: NDArray[Any]) -> Any:
        """The array where caches are built."""
        return array

    def finish(self, array: Any) -> Any:
        """A built array where the inputs live."""
        return array

    def bytes(self, shape: tuple[int, ...]) -> Any:
        """Uninitialised bytes."""
        return np.empty(shape, dtype=np.uint8)

    def normal(self, shape: tuple[int, ...], deviation: float) -> Any:
        """float32, normal."""
        return self.draw.standard_normal(shape, dtype=np.float32) * np.float32(deviation)

    def clip(self, array: Any) -> Any:
        """The array, limited to [-1, 1] in place."""
        return array.clip(-1.0, 1.0, out=array)

    def largest(self, array: Any) -> Any:
        """Maximum over the last dimension."""
        return array.max(-1)

    def as_bytes(self, array: Any, kind: str) -> Any:
        """float32 rounded to `kind` ("e4m3", "bfloat16", "float32"), as the bytes of its last dimension."""
        return np.ascontiguousarray(array).astype(self.dtypes[kind]).view(np.uint8)

    def view(self, array: Any, kind: str) -> Any:
        """Bytes seen as `kind`."""
        return array.view(self.dtypes[kind])


class _CupyKit(_NumpyKit):
    """Builds on the host."""

    def finish(self, array: Any) -> Any:
        import cupy

        return cupy.asarray(array)


class _TorchKit(_NumpyKit):
    """The same with torch on a device."""

    def __init__(self, seed: int, device: Any) -> None:
        import torch

        self.torch = torch
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.dtypes = {
            "e4m3": torch.float8_e4m3fn,
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
        }

    def place(self, array: NDArray[Any]) -> Any:
        return self.torch.from_numpy(array).to(self.device)

    def bytes(self, shape: tuple[int, ...]) -> Any:
        return self.torch.empty(shape, dtype=self.torch.uint8, device=self.device)

    def normal(self, shape: tuple[int, ...], deviation: float) -> Any:
        return self.torch.empty(shape, device=self.device).normal_(0.0, deviation, generator=self.generator)

    def clip(self, array: Any) -> Any:
        return array.clip_(-1.0, 1.0)

    def largest(self, array: Any) -> Any:
        return array.amax(-1)

    def as_bytes(self, array: Any, kind: str) -> Any:
        return array.contiguous().to(self.dtypes[kind]).view(self.torch.uint8)


def _queries(case: SparseCase, kit: _NumpyKit) -> Any:
    q = kit.clip(kit.normal((case.b, case.s_q, case.h_q, case.width), 1.0))
    if case.sharp:
        factor = np.where(sharp_rows(case, np), np.float32(SHARP_FACTOR), np.float32(1.0))
        q *= kit.place(factor)
    return kit.view(kit.as_bytes(q, "bfloat16"), "bfloat16")


LIVE_AT_A_TIME = 1 << 18
"""Tokens quantised at a time, which bounds the memory that building a cache takes."""


def make_cache(case: SparseCase, num_blocks: int, page_block_size: int, device: Any) -> Any:
    """A torch cache in the layout of a case, every slot of which holds a token."""
    kit = _TorchKit(case.seed, device)
    return _fill_cache(case, kit, num_blocks, page_block_size, np.arange(num_blocks * page_block_size))


def _fill_cache(
    case: SparseCase, kit: _NumpyKit, num_blocks: int, page: int, slots: NDArray[np.int64]
) -> Any:
    """A cache of poison, but for the given slots."""
    form = case.format
    stride = block_stride(case, page)
    storage = kit.bytes((num_blocks, stride))
    storage[...] = kit.place(_poison_pattern(case, page, stride))
    shape = (num_blocks, page, 1, form.token_bytes)
    k_cache = _strided(storage, shape)
    rows, tails = block_fields(k_cache, form)
    for start in range(0, len(slots), LIVE_AT_A_TIME):
        live = slots[start : start + LIVE_AT_A_TIME]
        place = kit.place(live // page), kit.place(live % page)
        tokens, scales = _quantise(case, kit, kit.normal((len(live), form.d_qk), 0.1))
        rows[place] = tokens
        if tails is not None:
            tails[..., : form.scales][place] = scales
    k_cache = _strided(kit.finish(storage), shape)
    return kit.view(k_cache, "bfloat16") if case.layout == "bf16" else k_cache


def block_stride(case: SparseCase, page: int) -> int:
    """Bytes from one block to the next."""
    form = case.format
    if case.layout == "model1" and case.block_gap:
        return (-(-page * form.token_bytes // 576) + case.block_gap - 1) * 576
    return (page + case.block_gap) * form.token_bytes


def _poison_pattern(case: SparseCase, page: int, stride: int) -> NDArray[np.uint8]:
    """One block of poison: NaN in every field (both NaN codes of e4m3), or the nearest to infinity."""
    form = case.format
    nan = case.poison == "nan"
    pattern = np.full(stride, {"nan": 0xFF, "inf": 0x7E, "none": 0}[case.poison], dtype=np.uint8)
    if case.poison == "none":
        return pattern
    row = np.zeros(form.row_bytes, dtype=np.uint8)
    row[: form.values : 2], row[1 : form.values : 2] = (0x7F, 0xFF) if nan else (0x7E, 0xFE)
    rope = row[form.rope_offset :][: 2 * form.rope]
    rope[...] = np.frombuffer(bytes.fromhex("c07f c0ff" if nan else "807f 80ff") * (form.rope // 2), np.uint8)
    if case.layout == "v32":
        scales = np.full(form.scales, np.nan if nan else np.inf, dtype=np.float32)
        row[form.values : form.rope_offset] = scales.view(np.uint8)
    pattern[: page * form.row_bytes] = np.tile(row, page)
    if form.tail_bytes:
        # e8m0 has no infinity; 448 times its largest value overflows in every type that a kernel could use.
        pattern[page * form.row_bytes : page * form.token_bytes] = 0xFF if nan else 0xFE
    return pattern


def _quantise(case: SparseCase, kit: _NumpyKit, tokens: Any) -> tuple[Any, Any]:
    """Rows `[n, row_bytes]` and, of "model1", scales `[n, 7]` of float32 tokens `[n, d_qk]`."""
    form = case.format
    rows = kit.bytes((len(tokens), form.row_bytes))
    rows[:, form.rope_offset :][:, : 2 * form.rope] = kit.as_bytes(tokens[:, form.values :], "bfloat16")
    if not form.values:
        return rows, None
    tiles = tokens[:, : form.values].reshape(-1, form.scales, form.tile)
    scale = kit.largest(abs(tiles)) / 448.0
    exponents = None
    if case.layout == "model1" or case.power_of_two_scales:
        scale, exponents = _round_up_to_power_of_two(kit, scale)
    values = tiles / scale[..., None]
    rows[:, : form.values] = kit.as_bytes(values.reshape(-1, form.values), "e4m3")
    if case.layout == "v32":
        rows[:, form.values : form.rope_offset] = kit.as_bytes(scale, "float32")
    return rows, exponents


def _round_up_to_power_of_two(kit: _NumpyKit, scale: Any) -> tuple[Any, Any]:
    """Positive float32 rounded up to powers of two, and those as e8m0 bytes, by their bits.

    Little-endian float32: the two high bytes hold the sign, the exponent and 7 bits of the mantissa. Scales
    that are powers of two already, which random ones never are, would be doubled; it makes no difference.
    """
    raw = kit.as_bytes(scale, "float32").reshape(*scale.shape, 4)
    exponents = (raw[..., 3] & 0x7F) * 2 + (raw[..., 2] >> 7) + 1
    raw[..., :2] = 0
    raw[..., 2] = (exponents & 1) << 7
    raw[..., 3] = exponents >> 1
    return kit.view(raw.reshape(*scale.shape[:-1], -1), "float32"), exponents
