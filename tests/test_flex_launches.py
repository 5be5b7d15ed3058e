"""What the host side of flex attention works out for a launch, without a GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from test_flex_calls import EXPECTED as PLAIN
from test_flex_calls import EXPECTED_LISTS, HQ, L, S, changed, read_struct

from rawmla import jit
from rawmla.errors import KernelNotReadyError
from rawmla.flex.functions import header_of
from rawmla.flex.mods import CudaMod
from rawmla.jit.table import BoundedTable
from rawmla.kernels import mha_forward_variants
from rawmla.kernels.mha_forward import (
    MhaForwardAddresses,
    ModAddresses,
    Mods,
    PreparedMhaForward,
    params_of,
)
from rawmla.kernels.mha_forward_variants import flex_spec, tile_in_blocks

SMS = 132
LOG2_E = 1 / math.log(2)
HEADER = header_of(None, None)
CALL = changed(PLAIN, {"lists": EXPECTED_LISTS, "header": HEADER})
ADDRESSES = MhaForwardAddresses(q=0x1000, k=0x2000, v=0x3000, out=0x8000, lse=0x8800)
MORE = ModAddresses(
    max_scores=0x9000,
    kv_num_blocks=0x4000,
    kv_indices=0x5000,
    full_kv_num_blocks=0x6000,
    full_kv_indices=0x7000,
    states=0xA000,
)
FUNCTIONS = {"score_mod", "mask_mod"}


class _Kernel:
    """A kernel that is not there; remembers what it was prepared with and launched with."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.launches: list[tuple[Any, ...]] = []

    def prepare(self, grid: tuple[int, int, int], params: bytes, changing: Any, pdl: bool) -> Any:
        self.grid, self.params, self.changing, self.pdl = grid, params, changing, pdl
        return SimpleNamespace(launch=lambda *arguments: self.launches.append(arguments))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[_Kernel]:
    """The kernels that are loaded."""
    loaded: list[_Kernel] = []

    def get_kernel(spec: Any, device: int, capturing: Any) -> _Kernel:
        loaded.append(_Kernel(spec))
        return loaded[-1]

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    monkeypatch.setattr(jit, "require_supported", lambda device: None)
    monkeypatch.setattr(jit, "build", lambda spec: SimpleNamespace(losses=[]))
    monkeypatch.setattr(mha_forward_variants, "_slow", BoundedTable(4))
    monkeypatch.setattr(jit, "device_info", lambda device: SimpleNamespace(sm_count=SMS))
    return loaded


def prepared(seqlen_q: int = L, seqlen_k: int = S, **changes: Any) -> PreparedMhaForward:
    """A call with other members, of its `Mods` too."""
    mods = {name: changes.pop(name) for name in Mods._fields if name in changes}
    lengths = {"max_seqlen_q": seqlen_q, "total_q": seqlen_q, "max_seqlen_k": seqlen_k, "total_k": seqlen_k}
    return PreparedMhaForward(changed(CALL, mods, **lengths, **changes), lambda: False)


def params(kernels: list[_Kernel], **changes: Any) -> dict[str, Any]:
    """The parameters of a call, but for those that change from launch to launch."""
    prepared(**changes)
    declared = params_of((8, 8))
    plain = SimpleNamespace(
        size=declared.size, members=[one for one in declared.members if one.name not in FUNCTIONS]
    )
    return read_struct(plain, kernels[-1].params)


def test_sizes_and_strides(kernels: list[_Kernel]) -> None:
    found = params(kernels)
    tiles = 2 * HQ * 3
    expected = {
        "out_stride_b": CALL.out_strides[0],
        "out_stride_s": CALL.out_strides[1],
        "out_stride_h": CALL.out_strides[2],
        "lse_stride_b": HQ * L,
        "lse_stride_h": L,
        "b": 2,
        "heads": HQ,
        "log2_group": 0,
        "heads_per_kv": 4,
        "d_v": 64,
        "out_by_rows": 0,
        "seqlen_q": L,
        "seqlen_k": S,
        "total_k": S,
        "tiles_per_head": 3,
        "tiles": tiles,
        "splits": 1,
        "counts_strides": (0, 0, 1) * 2,
        "lists_strides": (0, 0, 4) * 2,
        "list_columns": (4, 4),
        "mask_batches": 1,
        "mask_heads": 1,
        "block_q": 128,
        "block_k": 128,
        "block_tiles": 1,
        "k_batches": 2,
    }
    assert {name: found[name] for name in expected} == expected
    (kernel,) = kernels
    assert kernel.grid == (tiles, 1, 1) and tiles < SMS
    assert kernel.pdl is False  # arrays that a function reads are loaded ahead of the wait
    assert kernel.spec == flex_spec("bfloat16", 128, 64, 128, False, HEADER)


