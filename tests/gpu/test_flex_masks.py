"""`rawmla.create_block_mask` on the GPU, held against torch's."""

from __future__ import annotations

from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import cupy, loaded_labels, no_kernel_loaded, torch
from test_flex_block_mask import absent
from test_frameworks import to_cupy

import rawmla
from kit.flex import MASKS, FlexCase

if torch is not None:
    from torch.nn.attention.flex_attention import create_block_mask as torchs

BLOCKS = (16, 32, 96, 128, 256, (128, 256), (256, 128), (32, 64))
LENGTHS = ((1, 1), (37, 277), (256, 256), (300, 1025), (1023, 64))
LISTS = ("kv", "full_kv", "q", "full_q")
B, H = 3, 4


def sizes(lengths: tuple[int, int]) -> Any:
    return FlexCase(b=B, h_q=H, s_q=lengths[0], s_k=lengths[1]).sizes("cuda")


def assert_same_lists(name: str, got: Any, want: Any) -> None:
    """Raise unless all lists are equal, also behind their ends; `want` may have CuPy arrays."""
    assert tuple(got.BLOCK_SIZE) == tuple(want.BLOCK_SIZE) and got.seq_lengths == want.seq_lengths
    for lists in LISTS:
        for what in ("num_blocks", "indices"):
            one, other = (getattr(mask, f"{lists}_{what}") for mask in (got, want))
            assert (one is None) == (other is None), (name, lists, what)
            if one is None:
                continue
            one, other = torch.as_tensor(one), torch.as_tensor(other)
            assert one.dtype == other.dtype == torch.int32 and one.is_cuda and one.is_contiguous()
            assert torch.equal(one, other), f"{name}: {lists}_{what}"


@pytest.mark.parametrize("form", full_unless(lambda form: form == "python", ("python", "cuda")))
@pytest.mark.parametrize("name", MASKS)
def test_is_torchs(name: str, form: str) -> None:
    for lengths in LENGTHS:
        mask = MASKS[name](sizes(lengths))
        for block in BLOCKS:
            got = rawmla.create_block_mask(mask.form(form), B, H, *lengths, BLOCK_SIZE=block)
            want = torchs(mask.python, B, H, *lengths, device="cuda", BLOCK_SIZE=block)
            assert_same_lists(f"{lengths} {block}", got, want)
            assert got.shape == tuple(want.shape) and got.sparsity() == pytest.approx(absent(want))


def test_one_of_everything() -> None:
    """B and H of None and 1, blocks longer than the sequence, devices by every name."""
    mask = MASKS["window"](sizes((300, 500))).python
    for b, h in ((None, None), (1, None), (None, 4), (3, 1)):
        for block in ((512, 1024), (128, 2**20)):
            got = rawmla.create_block_mask(mask, b, h, 300, 500, BLOCK_SIZE=block)
            want = torchs(mask, b, h, 300, 500, device="cuda", BLOCK_SIZE=block[0])
            assert got.shape == tuple(want.shape)
            assert got.kv_num_blocks.shape == (b or 1, h or 1, -(-300 // block[0]))
    want = rawmla.create_block_mask(mask, None, None, 300, 500)
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
        assert_same_lists(str(device), rawmla.create_block_mask(mask, None, None, 300, 500, device), want)


def test_blocks_longer_than_the_sequence() -> None:
    """One block, which the end cuts: partial, also where all of it is seen."""
    got = rawmla.create_block_mask(lambda b, h, q, k: k >= 0, None, None, 300, 500, BLOCK_SIZE=(512, 1024))
    assert got.kv_num_blocks.tolist() == [[[1]]] and got.full_kv_num_blocks.tolist() == [[[0]]]
    assert got.kv_indices.tolist() == got.full_kv_indices.tolist() == [[[[0]]]]


def test_more_blocks_than_ctas() -> None:
    """Several blocks, and lines, for each CTA; more entries in a line than lanes."""
    mask = MASKS["per batch"](sizes((2000, 3000))).python
    got = rawmla.create_block_mask(mask, 40, 9, 2000, 3000, BLOCK_SIZE=(64, 32))
    want = torchs(mask, 40, 1, 2000, 3000, device="cuda", BLOCK_SIZE=(64, 32))
    for lists in LISTS:
        for what in ("num_blocks", "indices"):
            one, other = (getattr(x, f"{lists}_{what}") for x in (got, want))
            assert torch.equal(one, other.expand_as(one)), f"{lists}_{what}"


def test_long_sequence() -> None:
    """8 GiB if the mask were in memory."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    got = rawmla.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 1000), None, None, 2**16, 2**17)
    assert torch.cuda.max_memory_allocated() - held < 64 * 2**20
    rows = torch.arange(512, device="cuda")
    first = ((rows * 128 - 999).clamp(min=0)) // 128
    assert torch.equal((got.kv_num_blocks + got.full_kv_num_blocks)[0, 0].long(), rows - first + 1)


def test_kernels_are_used_again() -> None:
    """Numbers, tensors, lengths, sizes and blocks are parameters."""
    with no_kernel_loaded():
        for width, length, block in ((5, 300, 128), (70, 1000, 64), (1, 16, 16)):

            def window(b: Any, h: Any, q: Any, k: Any, width: int = width) -> Any:
                return q - k < width

            rawmla.create_block_mask(window, None, None, length, length, BLOCK_SIZE=block)
        assert len(loaded_labels()) == 2
        torch.cuda.synchronize()  # before the kernels are let go of


def test_cupy() -> None:
    """CUDA text that reads CuPy arrays gives CuPy lists; its methods work on them."""
    mask = MASKS["documents"](sizes((300, 500)))
    documents = mask.captures["documents"]
    torch.cuda.synchronize()
    mod = rawmla.CudaMod(mask.code, {"documents": to_cupy(documents)})
    got = rawmla.create_block_mask(mod, B, None, 300, 500)
    want = rawmla.create_block_mask(mask.python, B, None, 300, 500)
    assert isinstance(got.kv_indices, cupy.ndarray)
    cupy.cuda.get_current_stream().synchronize()
    for lists in LISTS:
        for what in ("num_blocks", "indices"):
            one, other = (getattr(x, f"{lists}_{what}") for x in (got, want))
            assert torch.equal(torch.from_dlpack(one), other), f"{lists}_{what}"
    assert got.shape == want.shape and got.sparsity() == pytest.approx(want.sparsity())
    assert got.to_dense().tolist() == want.to_dense().tolist()
    assert got.to_string() == want.to_string()
    part = got[1:, :, :2]
    assert part.to_dense().tolist() == want[1:, :, :2].to_dense().tolist()
