"""Block masks, held against torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawmla
from kit import functions as kit

torch = pytest.importorskip("torch")
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

from rawmla.flex.block_mask import BlockMask, and_masks, noop_mask, or_masks  # noqa: E402

Q_LEN, KV_LEN, SIZE = 1000, 900, 64
MASKS = ("causal", "documents", "per head", "empty")
LISTS = ("kv", "full_kv", "q", "full_q")


def pair(name: str, separate_full_blocks: bool = True) -> tuple[BlockMask, Any]:
    """Our mask and torch's."""
    function = kit.MASKS[name](kit.Sizes(2, 3, Q_LEN, KV_LEN, device="cpu")).python
    theirs = create_block_mask(function, 2, 3, Q_LEN, KV_LEN, device="cpu", BLOCK_SIZE=SIZE)
    full = (theirs.full_kv_num_blocks, theirs.full_kv_indices) if separate_full_blocks else (None, None)
    ours = BlockMask.from_kv_blocks(
        theirs.kv_num_blocks, theirs.kv_indices, *full, SIZE, function, (Q_LEN, KV_LEN)
    )
    return ours, theirs


def listed(mask: Any, name: str) -> list[list[int]]:
    """The entries of all lists that mean something."""
    counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
    rows = indices.reshape(-1, indices.shape[-1])
    return [row[:count].tolist() for row, count in zip(rows, counts.flatten().tolist(), strict=True)]


def absent(mask: Any) -> float:
    """Return the percentage of blocks that a mask leaves out. `sparsity` of torch 2.13 gives another one: it
    counts blocks that the end cuts as whole blocks.
    """
    return float(100 * (1 - mask.to_dense().double().mean()))


def test_lists_of_numpy() -> None:
    """A mask with lists of NumPy, as `rawmla.reference` takes it, does what one with lists of torch does."""
    want, _ = pair("per head")
    lists = [x.numpy() for x in want.as_tuple()[2:6]]
    mask = BlockMask.from_kv_blocks(*lists, SIZE, want.mask_mod, (Q_LEN, KV_LEN))
    assert str(mask).startswith("BlockMask(shape=(2, 3, 1000, 900), sparsity=")
    for change in (lambda x: x, lambda x: x[1, 0:2], lambda x: x._adjust(500, 300)):
        got, other = change(mask), change(want)
        assert str(got) == str(other) and got.sparsity() == other.sparsity()
        for name in LISTS:
            assert listed(got, name) == listed(other, name), name
        for array in got.as_tuple()[2:10]:
            assert isinstance(array, np.ndarray) and array.dtype == np.int32
    assert mask.to("cpu").kv_indices is mask.kv_indices
    with pytest.raises(ValueError, match="device"):
        mask.to("meta")


@pytest.mark.parametrize("name", MASKS)
def test_is_torchs(name: str) -> None:
    ours, theirs = pair(name)
    assert (ours.shape, ours.numel(), ours.BLOCK_SIZE) == (theirs.shape, theirs.numel(), theirs.BLOCK_SIZE)
    assert ours.sparsity() == pytest.approx(absent(theirs))
    assert torch.equal(ours.to_dense(), theirs.to_dense().int())
    for lists in LISTS:
        assert listed(ours, lists) == listed(theirs, lists), lists
        assert getattr(ours, f"{lists}_indices").dtype == torch.int32
    alone, _ = pair(name, separate_full_blocks=False)
    assert alone.full_kv_num_blocks is None and alone.full_q_indices is None
    assert alone.sparsity() == pytest.approx(absent(alone))


@pytest.mark.parametrize(
    "index",
    (
        0,
        (1, 2),
        (0, np.int32(-1), np.int64(2)),
        (-1, slice(1, 3)),
        (slice(None), slice(None), slice(3, None)),
        (slice(None), torch.tensor([0, 2])),
    ),
    ids=str,
)
def test_index(index: Any) -> None:
    """As torch's lists, but that no dimension is lost."""
    ours, _ = pair("per head")
    part = ours[index]
    given = index if isinstance(index, tuple) else (index,)
    kept = tuple(slice(i, int(i) + 1 or None) if isinstance(i, (int, np.integer)) else i for i in given)
    assert torch.equal(part.to_dense(), ours.to_dense()[kept])
    rows = torch.arange(Q_LEN).split(SIZE)
    chosen = rows[kept[2]] if len(kept) == 3 else rows
    assert part.shape == (*ours.to_dense()[kept].shape[:2], sum(map(len, chosen)), KV_LEN)
    with pytest.raises(ValueError, match="^block_mask: expected mask_mod to be set again"):
        part.mask_mod(0, 0, 0, 0)


def test_iteration_ends() -> None:
    ours, _ = pair("per head")
    requests = list(islice(ours, 5))
    assert [part.shape for part in requests] == [(1, 3, Q_LEN, KV_LEN)] * 2
    assert torch.equal(torch.cat([part.to_dense() for part in requests]), ours.to_dense())


ROWS = torch.arange(16) % 2 == 0
OUTSIDE = r"^block_mask: expected an index of -\d+ to \d+, got -?\d+$"


