"""Dense, prefix and flex attention: variants, grids, parameters and scratch of the kernels of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kernel_params import PARAMS, read_params

from calls.test_dense import EXPECTED as DENSE
from calls.test_flex import EV, EXPECTED, EXPECTED_LISTS, HKV, HQ, B, E, L, S
from calls.test_flex import changed as flex_call
from calls.test_flex_lists import read_struct, steps
from calls.test_prefix import EXPECTED as PREFIX
from calls.test_prefix import changed as prefix_call
from rawmla import jit
from rawmla.errors import KernelNotReadyError
from rawmla.flex.functions import header_of
from rawmla.flex.mods import CudaMod
from rawmla.jit.table import BoundedTable
from rawmla.kernels import (
    flex_captured,
    mha_backward,
    mha_backward_variants,
    mha_combine,
    mha_forward,
    mha_forward_variants,
)
from rawmla.kernels.block_mask import BlockLists
from rawmla.kernels.flex_captured import CapturedGradient
from rawmla.kernels.mha_backward import BackwardAddresses, BackwardCall, BackwardMods, PreparedMhaBackward
from rawmla.kernels.mha_backward_variants import BY_KEYS, BY_PRODUCT, Needs
from rawmla.kernels.mha_forward import MhaForwardAddresses, ModAddresses, Mods, PreparedMhaForward
from rawmla.kernels.mha_forward_variants import flex_spec, tile_in_blocks

SMS = 132
SCRATCH = 1 << 20
HEADER = header_of(None, None)


class Kernel:
    """A kernel that is not there; keeps what it was prepared with, and its launches in `World.launched`."""

    def __init__(self, spec: Any, launched: list[SimpleNamespace]) -> None:
        self.spec, self.launched = spec, launched

    def prepare(self, grid: tuple[int, int, int], params: bytes, changing: Any, pdl: bool) -> Any:
        self.grid, self.params, self.pdl = grid, params, pdl

        def launch(stream: int, *arguments: Any, **context: Any) -> None:
            packed = bytearray(params)
            changing.pack_into(packed, 0, *arguments)
            self._add(grid, bytes(packed), stream, pdl)

        return SimpleNamespace(launch=launch)

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        self._add(grid, params, stream, False)

    def _add(self, grid: tuple[int, int, int], params: bytes, stream: int, pdl: bool) -> None:
        found = {"spec": self.spec, "grid": grid, "params": params, "stream": stream, "pdl": pdl}
        self.launched.append(SimpleNamespace(name=self.spec.name, **found))


class Device:
    """Kernels that were loaded, what was launched and cleared, maps that were made, and variants built."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.launched: list[SimpleNamespace] = []
        self.maps: list[tuple[Any, ...]] = []
        self.built: list[Any] = []
        self.losses: list[str] = []
        self.spilled = 0

    def get_kernel(self, spec: Any, device: int, capturing: Any) -> Kernel:
        self.kernels.append(Kernel(spec, self.launched))
        return self.kernels[-1]

    def build(self, spec: Any) -> SimpleNamespace:
        self.built.append(spec)
        return SimpleNamespace(losses=self.losses, meta={"spill_stores": self.spilled})

    def clear(self, address: int, size: int, stream: int, device: int) -> None:
        self.launched.append(SimpleNamespace(name="clear", address=address, size=size, stream=stream))

    def tensor_map(self, address: int, *what: Any) -> bytes:
        self.maps.append((address, *what))
        return address.to_bytes(jit.TENSOR_MAP_BYTES, "little")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for name in ("get_kernel", "build", "clear", "tensor_map"):
        monkeypatch.setattr(jit, name, getattr(made, name))
    monkeypatch.setattr(jit, "require_supported", lambda device: None)
    monkeypatch.setattr(jit, "device_info", lambda device: SimpleNamespace(sm_count=SMS))
    monkeypatch.setattr(mha_forward_variants, "_slow", BoundedTable(4))
    return made