@pytest.mark.parametrize("scale", (0.25, -3.0, 0.0))
def test_scores_in_natural_units(kernels: list[_Kernel], scale: float) -> None:
    """A function gets scaled scores; without one the softmax scales them."""
    with_function = params(kernels, softmax_scale=scale, has_score_mod=True)
    assert with_function["score_scale"] == scale
    assert with_function["softmax_scale_log2"] == pytest.approx(LOG2_E, rel=1e-6)
    without = params(kernels, softmax_scale=0.25)
    assert without["softmax_scale_log2"] == pytest.approx(0.25 * LOG2_E, rel=1e-6)
    assert with_function["score_factor"] == without["score_factor"] == 1.0


@pytest.mark.parametrize(
    ("block_k", "seqlen_k", "columns", "tiles"),
    (
        (128, 500, 4, 1),
        (256, 500, 2, 2),
        (512, 500, 1, 4),
        (384, 300, 1, 3),
        (128, 129, 2, 1),
        (128, 40, 1, 1),
    ),
)
def test_counts_are_clipped(
    kernels: list[_Kernel], block_k: int, seqlen_k: int, columns: int, tiles: int
) -> None:
    """To the blocks that there are, in lists that claim more; and a block has the steps that it needs."""
    lists = EXPECTED_LISTS._replace(block_k=block_k, columns=(100, 1))
    found = params(kernels, lists=lists, seqlen_k=seqlen_k)
    assert (found["list_columns"], found["block_tiles"]) == ((columns, 1), tiles)


@pytest.mark.parametrize("d", (64, 128, 192, 256))
def test_tiles_divide_blocks_of_128(kernels: list[_Kernel], d: int) -> None:
    tile = tile_in_blocks(d, d)
    assert 128 % tile.keys == 0 and tile.consumers == 2
    assert params(kernels, d_qk=d, d_v=d)["block_tiles"] == 128 // tile.keys


def test_without_lists(kernels: list[_Kernel]) -> None:
    found = params(kernels, lists=None)
    assert found["counts_strides"] == found["lists_strides"] == (0,) * 6
    # Nothing is divided by zero.
    assert (
        min(found[name] for name in ("mask_batches", "mask_heads", "block_q", "block_k", "block_tiles")) == 1
    )
    assert params(kernels, lists=None, seqlen_k=0)["block_tiles"] == 1