@pytest.mark.parametrize(
    ("index", "error", "message"),
    (
        *[(x, IndexError, OUTSIDE) for x in (2, -3, (0, 3), (0, np.int64(-4)), (0, 0, 16))],
        ((0, 0, 0, 0), IndexError, "at most 3 indices, got 4"),
        (True, TypeError, "^block_mask: expected an int, .* got bool True$"),
        ((0, np.True_), TypeError, "^block_mask: expected an int, .* got bool"),
        *[
            ((slice(None), 0, rows), TypeError, "^block_mask: expected rows by numbers, .* got bools$")
            for rows in (ROWS, ROWS.tolist(), ROWS.byte())
        ],
        ((0, 0, torch.tensor(3)), TypeError, r"^block_mask: expected rows by .* got shape \[\]$"),
    ),
)
def test_indices_that_are_refused(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pair("causal")[0][index]


@pytest.mark.parametrize("lengths", ((500, 400), (1000, 10)), ids=str)
def test_adjust(lengths: tuple[int, int]) -> None:
    ours, _ = pair("documents")
    cut = ours._adjust(*lengths)
    rows, columns = (-(-n // SIZE) for n in lengths)
    assert torch.equal(cut.to_dense(), ours.to_dense()[..., :rows, :columns])
    assert cut.seq_lengths == lengths and cut.mask_mod is ours.mask_mod
    assert all(0 <= i < columns for lists in ("kv", "full_kv") for row in listed(cut, lists) for i in row)


def test_entries_past_the_count_mean_nothing() -> None:
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    garbage = torch.tensor([[[[1, 2**30, -7], [0, 2, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, garbage, BLOCK_SIZE=16)
    assert mask.seq_lengths == (32, 48)
    assert mask.to_dense().tolist() == [[[[0, 1, 0], [1, 0, 1]]]]
    assert listed(mask, "q") == [[1], [0], [1]]


def test_as_tuple_and_to() -> None:
    mask, _ = pair("documents")
    assert mask.as_tuple()[:2] == (Q_LEN, KV_LEN) and mask.as_tuple(flatten=False)[0] == (Q_LEN, KV_LEN)
    mask.mask_mod = torch.nn.Linear(1, 1)  # a module stays on its device
    moved = mask.to("meta")
    assert moved.kv_indices.device.type == "meta" and moved.mask_mod is mask.mask_mod
    assert mask.mask_mod.weight.device.type == "cpu"


def test_to_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are copied by CuPy while the other device is current; there is none here."""
    cupy = pytest.importorskip("cupy")
    current: list[int] = []
    made: list[Any] = []

    @contextlib.contextmanager
    def device(ordinal: int) -> Iterator[None]:
        current.append(ordinal)
        yield
        current.pop()

    def asarray(array: Any) -> Any:
        made.append((array, *current))
        return SimpleNamespace(**vars(array))

    monkeypatch.setattr(cupy.cuda, "Device", device)
    monkeypatch.setattr(cupy, "asarray", asarray)
    lists = [SimpleNamespace(shape=shape, __cuda_array_interface__={}) for shape in ((1, 1, 2), (1, 1, 2, 3))]
    moved = BlockMask((32, 48), *lists, BLOCK_SIZE=16).to("cuda:1")
    assert [(array is given, on) for (array, on), given in zip(made, lists, strict=True)] == [(True, 1)] * 2
    assert moved.kv_num_blocks is not lists[0] and moved.kv_indices is not lists[1] and not current
    assert (moved.seq_lengths, moved.BLOCK_SIZE, moved.q_indices) == ((32, 48), (16, 16), None)
    with pytest.raises(ValueError, match="^device: expected a CUDA device, got str 'cpu'"):
        moved.to("cpu")


@pytest.mark.parametrize(("join", "operator"), ((and_masks, "&&"), (or_masks, r"\|\|")))
def test_masks_of_what_is_no_function(join: Any, operator: str) -> None:
    for given, got in ((rawmla.CudaMod("q_idx >= kv_idx"), "CudaMod"), ("q_idx >= kv_idx", "str '.*'")):
        text = rf"^mask_mods\[1\]: expected a Python function, got {got}; join CUDA text by {operator}$"
        with pytest.raises(TypeError, match=text):
            join(noop_mask, given)


def test_masks_of_masks() -> None:
    q, k = torch.arange(9), torch.arange(9)[:, None]
    first, second = (lambda b, h, q, k: q >= k), (lambda b, h, q, k: q - k < 3)
    assert torch.equal(and_masks(first, second)(0, 0, q, k), (q >= k) & (q - k < 3))
    assert torch.equal(or_masks(first, second)(0, 0, q, k), (q >= k) | (q - k < 3))
    assert and_masks()(0, 0, q, k) is True and or_masks()(0, 0, q, k) is False
    assert noop_mask(0, 0, q, k) is True


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"BLOCK_SIZE": (128, 0)}, "^BLOCK_SIZE: expected a multiple of 16"),
        ({"full_kv_num_blocks": torch.zeros(1, 1, 2)}, "^full_kv_num_blocks and full_kv_indices: "),
        ({"kv_num_blocks": torch.zeros(1, 1, 3)}, r"^kv_indices: expected shape .*got \[1, 1, 2, 3\] and"),
    ),
)
def test_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"kv_num_blocks": torch.zeros(1, 1, 2), "kv_indices": torch.zeros(1, 1, 2, 3), **options}
    with pytest.raises(ValueError, match=message):
        BlockMask.from_kv_blocks(**arguments)