def members(declared: Any, params: bytes) -> dict[str, Any]:
    """The parameters of a kernel, without the bytes of functions."""
    plain = [member for member in declared.members if member.name not in ("score_mod", "mask_mod")]
    return read_struct(SimpleNamespace(size=declared.size, members=plain), params)


def split_lengths(changes: dict[str, Any]) -> dict[str, Any]:
    """Members of a call, where `seqlen_q` and `seqlen_k` stand for two each."""
    made = dict(changes)
    for which in ("q", "k"):
        if f"seqlen_{which}" in made:
            length = made.pop(f"seqlen_{which}")
            made |= {f"max_seqlen_{which}": length, f"total_{which}": length}
    return made


# ---- forward: dense and prefix


@pytest.mark.parametrize(
    ("tiles", "key_blocks", "splits"),
    ((105, 1000, 1), (66, 1000, 2), (4, 1000, 32), (5, 1000, 26), (4, 11, 2), (4, 3, 1), (4, 0, 1)),
)
def test_splits(tiles: int, key_blocks: int, splits: int) -> None:
    """Only where tiles are few; into parts of 4 blocks at least."""
    assert mha_combine.num_splits(tiles, key_blocks, SMS, 1024) == splits


def test_size_of_splits() -> None:
    """The results of all parts take 32 MiB at most."""
    assert mha_combine.num_splits(4, 1000, SMS, mha_combine.state_bytes(32 * 8192, 128)) == 1
    assert mha_combine.num_splits(4, 1000, SMS, mha_combine.MAX_SCRATCH // 3) == 3


@pytest.mark.parametrize("total_q", (100, 10_000, 10_000_000))
def test_scratch_is_bounded(device: Device, total_q: int) -> None:
    """However many rows of q are of no request."""
    dense = DENSE._replace(b=1, varlen=True, max_seqlen_q=100, max_seqlen_k=100_000, total_q=total_q)
    prefix = prefix_call(PREFIX, {"table_columns": 10_000}, b=1, max_seqlen_q=100, total_q=total_q)
    for call in (dense, prefix):
        prepared = PreparedMhaForward(call, lambda: False)
        assert 0 <= prepared.scratch_bytes <= mha_combine.MAX_SCRATCH + 16
        assert (prepared.scratch_bytes > 16) == (total_q == 100)


@pytest.mark.parametrize("pointers", (False, True))
def test_blocks_of_a_cache_in_one_place(device: Device, pointers: bool) -> None:
    """A stride of 0 between the blocks of k_cache; with a table of addresses there is none."""
    table = {"table_has_pointers": pointers, "table_bytes": 8 if pointers else 4}
    call = prefix_call(PREFIX, {"k_strides": (4096 if pointers else 0, 64), **table})
    PreparedMhaForward(call, lambda: False)
    assert [kernel.spec.name for kernel in device.kernels] == ["mha_forward", "mha_combine"]


def test_maps_of_no_keys(device: Device) -> None:
    """TMA has no map of nothing: one of a token at the address of q, which nothing is read through."""
    dense = PreparedMhaForward(DENSE._replace(total_k=0, max_seqlen_k=0), lambda: False)
    dense.launch(0, (0x1000, 0, 0, 0x2000, 0x3000, 1, 1, 0, 0, 0, 0), 0x4000)
    flex = forward(seqlen_k=0, k_strides=(128, 128, 128), v_strides=(64, 64, 64), lists=None)
    flex.launch(0x51, FORWARD_ADDRESSES._replace(k=0, v=0, out=0x2000), 0, *MORE, bytes(8), bytes(8))
    assert [made[0] for made in device.maps] == [0x1000, 0x1000, 0x1000, 0x2000] * 2
    assert all(min(made[2]) > 0 for made in device.maps)


# ---- forward: flex

FLEX = flex_call(EXPECTED, {"lists": EXPECTED_LISTS, "header": HEADER})
FORWARD_ADDRESSES = MhaForwardAddresses(q=0x1000, k=0x2000, v=0x3000, out=0x8000, lse=0x8800)
MORE = ModAddresses(0x9000, 0x4000, 0x5000, 0x6000, 0x7000, states=0xA000)


def forward(**changes: Any) -> PreparedMhaForward:
    """A call with other members, of its `Mods` too."""
    mods = {name: changes.pop(name) for name in Mods._fields if name in changes}
    return PreparedMhaForward(flex_call(FLEX, mods, **split_lengths(changes)), lambda: False)


def forward_params(device: Device, **changes: Any) -> dict[str, Any]:
    """The parameters of a call, but for those that change from launch to launch."""
    device.kernels.clear()
    forward(**changes)  # and a combine, where keys may be split
    return members(mha_forward.params_of((8, 8)), device.kernels[0].params)


@pytest.mark.parametrize(
    ("block_k", "seqlen_k", "columns", "tiles"),
    ((256, 500, 2, 2), (512, 500, 1, 4), (384, 300, 1, 3), (128, 129, 2, 1), (128, 40, 1, 1)),
)
def test_counts_are_clipped(device: Device, block_k: int, seqlen_k: int, columns: int, tiles: int) -> None:
    """To the blocks that there are, in lists that claim more; and a block has the steps that it needs."""
    lists = EXPECTED_LISTS._replace(block_k=block_k, columns=(100, 1))
    found = forward_params(device, lists=lists, seqlen_k=seqlen_k)
    assert (found["list_columns"], found["block_tiles"]) == ((columns, 1), tiles)


@pytest.mark.parametrize("d", (64, 128, 192, 256))
def test_tiles_divide_blocks_of_128(device: Device, d: int) -> None:
    tile = tile_in_blocks(d, d)
    assert 128 % tile.keys == 0 and tile.consumers == 2
    assert forward_params(device, d_qk=d, d_v=d)["block_tiles"] == 128 // tile.keys


def test_without_lists(device: Device) -> None:
    """Nothing is divided by zero."""
    found = forward_params(device, lists=None)
    assert found["counts_strides"] == found["lists_strides"] == (0,) * 6
    assert min(found[n] for n in ("mask_batches", "mask_heads", "block_q", "block_k", "block_tiles")) == 1
    assert forward_params(device, lists=None, seqlen_k=0)["block_tiles"] == 1
    backward(lists=None, deterministic=True)
    _, main, _ = device.launched
    found = read(main)
    assert found["turns"] and not found["ranks"]
    assert min(found[name] for name in ("mask_batches", "mask_heads", "block_rows", "block_k")) == 1


@pytest.mark.parametrize(("seqlen_q", "counted"), ((2 * 128, False), (128 * 9, True)))
def test_scratch(device: Device, seqlen_q: int, counted: bool) -> None:
    """A counter where there are more tiles than SMs, which begins at 0."""
    made = forward(seqlen_q=seqlen_q)
    assert made.scratch_bytes == 16 * counted
    assert device.kernels[0].grid == (min(B * HQ * seqlen_q // 128, SMS), 1, 1)
    made.launch(0x51, FORWARD_ADDRESSES, SCRATCH, *MORE, bytes(8), bytes(8))
    *cleared, launch = device.launched
    assert [(x.address, x.size) for x in cleared] == [(SCRATCH, 16)] * counted
    assert members(mha_forward.params_of((8, 8)), launch.params)["counter"] == SCRATCH * counted


def test_sections_of_heads(device: Device) -> None:
    """As many as leave K and V in L2, in powers of two or all there are."""
    for seqlen_k, section in ((0, 16), (500, 16), (100_000, 4), (10_000_000, 4)):
        found = forward_params(device, seqlen_q=512, seqlen_k=seqlen_k, lists=None)
        assert found["section"] == section


@pytest.mark.parametrize("max_scores", (False, True))
@pytest.mark.parametrize(
    ("seqlen_q", "h_kv", "list_heads", "group"),
    (
        (1, 2, None, 4),
        (17, 2, 1, 4),
        (300, 2, 1, 4),
        (512, 2, 1, 1),  # no fewer tiles
        (1, 8, 1, 1),
        (1, 2, 2, 1),  # lists of their own
        (1, 2, 8, 1),
    ),
)
def test_query_heads_share_tiles(
    device: Device, seqlen_q: int, h_kv: int, list_heads: int | None, group: int, max_scores: bool
) -> None:
    """Where they then need fewer tiles, and have one list."""
    lists = None if list_heads is None else EXPECTED_LISTS._replace(heads=list_heads)
    found = forward_params(device, seqlen_q=seqlen_q, h_kv=h_kv, lists=lists, max_scores=max_scores)
    assert (found["log2_group"], found["heads"]) == (group.bit_length() - 1, HQ // group)
    assert found["heads_per_kv"] == HQ // group // h_kv
    assert found["tiles_per_head"] == -(-seqlen_q * group // 128)
    assert dict(device.kernels[0].spec.defines)["FLEX_GROUPED"] == (group > 1)


def test_text_is_part_of_the_variant() -> None:
    dense = [member.name for member in mha_forward.params_of().members]
    assert [x.name for x in mha_forward.params_of((8, 8)).members if x.name in dense] == dense
    headers = [header_of(CudaMod(code).mod(), None) for code in ("score", "score * 2", "score")]
    first, second, again = (flex_spec("bfloat16", 64, 64, 128, False, header) for header in headers)
    assert first != second and first.label != second.label and first == again


def test_a_smaller_tile_where_functions_would_spill(device: Device) -> None:
    device.losses = ["register spills"]
    for _ in range(2):
        forward()
    keys = [dict(kernel.spec.defines)["TILE_KEYS"] for kernel in device.kernels[::2]]  # a combine after each
    assert keys == [64, 64] and [dict(spec.defines)["TILE_KEYS"] for spec in device.built] == [128]


# ---- backward: flex

ROWS, COLUMNS = 3, 4
Q_BLOCKS = -(-L // 64)
PLACES = B * HQ * Q_BLOCKS
LISTS = BlockLists((steps(1, 1, COLUMNS),) * 2, (steps(1, 1, COLUMNS, ROWS)[:3],) * 2, (9, 2), 1, 1, 128, 128)
BACKWARD = BackwardCall(
    **{name: x for name, x in EXPECTED._asdict().items() if name in BackwardCall._fields}
    | {"lse_strides": (4, 5, 6), "softmax_scale": 0.25},
    dout_strides=(1 << 18, 64, 1 << 12),
    dlse_strides=(7, 8, 9),
    dq_strides=(10, 11, 12),
    dk_strides=(13, 14, 15),
    dv_strides=(16, 17, 18),
    deterministic=False,
    needs=Needs(True, True, True, False),
)._replace(mods=BackwardMods(HEADER, False, 8, 8, LISTS, (), sites=0, scattered=False))
ADDRESSES = BackwardAddresses(*range(0x1000, 0xB000, 0x1000))
OF_LISTS = [*range(0xB000, 0xF000, 0x1000)]
CAPTURED = (CapturedGradient(10, "float32"), CapturedGradient(7, "bfloat16"))
SITES: dict[str, Any] = {"captured": CAPTURED, "sites": 3, "score_mod_bytes": 24}
MAIN = ("mha_backward", "mha_backward_by_product")


def backward(**changes: Any) -> PreparedMhaBackward:
    """Launch a call with other members, of its `BackwardMods` too."""
    assert BACKWARD.mods is not None
    mods = {name: changes.pop(name) for name in BackwardMods._fields if name in changes}
    call = BACKWARD._replace(mods=BACKWARD.mods._replace(**mods), **split_lengths(changes))
    made = PreparedMhaBackward(call, lambda: False)
    captured = [0x50000 + i for i in range(len(mods.get("captured", ())))]
    score_mod = bytes(mods.get("score_mod_bytes", 8))
    made.launch(0x51, ADDRESSES, SCRATCH, *OF_LISTS, score_mod, bytes(8), captured)
    return made


def read(launch: Any) -> dict[str, Any]:
    """The parameters of a launch by name. A main kernel has the sizes of mods that `backward` gives."""
    if (launch.name, False) in PARAMS and launch.name not in MAIN:
        return read_params(launch.spec, launch.params)
    return members(mha_backward.params_of((8, 8)), launch.params)


def test_three_kernels(device: Device) -> None:
    made = backward()
    assert [(x.name, x.pdl, x.stream) for x in device.launched] == [
        ("mha_backward_prepare", True, 0x51),
        ("mha_backward", False, 0x51),  # arrays that a function reads are loaded ahead of the wait
        ("mha_backward_finish", True, 0x51),
    ]
    prepare, main, finish = device.launched
    assert [x.grid for x in device.launched] == [(PLACES, 1, 1), (B * HKV * 4, 1, 1), (PLACES, 2, 1)]
    assert main.spec == mha_backward_variants.flex_spec("bfloat16", E, EV, BY_KEYS, HEADER)
    first, second, last = map(read, device.launched)
    assert first["blocks"] == second["blocks"] == last["blocks"] == B * Q_BLOCKS
    assert first["lse_log2"] == second["lse"] and first["delta"] == second["delta"]
    assert first["dq_accum"] == second["dq_accum"] == last["dq_accum"]
    assert first["turns"] == second["turns"] == second["ranks"] == second["largest"] == 0
    assert first["accum_columns"] == 128 and last["dq"] == ADDRESSES.dq
    assert second["list_rows"] == (3, 2)  # clipped to the blocks that there are
    sizes = {"lse_log2": PLACES * 256, "delta": PLACES * 256, "dq_accum": PLACES * 64 * 512}
    parts = sorted((first[name], size) for name, size in sizes.items())
    ends = [SCRATCH, *[address + size for address, size in parts]]
    assert all(address >= end for (address, _), end in zip(parts, ends, strict=False))
    assert ends[-1] <= SCRATCH + made.scratch_bytes and not any(address % 128 for address, _ in parts)


@pytest.mark.parametrize("dims", ((128, 64), (256, 256)))
def test_a_fixed_order(device: Device, dims: tuple[int, int]) -> None:
    """Ranks are made of the lists before the kernel that needs them, for its tiles."""
    backward(deterministic=True, d_qk=dims[0], d_v=dims[1])
    prepare, clear, scatter, ranks, main, _ = device.launched
    names = ["clear", "block_mask_scatter", "block_mask_ranks", MAIN[dims[0] == 256]]
    assert [x.name for x in device.launched[1:5]] == names
    states, made = read(scatter), read(ranks)
    assert clear.address == states["states"] == made.pop("states") and clear.size >= ROWS * COLUMNS
    assert (states["kv_num_blocks"], states["full_kv_indices"]) == (OF_LISTS[0], OF_LISTS[3])
    assert (states["rows"], states["columns"], states["list_columns"]) == (COLUMNS, ROWS, (3, 2))
    assert read(main)["ranks"] == made.pop("ranks") != 0
    tiles = 1 if dims[0] == 128 else 2
    assert made == {"all_rows": ROWS, "rows": ROWS, "columns": COLUMNS, "tiles": tiles}
    assert read(main)["turns"] == read(prepare)["turns"] != 0


@pytest.mark.parametrize("dims", ((64, 64), (256, 256)))
@pytest.mark.parametrize("needs", (Needs(True, True, True, False), Needs(False, False, False, True)))
def test_references(device: Device, needs: Needs, dims: tuple[int, int]) -> None:
    """With a score function, rows whose lse is far from 0 get references before anything reads them."""
    captured = CAPTURED if needs.others else ()
    more = {**SITES, "captured": captured, "needs": needs}
    backward(has_score_mod=True, d_qk=dims[0], d_v=dims[1], **more)
    prepare, references, *others = device.launched
    assert (references.name, references.pdl) == ("flex_row_references", True)
    assert references.grid == prepare.grid == (PLACES, 1, 1)
    reader = next(x for x in others if x.name in (MAIN[dims[0] == 256], "flex_captured_gradients"))
    first, second = (members(mha_backward.params_of((24, 8)), x.params) for x in (references, reader))
    assert read(prepare)["weights"] == 0 and read(prepare)["lse_log2"] == first["lse"]
    assert first["weights"] not in (0, first["lse"], first["delta"])
    assert all(first[name] == second[name] for name in ("lse", "delta", "weights", "q_map", "k_map"))
    wide = dims == (256, 256) and needs.main  # tiles of keys as in the main kernel
    assert dict(references.spec.defines)["TILE_KEYS"] == (64 if wide else 128)


MANY = (CapturedGradient(1 << 20, "float32"), CapturedGradient(1, "bfloat16"))


@pytest.mark.parametrize(("captured", "scattered"), ((CAPTURED, True), (MANY, False)))
def test_captured_gradients_in_a_fixed_order(device: Device, captured: Any, scattered: bool) -> None:
    """In units of the largest, where scores are added one by one or elements are many."""
    more = {**SITES, "captured": captured, "scattered": scattered}
    backward(lists=None, deterministic=True, **more)
    largest, first, second, *passes, one, other = device.launched[3:]
    assert [x.size for x in (largest, first, second)] == [8, *[16 * x.elements for x in captured]]
    assert [dict(x.spec.defines)["PASS"] for x in passes] == [flex_captured.LARGEST, flex_captured.IN_UNITS]
    assert passes[0].params == passes[1].params
    terms = 3 * B * HQ * L * S
    for i, finish in enumerate((one, other)):
        found = read(finish)
        assert (found["largest"], found["out"]) == (largest.address + 4 * i, 0x50000 + i)
        assert found["sums_are"] == flex_captured.CELLS
        assert 2 ** found["terms_log2"] >= terms > 2 ** (found["terms_log2"] - 1)


@pytest.mark.parametrize(
    ("spilled", "losses", "form"),
    (
        (0, [], BY_KEYS),
        (8, ["register spills: 8 bytes"], BY_KEYS),
        (400, ["register spills: 400 bytes"], BY_PRODUCT),
        (0, ["ptxas: (C7512) Potential Performance Loss"], BY_PRODUCT),
    ),
)
def test_the_other_form_where_functions_would_spill(
    device: Device, spilled: int, losses: list[str], form: Any
) -> None:
    device.spilled, device.losses = spilled, losses
    for _ in range(2):
        backward()
    specs = {x.spec for x in device.launched if x.name in MAIN}
    assert specs == {mha_backward_variants.flex_spec("bfloat16", E, EV, form, HEADER)}
    assert len(device.built) == 1
    assert read(device.launched[1])["tiles_per_head"] == -(-S // form.tile_keys)


# ---- both directions


def test_maps_are_kept(device: Device) -> None:
    made, places = forward(), (0x1000, 0x2000, 0x3000, 0x8000)
    for scratch in (0xA000, 0xB000):
        made.launch(0x51, FORWARD_ADDRESSES, scratch, *MORE, bytes(8), bytes(8))
    assert [(x[0], x[2][0]) for x in device.maps] == list(zip(places, (E, E, EV, EV), strict=True))
    device.maps.clear()
    other, places = backward(), (ADDRESSES.q, ADDRESSES.dout, ADDRESSES.k, ADDRESSES.v)
    other.launch(0x51, ADDRESSES, SCRATCH, *OF_LISTS, bytes(8), bytes(8), [])
    assert [(x[0], x[2][0]) for x in device.maps] == list(zip(places, (E, EV, E, EV), strict=True))


@pytest.mark.parametrize("call", (FLEX, BACKWARD), ids=("forward", "backward"))
def test_nothing_is_built_in_a_capture(device: Device, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    def not_loaded(spec: Any, device: int, capturing: Any) -> Any:
        assert capturing()
        raise KernelNotReadyError("not loaded")

    monkeypatch.setattr(jit, "get_kernel", not_loaded)
    with pytest.raises(KernelNotReadyError):
        (PreparedMhaForward if call is FLEX else PreparedMhaBackward)(call, lambda: True)
    assert not device.built