@pytest.mark.parametrize(("seqlen_q", "counted"), ((2 * 128, False), (128 * 9, True)))
def test_scratch(kernels: list[_Kernel], seqlen_q: int, counted: bool) -> None:
    """A counter where there are more tiles than SMs."""
    made = prepared(seqlen_q=seqlen_q)
    assert made.scratch_bytes == 16 * counted
    assert kernels[0].grid == (min(2 * HQ * seqlen_q // 128, SMS), 1, 1)


def test_kernels_do_not_depend_on_sizes(kernels: list[_Kernel]) -> None:
    for changes in (
        {},
        {"b": 7, "k_batches": 1, "h_q": 4, "seqlen_q": 1, "seqlen_k": 10_000},
        {"softmax_scale": 0.5, "lists": None},
        {"d_qk": 120, "d_v": 50, "q_strides": (1 << 40, 8, 8)},
        {"has_score_mod": True},
    ):
        prepared(**changes)
    assert len({kernel.spec for kernel in kernels}) == 1
    for changes in (
        {"dtype": "float16"},
        {"d_v": 65},
        {"max_scores": True},
        {"header": ("user/mods.cuh", "x")},
    ):
        prepared(**changes)
    assert len({kernel.spec for kernel in kernels}) == 5


def test_what_changes_from_launch_to_launch(kernels: list[_Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments stand in the order of the first members of the struct."""
    mapped: list[Any] = []
    cleared: list[Any] = []

    def tensor_map(address: int, *what: Any) -> bytes:
        mapped.append((address, *what))
        return len(mapped).to_bytes(1, "little") * jit.TENSOR_MAP_BYTES

    monkeypatch.setattr(jit, "tensor_map", tensor_map)
    monkeypatch.setattr(jit, "clear", lambda *what: cleared.append(what))
    made = prepared(seqlen_q=10_000, score_mod_bytes=16, mask_mod_bytes=24)
    made.launch(0x51, ADDRESSES, 0xA000, *MORE, b"s" * 16, b"m" * 24)
    made.launch(0x51, ADDRESSES, 0xB000, *MORE, b"t" * 16, b"n" * 24)
    (kernel,) = kernels
    assert len(mapped) == 4 and [address for address, *_ in mapped] == [*ADDRESSES[:4]]
    assert [what[1][0] for _, *what in mapped] == [128, 128, 64, 64]
    assert cleared == [(0xA000, 16, 0x51, 0), (0xB000, 16, 0x51, 0)]

    declared = params_of((16, 24))
    names = [one.name for one in declared.members]
    (stream, *first), (_, *second) = kernel.launches
    assert stream == 0x51 and kernel.changing is declared.changing
    changing = bytearray(declared.size)
    declared.changing.pack_into(changing, 0, *first)
    given = dict(zip(names, first, strict=False))
    assert {name: value for name, value in given.items() if value and not name.endswith("map")} == {
        **{name: value for name, value in ADDRESSES._asdict().items() if value and name not in "qkv"},
        **MORE._asdict(),
        "counter": 0xA000,
        "score_mod": b"s" * 16,
        "mask_mod": b"m" * 24,
    }
    assert [given[name][:1] for name in names[:6]] == [b"\1", b"\2", b"\3", b"\4", b"\0", b"\0"]
    assert second[-2:] == [b"t" * 16, b"n" * 24] and second[names.index("counter")] == 0xB000


def test_without_a_counter(kernels: list[_Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "tensor_map", lambda *what: bytes(jit.TENSOR_MAP_BYTES))
    monkeypatch.setattr(jit, "clear", lambda *what: pytest.fail("something was cleared"))
    prepared().launch(0x51, ADDRESSES, 0xA000, *MORE, bytes(8), bytes(8))
    names = [one.name for one in params_of((8, 8)).members]
    assert dict(zip(names, kernels[0].launches[0][1:], strict=False))["counter"] == 0


def test_maps_without_keys(kernels: list[_Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of no keys may be 0, which has no map: that of the queries stands for it."""
    mapped: list[Any] = []
    monkeypatch.setattr(jit, "tensor_map", lambda *what: mapped.append(what) or bytes(jit.TENSOR_MAP_BYTES))
    made = prepared(seqlen_k=0, k_strides=(128, 128, 128), v_strides=(64, 64, 64), lists=None)
    made.launch(0x51, ADDRESSES._replace(k=0, v=0), 0, *MORE, bytes(8), bytes(8))
    assert [what[0] for what in mapped] == [0x1000, 0x1000, 0x1000, 0x8000]
    assert all(min(what[2]) >= 1 for what in mapped)


def test_sections_of_heads(kernels: list[_Kernel]) -> None:
    """As many as leave K and V in L2, in powers of two or all there are."""
    for seqlen_k, section in ((0, 16), (500, 16), (100_000, 4), (10_000_000, 4)):
        assert params(kernels, seqlen_k=seqlen_k, lists=None)["section"] == section


def test_struct_is_that_of_dense_attention_with_more() -> None:
    plain = [one.name for one in params_of().members]
    assert [one.name for one in params_of((8, 8)).members if one.name in plain] == plain


def test_text_is_part_of_the_variant() -> None:
    one, other = (header_of(CudaMod(code).mod(), None) for code in ("score", "score * 2"))
    first, second = (flex_spec("bfloat16", 64, 64, 128, False, header) for header in (one, other))
    assert first != second and first.label != second.label
    assert first == flex_spec("bfloat16", 64, 64, 128, False, header_of(CudaMod("score").mod(), None))


def test_a_smaller_tile_where_functions_would_spill(
    kernels: list[_Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []

    def build(spec: Any) -> Any:
        built.append(spec)
        return SimpleNamespace(losses=["register spills"])

    monkeypatch.setattr(jit, "build", build)
    for _ in range(2):
        prepared()
    keys = [dict(kernel.spec.defines)["TILE_KEYS"] for kernel in kernels]
    assert keys == [64, 64] and [dict(spec.defines)["TILE_KEYS"] for spec in built] == [128]


def test_nothing_is_built_in_a_capture(kernels: list[_Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def not_loaded(spec: Any, device: int, capturing: Any) -> Any:
        assert capturing()
        raise KernelNotReadyError("not loaded")

    monkeypatch.setattr(jit, "get_kernel", not_loaded)
    monkeypatch.setattr(jit, "build", lambda spec: pytest.fail("built in a capture"))
    with pytest.raises(KernelNotReadyError):
        PreparedMhaForward(CALL, lambda: True)
