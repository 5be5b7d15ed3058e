"""What the host side of the backward of flex attention works out for its launches, without a GPU."""

from __future__ import annotations

import itertools
import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from test_flex_calls import EV, HKV, HQ, B, E, L, S, read_struct, steps

from rawmla import jit
from rawmla.errors import KernelNotReadyError
from rawmla.flex.functions import header_of
from rawmla.flex.mods import CudaMod
from rawmla.jit.table import BoundedTable
from rawmla.kernels import block_mask, flex_captured, mha_backward, mha_forward_variants
from rawmla.kernels.block_mask import BlockLists
from rawmla.kernels.flex_captured import CapturedGradient
from rawmla.kernels.mha_backward import (
    BackwardAddresses,
    BackwardCall,
    BackwardMods,
    PreparedMhaBackward,
    params_of,
)
from rawmla.kernels.mha_backward_variants import BY_KEYS, BY_PRODUCT, Needs, flex_spec

LOG2_E = 1 / math.log(2)
ROWS, COLUMNS = 3, 4
Q_BLOCKS = -(-L // 64)
LISTS = BlockLists((steps(1, 1, COLUMNS),) * 2, (steps(1, 1, COLUMNS, ROWS)[:3],) * 2, (9, 2), 1, 1, 128, 128)
HEADER = header_of(None, None)
CALL = BackwardCall(
    device=0, dtype="bfloat16", b=B, k_batches=B, h_q=HQ, h_kv=HKV, d_qk=E, d_v=EV, varlen=False,
    max_seqlen_q=L, max_seqlen_k=S, total_q=L, total_k=S,
    q_strides=(1 << 20, 128, 1 << 15), k_strides=(1 << 21, 128, 1 << 16), v_strides=(1 << 22, 64, 1 << 17),
    out_strides=(1, 8, 16), dout_strides=(1 << 18, 64, 1 << 12), lse_strides=(4, 5, 6),
    dlse_strides=(7, 8, 9),
    dq_strides=(10, 11, 12), dk_strides=(13, 14, 15), dv_strides=(16, 17, 18), softmax_scale=0.25,
    deterministic=False, needs=Needs(True, True, True, False),
    mods=BackwardMods(
        header=HEADER, has_score_mod=False, score_mod_bytes=8, mask_mod_bytes=8, lists=LISTS, captured=(),
        sites=0, scattered=False,
    ),
)  # fmt: skip
ADDRESSES = BackwardAddresses(*range(0x1000, 0xB000, 0x1000))
OF_LISTS = [*range(0xB000, 0xF000, 0x1000)]
CAPTURED = (CapturedGradient(10, "float32"), CapturedGradient(7, "bfloat16"))
SCRATCH = 1 << 20
MAIN = ("mha_backward", "mha_backward_by_product")


class _Kernel:
    """A kernel that is not there; tells what it was prepared with and launched with."""

    def __init__(self, spec: Any, told: list[SimpleNamespace]) -> None:
        self.spec, self.told = spec, told

    def prepare(self, grid: Any, params: bytes, changing: Any, pdl: bool) -> Any:
        def launch(stream: int, *arguments: Any) -> None:
            packed = bytearray(params)
            changing.pack_into(packed, 0, *arguments)
            self.told.append(self._told(grid, bytes(packed), stream, pdl))

        return SimpleNamespace(launch=launch)

    def launch(self, grid: Any, params: bytes, stream: int) -> None:
        self.told.append(self._told(grid, params, stream, False))

    def _told(self, grid: Any, params: bytes, stream: int, pdl: bool) -> SimpleNamespace:
        return SimpleNamespace(
            name=self.spec.name,
            spec=self.spec,
            grid=grid[0],
            rows_of_grid=grid[1],
            params=params,
            stream=stream,
            pdl=pdl,
        )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What is launched, and what is cleared."""
    launched: list[SimpleNamespace] = []

    def clear(address: int, size: int, stream: int, device: int) -> None:
        launched.append(SimpleNamespace(name="clear", address=address, size=size, stream=stream))

    monkeypatch.setattr(jit, "get_kernel", lambda spec, device, capturing: _Kernel(spec, launched))
    monkeypatch.setattr(jit, "require_supported", lambda device: None)
    monkeypatch.setattr(jit, "build", lambda spec: SimpleNamespace(losses=[], meta={"spill_stores": 0}))
    monkeypatch.setattr(jit, "tensor_map", lambda address, *what: address.to_bytes(128, "little"))
    monkeypatch.setattr(jit, "clear", clear)
    monkeypatch.setattr(mha_forward_variants, "_slow", BoundedTable(4))
    return launched


def changed(seqlen_q: int = L, seqlen_k: int = S, **changes: Any) -> BackwardCall:
    """The call with other members, of its `BackwardMods` too."""
    assert CALL.mods is not None
    mods = {name: changes.pop(name) for name in BackwardMods._fields if name in changes}
    lengths = {"max_seqlen_q": seqlen_q, "total_q": seqlen_q, "max_seqlen_k": seqlen_k, "total_k": seqlen_k}
    return CALL._replace(mods=CALL.mods._replace(**mods), **lengths, **changes)


def launch(score_mod: bytes = bytes(8), **changes: Any) -> PreparedMhaBackward:
    made = PreparedMhaBackward(changed(**changes), lambda: False)
    captured = [0x50000 + i for i in range(len(changes.get("captured", ())))]
    made.launch(0x51, ADDRESSES, SCRATCH, *OF_LISTS, score_mod, bytes(8), captured)
    return made


def read(one: Any) -> dict[str, Any]:
    """The parameters of a launch, without those of functions."""
    structs = {
        "mha_backward_prepare": mha_backward.PREPARE_PARAMS,
        "mha_backward_finish": mha_backward.FINISH_PARAMS,
        "block_mask_ranks": block_mask.RANKS_PARAMS,
        "block_mask_scatter": block_mask.SCATTER_PARAMS,
        "flex_captured_finish": flex_captured.CAPTURED_FINISH_PARAMS,
    }
    declared = structs.get(one.name) or params_of((8, 8))
    members = [x for x in declared.members if x.name not in ("score_mod", "mask_mod")]
    return read_struct(SimpleNamespace(size=declared.size, members=members), one.params)


def test_three_kernels(told: list[SimpleNamespace]) -> None:
    made = launch()
    assert [(x.name, x.pdl, x.stream) for x in told] == [
        ("mha_backward_prepare", True, 0x51),
        ("mha_backward", False, 0x51),  # arrays that a function reads are loaded ahead of the wait
        ("mha_backward_finish", True, 0x51),
    ]
    prepare, main, finish = told
    places = B * HQ * Q_BLOCKS
    assert [x.grid for x in told] == [places, B * HKV * 4, places]
    assert main.spec == flex_spec("bfloat16", E, EV, BY_KEYS, HEADER)
    first, second, last = map(read, told)
    names = ("out", "dout", "lse", "dlse")
    assert [first[name] for name in names] == [getattr(ADDRESSES, name) for name in names]
    for name in names:
        strides = tuple(first[f"{name}_stride_{letter}"] for letter in "bsh")
        assert strides == getattr(CALL, f"{name}_strides")
    assert (first["b"], first["heads"], first["seqlen_q"], first["d_v"]) == (B, HQ, L, EV)
    assert first["blocks"] == second["blocks"] == last["blocks"] == B * Q_BLOCKS
    assert first["lse_log2"] == second["lse"] and first["delta"] == second["delta"]
    assert first["dq_accum"] == second["dq_accum"] == last["dq_accum"]
    assert first["turns"] == second["turns"] == second["ranks"] == second["largest"] == 0
    assert first["accum_columns"] == 128 and finish.rows_of_grid == 2 and last["dq"] == ADDRESSES.dq
    expected = {
        "dk": ADDRESSES.dk,
        "dv": ADDRESSES.dv,
        "q_num_blocks": OF_LISTS[0],
        "full_q_indices": OF_LISTS[3],
        "b": B,
        "heads_kv": HKV,
        "group": HQ // HKV,
        "d_qk": E,
        "d_v": EV,
        "seqlen_q": L,
        "seqlen_k": S,
        "tiles_per_head": 4,
        "section": 8,
        "counts_strides": (*LISTS.counts_strides[0], *LISTS.counts_strides[1]),
        "lists_strides": (*LISTS.lists_strides[0], *LISTS.lists_strides[1]),
        "list_rows": (3, 2),  # clipped to the blocks that there are
        "mask_batches": 1,
        "mask_heads": 1,
        "mask_rows": ROWS,
        "mask_columns": COLUMNS,
        "block_rows": 2,
        "block_k": 128,
        "q_blocks": Q_BLOCKS,
        "requests": 1,
    }
    assert {name: second[name] for name in expected} == expected
    parts = sorted((first[name], size) for name, size in (
        ("lse_log2", places * 256), ("delta", places * 256), ("dq_accum", places * 64 * 512),
    ))  # fmt: skip
    ends = [SCRATCH, *[address + size for address, size in parts]]
    assert all(address >= end for (address, _), end in zip(parts, ends, strict=False))
    assert ends[-1] <= SCRATCH + made.scratch_bytes and not any(address % 128 for address, _ in parts)


@pytest.mark.parametrize(
    ("d_qk", "d_v", "columns"), ((40, 64, 64), (96, 96, 96), (70, 128, 96), (96, 130, 128), (200, 64, 256))
)
def test_columns_of_the_sums_of_dq(told: list[SimpleNamespace], d_qk: int, d_v: int, columns: int) -> None:
    """By keys a multiple of 32, by product of 64: of both kernels around, in scratch, and of a grid."""
    narrow = launch(d_qk=d_qk, d_v=d_v, needs=Needs(False, True, True, False))
    made = launch(d_qk=d_qk, d_v=d_v)
    *_, prepare, main, finish = told
    assert main.name == MAIN[max(d_qk, d_v) > 128]
    assert read(prepare)["accum_columns"] == read(finish)["accum_columns"] == columns
    assert read(finish)["d_qk"] == d_qk and finish.rows_of_grid == -(-columns // 64)
    rows = B * HQ * Q_BLOCKS * 64
    assert made.scratch_bytes - narrow.scratch_bytes == 4 * rows * columns


@pytest.mark.parametrize("scale", (0.25, -3.0, 0.0))
def test_scores_in_natural_units(told: list[SimpleNamespace], scale: float) -> None:
    """A function gets scaled scores; without one the exponent scales them. dq and dk are scaled anyhow."""
    launch(softmax_scale=scale, has_score_mod=True)
    launch(softmax_scale=scale)
    for main, score_scale, log2 in ((told[2], scale, LOG2_E), (told[5], 1.0, scale * LOG2_E)):
        found = read(main)
        assert (found["score_scale"], found["scale"]) == (score_scale, scale)
        assert found["softmax_scale_log2"] == pytest.approx(log2, rel=1e-6)
    assert read(told[2])["scale"] == scale


def test_one_batch_of_keys(told: list[SimpleNamespace]) -> None:
    launch(k_batches=1)
    found = read(told[1])
    assert (told[1].grid, found["b"], found["requests"]) == (HKV * 4, 1, B)


def test_without_lists(told: list[SimpleNamespace]) -> None:
    launch(lists=None, deterministic=True)
    assert [x.name for x in told] == ["mha_backward_prepare", "mha_backward", "mha_backward_finish"]
    found = read(told[1])
    assert found["turns"] and not found["ranks"]
    # Nothing is divided by zero.
    assert min(found[name] for name in ("mask_batches", "mask_heads", "block_rows", "block_k")) == 1


@pytest.mark.parametrize("dims", ((128, 64), (256, 256)))
def test_a_fixed_order(told: list[SimpleNamespace], dims: tuple[int, int]) -> None:
    """Ranks are made of the lists before the kernel that needs them, for its tiles."""
    launch(deterministic=True, d_qk=dims[0], d_v=dims[1])
    prepare, clear, scatter, ranks, main, _ = told
    names = ["clear", "block_mask_scatter", "block_mask_ranks", MAIN[dims[0] == 256]]
    assert [x.name for x in told[1:5]] == names
    states = read(scatter)
    assert clear.address == states["states"] == read(ranks)["states"] and clear.size >= ROWS * COLUMNS
    assert (states["kv_num_blocks"], states["full_kv_indices"]) == (OF_LISTS[0], OF_LISTS[3])
    assert (states["rows"], states["columns"], states["list_columns"]) == (COLUMNS, ROWS, (3, 2))
    tiles = 1 if dims[0] == 128 else 2
    assert read(ranks) | {"states": 0, "ranks": 0} == {
        "states": 0, "ranks": 0, "all_rows": ROWS, "rows": ROWS, "columns": COLUMNS,
        "tiles": tiles,
    }  # fmt: skip
    assert read(main)["ranks"] == read(ranks)["ranks"] != 0
    assert read(main)["turns"] == read(prepare)["turns"] != 0


@pytest.mark.parametrize("needs", [*itertools.product((False, True), repeat=4)], ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
def test_some_gradients(told: list[SimpleNamespace], deterministic: bool, needs: Any) -> None:
    """What computes no gradient that is needed is not launched; dq alone has sums and turns."""
    dq, dk, dv, captured = needs
    options: dict[str, Any] = {"needs": Needs(*needs), "deterministic": deterministic}
    if captured:
        options |= {"captured": CAPTURED, "sites": 3, "scattered": True}
    launch(bytes(24), score_mod_bytes=24, **options)
    kernels = [x for x in told if x.name != "clear"]
    assert [x.name for x in kernels] == [
        "mha_backward_prepare",
        *["block_mask_scatter", "block_mask_ranks"] * (deterministic and dq),
        *["mha_backward"] * (dq or dk or dv),
        *["mha_backward_finish"] * dq,
        *["flex_captured_gradients"] * (captured * (1 + deterministic)),
        *["flex_captured_finish"] * (captured * (1 + deterministic)),
    ]
    first = read(kernels[0])
    assert (first["dq_accum"] != 0) == dq and (first["turns"] != 0) == (deterministic and dq)
    for one in kernels:
        if one.name == "mha_backward":
            defines = dict(one.spec.defines)
            assert tuple(defines[f"NEEDS_{name}"] for name in ("DQ", "DK", "DV")) == (dq, dk, dv)


@pytest.mark.parametrize("dims", ((64, 64), (256, 256)))
@pytest.mark.parametrize("needs", (Needs(True, True, True, False), Needs(False, False, False, True)))
def test_references(told: list[SimpleNamespace], needs: Needs, dims: tuple[int, int]) -> None:
    """With a score function, rows whose lse is far from 0 get references before anything reads them."""
    captured = CAPTURED if needs.others else ()
    options: dict[str, Any] = {"captured": captured, "sites": 3, "score_mod_bytes": 24, "needs": needs}
    launch(bytes(24), has_score_mod=True, d_qk=dims[0], d_v=dims[1], **options)
    prepare, references, *others = told
    assert (references.name, references.pdl) == ("flex_row_references", True)
    assert references.grid == prepare.grid == B * HQ * Q_BLOCKS
    reader = next(x for x in others if x.name in (MAIN[dims[0] == 256], "flex_captured_gradients"))
    first, second = read(references), read(reader)
    assert read(prepare)["weights"] == 0 and read(prepare)["lse_log2"] == first["lse"]
    assert first["weights"] not in (0, first["lse"], first["delta"])
    assert all(first[name] == second[name] for name in ("lse", "delta", "weights", "q_map", "k_map"))
    wide = dims == (256, 256) and needs.main  # tiles of keys as in the main kernel
    assert dict(references.spec.defines)["TILE_KEYS"] == (64 if wide else 128)


def test_captured_gradients(told: list[SimpleNamespace]) -> None:
    """In place where they are float32; else in scratch, and brought to their dtype."""
    launch(bytes(24), captured=CAPTURED, sites=3, score_mod_bytes=24)
    first, second, captured, finish = told[3:]
    assert [x.name for x in told[3:]] == ["clear", "clear", "flex_captured_gradients", "flex_captured_finish"]
    assert (first.address, first.size) == (0x50000, 40) and second.size == 28
    assert SCRATCH <= second.address
    at = next(x for x in params_of((24, 8)).members if x.name == "score_mod").offset
    assert struct.unpack_from("<3Q", captured.params, at) == (0, first.address, second.address)
    assert (captured.grid, captured.pdl) == (B * HKV * 4, False)
    assert dict(captured.spec.defines)["PASS"] == flex_captured.IN_ANY_ORDER
    found = read(finish)
    assert (found["sums"], found["out"], found["count"], found["dtype"]) == (second.address, 0x50001, 7, 1)
    assert not found["largest"] and found["sums_are"] == flex_captured.FLOATS
    # The main kernel adds to none.
    assert struct.unpack_from("<3Q", told[1].params, at) == (0, 0, 0)


MANY = (CapturedGradient(1 << 20, "float32"), CapturedGradient(1, "bfloat16"))


@pytest.mark.parametrize(("captured", "scattered"), ((CAPTURED, True), (MANY, False)))
def test_captured_gradients_in_a_fixed_order(
    told: list[SimpleNamespace], captured: Any, scattered: bool
) -> None:
    """In units of the largest, where scores are added one by one or elements are many."""
    launch(
        bytes(24), captured=captured, sites=3, scattered=scattered, score_mod_bytes=24, lists=None,
        deterministic=True,
    )  # fmt: skip
    largest, first, second, *passes, one, other = told[3:]
    assert [x.size for x in (largest, first, second)] == [8, *[16 * x.elements for x in captured]]
    assert [dict(x.spec.defines)["PASS"] for x in passes] == [flex_captured.LARGEST, flex_captured.IN_UNITS]
    assert passes[0].params == passes[1].params
    terms = 3 * B * HQ * L * S
    for i, finish in enumerate((one, other)):
        found = read(finish)
        assert (found["largest"], found["out"]) == (largest.address + 4 * i, 0x50000 + i)
        assert found["sums_are"] == flex_captured.CELLS
        assert 2 ** found["terms_log2"] >= terms > 2 ** (found["terms_log2"] - 1)


def test_captured_gradients_digit_by_digit(told: list[SimpleNamespace]) -> None:
    """One pass; 32 elements take 3,200 bytes."""
    captured = (CapturedGradient(33, "float32"), CapturedGradient(7, "bfloat16"))
    launch(bytes(24), captured=captured, sites=3, score_mod_bytes=24, lists=None, deterministic=True)
    first, second, one_pass, *finish = told[3:]
    assert [x.size for x in (first, second)] == [6400, 3200] and first.address % 128 == 0
    assert dict(one_pass.spec.defines)["PASS"] == flex_captured.IN_DIGITS
    at = next(x for x in params_of((24, 8)).members if x.name == "score_mod").offset
    assert struct.unpack_from("<3Q", one_pass.params, at) == (0, first.address, second.address)
    for i, (one, sums) in enumerate(zip(finish, (first, second), strict=True)):
        found = read(one)
        assert (found["sums"], found["largest"], found["out"]) == (sums.address, 0, 0x50000 + i)
        assert found["sums_are"] == flex_captured.DIGITS


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
    told: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, spilled: int, losses: list[str], form: Any
) -> None:
    built: list[Any] = []

    def build(spec: Any) -> Any:
        built.append(spec)
        return SimpleNamespace(losses=losses, meta={"spill_stores": spilled})

    monkeypatch.setattr(jit, "build", build)
    for _ in range(2):
        launch()
    assert {x.spec for x in told if x.name in MAIN} == {flex_spec("bfloat16", E, EV, form, HEADER)}
    assert len(built) == 1 and read(told[1])["tiles_per_head"] == -(-S // form.tile_keys)


def test_wide_heads_have_one_form(told: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "build", lambda spec: pytest.fail("there is nothing to choose"))
    launch(d_qk=192)
    assert told[1].spec == flex_spec("bfloat16", 192, EV, BY_PRODUCT, HEADER)


def test_nothing_is_built_in_a_capture(told: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    def not_loaded(spec: Any, device: int, capturing: Any) -> Any:
        assert capturing()
        raise KernelNotReadyError("not loaded")

    monkeypatch.setattr(jit, "get_kernel", not_loaded)
    monkeypatch.setattr(jit, "build", lambda spec: pytest.fail("built in a capture"))
    with pytest.raises(KernelNotReadyError):
        PreparedMhaBackward(CALL, lambda: True)


def test_kernels_do_not_depend_on_sizes(told: list[SimpleNamespace]) -> None:
    for changes in (
        {},
        {"b": 7, "k_batches": 1, "h_q": 4, "seqlen_q": 1, "seqlen_k": 10_000},
        {"softmax_scale": 0.5, "lists": None},
        {"d_qk": 120, "d_v": 50, "deterministic": True},
    ):
        launch(**changes)
    assert len({x.spec for x in told if x.name in MAIN}) == 1
    text = header_of(None, CudaMod("q_idx > kv_idx").mod())
    for changes in ({"dtype": "float16"}, {"d_v": 65}, {"header": text}):
        launch(**changes)
    assert len({x.spec for x in told if x.name in MAIN}) == 4


def test_maps_are_kept(told: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[Any] = []
    monkeypatch.setattr(jit, "tensor_map", lambda *what: mapped.append(what) or bytes(128))
    made = launch()
    made.launch(0x51, ADDRESSES, SCRATCH, *OF_LISTS, bytes(8), bytes(8), [])
    q, dout, k, v = mapped
    assert [what[0] for what in mapped] == [ADDRESSES.q, ADDRESSES.dout, ADDRESSES.k, ADDRESSES.v]
    assert [what[2][0] for what in mapped] == [E, EV, E, EV]
