"""The calls of engines in tests/contracts: their views in memory, values for them, and what they should give.

tests/contracts/record.py writes the files. A view has the recorded shape, strides and storage offset, and
lies in a parent of poison of the recorded size. Works on any device, so that tests/test_recorded_calls.py can
hold it against the reference without a GPU.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_support import POISON_BYTE

import rawmla
from kit import (
    check_close,
    lse_tolerance,
    out_tolerance,
    prefill_lse_tolerance,
    prefill_out_tolerance,
    torch_reference,
)
from kit.generators import GARBAGE_PAGE
from kit.sparse import INT_MAX, INT_MIN, block_fields, row_format
from rawmla import quantize_k_cache, reference
from rawmla.compat.flash_mla import flash_mla_interface
from rawmla.kernels.mla_sparse import FEW_HEADS

CONTRACTS = Path(__file__).resolve().parents[1] / "contracts"
LAYOUT_OF_BYTES = {656: "v32", 584: "model1"}


@dataclass(frozen=True)
class Recorded:
    """One call as an engine made it. `source` is "recorded" or "read": see tests/contracts/record.py."""

    engine: str
    versions: tuple[str, ...]
    site: str
    case: str
    source: str
    function: str
    positional: int
    arguments: dict[str, Any]

    @property
    def id(self) -> str:
        """For pytest."""
        where = f"{self.site.rsplit('.', 1)[1]}, {self.function}"
        return f"{self.engine} {self.versions[-1]}: {self.case} ({where})"


def recorded(folder: Path = CONTRACTS) -> list[Recorded]:
    """All calls of all files, each once with the versions that make it."""
    found = []
    for path in sorted(folder.glob("*.json")):
        file = json.loads(path.read_text())
        for i, call in enumerate(file["calls"]):
            versions = tuple(name for name, numbers in file["versions"].items() if i in numbers)
            found.append(Recorded(path.stem, versions, **call))
    return found


def attention_calls() -> list[Recorded]:
    """Those that compute attention; the others make plans. Of calls that differ only in the memory around
    arrays, or in arguments of None or False, the first.
    """
    different: dict[Any, Recorded] = {}
    for call in recorded():
        if call.function.startswith("flash_mla"):
            given = {
                name: one for name, one in call.arguments.items() if one is not None and one is not False
            }
            views = re.sub(r'"elements": \d+, ', "", json.dumps(given, sort_keys=True))
            different.setdefault((call.engine, call.function, views), call)
    return list(different.values())


def functions_of(record: Recorded) -> Any:
    """The module that is called: rawmla's own backends call rawmla, engines the drop-in for flash_mla."""
    return rawmla if record.engine == "vllm-backend" else flash_mla_interface


class Call:
    """A recorded call with memory of its own; `fill` gives it new values in place."""

    def __init__(self, record: Recorded, module: Any, device: str) -> None:
        import torch

        self.record = record
        self.module = module  # the functions by FlashMLA's names
        self.device = device
        self.parents: dict[str, Any] = {}
        self.arguments = {name: self._placed(name, value) for name, value in record.arguments.items()}
        q = self.arguments["q"]
        self.q_parts = q if isinstance(q, tuple) else (q,)  # the columns without and with RoPE may lie apart
        self.is_prefill = record.function == "flash_mla_sparse_fwd"
        self.cache = self.arguments["kv" if self.is_prefill else "k_cache"]
        self.is_sparse = self.arguments.get("indices") is not None
        self.random = torch.Generator(device=device)
        self.fill(0)

    def _placed(self, name: str, value: Any) -> Any:
        """A tensor where a view was recorded, within poison; plans are made by each run."""
        import torch

        if isinstance(value, list):
            return tuple(self._placed(f"{name}[{i}]", one) for i, one in enumerate(value))
        if not isinstance(value, dict) or "shape" not in value:
            return value
        dtype = getattr(torch, value["dtype"])
        size = value["elements"] * dtype.itemsize
        parent = torch.full((size,), POISON_BYTE, dtype=torch.uint8, device=self.device)
        self.parents[name] = parent
        return parent.view(dtype).as_strided(value["shape"], value["strides"], value["offset"])

    # ---- values

    def fill(self, seed: int) -> None:
        """New values everywhere, at the same addresses; what no request names in a cache is NaN.

        After the first values, requests may have as many pages as the rows have room for of which the table
        is a view: engines capture a graph with a few columns, and replay it with longer requests.
        """
        self.random.manual_seed(seed)
        self.table = self.arguments.get("block_table")
        if seed and self.table is not None and self.table.stride(0) > self.table.shape[1] > 0:
            entries = self.parents["block_table"].view(self.table.dtype)
            assert self.table.storage_offset() == 0
            self.table = entries.view(-1, self.table.stride(0))[: len(self.table)]
        for part in self.q_parts:
            part.copy_(self._normal(part.shape).clamp_(-1, 1))
        if self.arguments.get("attn_sink") is not None:
            sink = self.arguments["attn_sink"]
            sink.copy_(self._normal(sink.shape))
            sink[-1] = float("-inf")
        if self.arguments.get("out") is not None:
            self.parents["out"].fill_(POISON_BYTE)
        if not self.is_sparse:
            self._fill_dense()
            return
        self._fill_selected(self.cache, self.arguments["indices"], self.arguments.get("topk_length"))
        if self.arguments.get("extra_k_cache") is not None:
            self._fill_selected(
                self.arguments["extra_k_cache"],
                self.arguments["extra_indices_in_kvcache"],
                self.arguments["extra_topk_length"],
            )

    def _normal(self, shape: Any) -> Any:
        import torch

        return torch.randn(tuple(shape), generator=self.random, device=self.device)

    def _keys(self, shape: Any) -> Any:
        """Values of a cache: as those for which the tolerances are meant."""
        return self._normal(shape).mul_(0.1)

    def _integers(self, low: int, high: int, shape: Any) -> Any:
        import torch

        return torch.randint(low, high, tuple(shape), generator=self.random, device=self.device)

    def _lengths(self, lengths: Any, most: int) -> None:
        """Any length; the first request has them all, and the last of several none."""
        lengths.copy_(self._integers(0, most + 1, lengths.shape))
        lengths[-1] = 0
        lengths[0] = most

    def _fill_dense(self) -> None:
        import torch

        table, lengths = self.table, self.arguments["cache_seqlens"]
        num_blocks, page = self.cache.shape[:2]
        self.cache.fill_(float("nan"))
        table.copy_(self._integers(0, num_blocks, table.shape))
        self._lengths(lengths, table.shape[1] * page)
        for request, length in enumerate(lengths.tolist()):
            token = torch.arange(length, device=self.device)
            place = table[request, token // page].long(), token % page
            self.cache[place] = self._keys((length, *self.cache.shape[2:])).to(self.cache.dtype)
            table[request, -(-length // page) :] = GARBAGE_PAGE

    def _fill_selected(self, cache: Any, indices: Any, lengths: Any) -> None:
        """Slots of which one in ten is none, and rows for those that are."""
        import torch

        paged = cache if cache.ndim == 4 else cache[:, None]  # kv is a cache of pages of one token
        num_blocks, page = paged.shape[:2]
        slots = num_blocks * page
        indices.copy_(self._integers(0, slots, indices.shape))
        nowhere = torch.tensor([-1, INT_MIN, slots, INT_MAX], device=self.device)
        wrong = nowhere[self._integers(0, 4, indices.shape)].to(torch.int32)
        indices.copy_(torch.where(self._integers(0, 10, indices.shape) == 0, wrong, indices))
        if lengths is not None:
            self._lengths(lengths, indices.shape[-1])
        named = torch.zeros(slots, dtype=torch.bool, device=self.device)
        named[indices[(indices >= 0) & (indices < slots)].long()] = True
        unnamed = ~named.view(num_blocks, page)
        layout, form = layout_of(paged)
        if layout == "bf16":
            paged.copy_(self._keys(paged.shape).masked_fill_(unnamed[..., None, None], float("nan")))
            return
        values = self._keys((num_blocks, page, 1, form.d_qk)).bfloat16()
        quantize = quantize_k_cache if paged.is_cuda else reference.quantize_k_cache
        quantize(values, layout, out=paged.view(torch.uint8))
        for fields in block_fields(paged.view(torch.uint8), form):
            if fields is not None:
                fields.masked_fill_(unnamed[..., None], POISON_BYTE)

    # ---- the call

    def plan(self) -> Any:
        """A plan object as the engine makes it: empty, or with arrays in buffers of the engine's."""
        import torch

        given = self.record.arguments["tile_scheduler_metadata"]["plan"]
        made = self.module.FlashMLASchedMeta()
        if given == "filled by the engine":
            rows, splits = self._planned()
            kept = [
                torch.full(shape, -1, dtype=torch.int32, device=self.device) for shape in ((256, 8), (65,))
            ]
            made.tile_scheduler_metadata = kept[0][: rows.shape[0]]
            made.num_splits = kept[1][: splits.shape[0]]
            self.replan(made)
        return made

    def _planned(self) -> tuple[Any, Any]:
        _, s_q, h_q, _ = self.q_parts[0].shape
        lengths = self.arguments["cache_seqlens"]
        topk = self.arguments["indices"].shape[-1] if self.is_sparse else None
        return self.module.get_mla_decoding_metadata(
            lengths, s_q * h_q, 1, h_q if self.is_sparse else None, self.is_sparse, topk, True
        )

    def replan(self, plan: Any) -> None:
        """After `fill`: what the engine does before it replays a graph."""
        if self.record.arguments["tile_scheduler_metadata"]["plan"] == "filled by the engine":
            rows, splits = self._planned()
            plan.tile_scheduler_metadata.copy_(rows)
            plan.num_splits.copy_(splits)

    def run(self, plan: Any = None) -> tuple[Any, ...]:
        """The call, its arguments by position and by name as recorded."""
        arguments = dict(self.arguments)
        if not self.is_prefill:
            arguments["tile_scheduler_metadata"] = self.plan() if plan is None else plan
        values = list(arguments.values())[: self.record.positional]
        named = dict(list(arguments.items())[self.record.positional :])
        result: tuple[Any, ...] = getattr(self.module, self.record.function)(*values, **named)
        return result

    # ---- what it should give

    def want(self) -> tuple[Any, ...]:
        """The float64 reference: out and lse, of prefill out, max_logits and lse."""
        import torch

        a = {**self.arguments, "q": torch.cat(self.q_parts, dim=-1)}
        if not self.is_sparse:
            return torch_reference.flash_mla_with_kvcache(
                a["q"], self.cache, self.table, a["cache_seqlens"], a["softmax_scale"], a["causal"]
            )
        paged = self.cache if self.cache.ndim == 4 else self.cache[:, None]
        layout, form = layout_of(paged)
        inputs: Any = SimpleNamespace(
            case=SimpleNamespace(format=form),
            q=a["q"][:, None] if self.is_prefill else a["q"],
            k_cache=paged,
            indices=a["indices"],
            topk_length=a.get("topk_length"),
            extra_k_cache=a.get("extra_k_cache"),
            extra_indices=a.get("extra_indices_in_kvcache"),
            extra_topk_length=a.get("extra_topk_length"),
            attn_sink=a.get("attn_sink"),
        )
        if self.is_prefill:
            out, top, lse = torch_reference.sparse_prefill(inputs, a["sm_scale"])
            unit = 1.0 if a.get("return_log2_lse") or a.get("log_base") == "2" else log(2.0)
            return out, top * unit, lse * unit
        rounded = layout != "v32" or a["q"].shape[2] > FEW_HEADS
        out, lse = torch_reference.sparse_decode(inputs, a["softmax_scale"], rounded_keys=rounded)
        if inputs.attn_sink is not None:
            out = torch_reference.apply_sink(out, lse, inputs.attn_sink)
        return out, lse

    def check(self, got: tuple[Any, ...]) -> None:
        """Compare results with the reference; a given `out` was written, and nothing around it."""
        import torch

        dtype = self.q_parts[0].dtype
        scores = prefill_lse_tolerance() if self.is_prefill else lse_tolerance()
        names = ("out", "max_logits", "lse") if self.is_prefill else ("out", "lse")
        name = str(dtype).removeprefix("torch.")
        tolerances = [prefill_out_tolerance() if self.is_prefill else out_tolerance(name)]
        tolerances += [scores] * (len(names) - 1)
        assert got[0].dtype == dtype
        for name, one, want, tolerance in zip(names, got, self.want(), tolerances, strict=True):
            check_close(f"{self.record.id} {name}", one, want, tolerance)
        given = self.arguments.get("out")
        if given is not None:
            assert got[0] is given
            parent = self.parents["out"].view(given.dtype)
            outside = torch.ones_like(parent, dtype=torch.bool)
            outside.as_strided(given.shape, given.stride(), given.storage_offset()).fill_(False)
            assert bool((parent.view(torch.int16)[outside] == -1).all()), "written outside `out`"


def layout_of(paged: Any) -> tuple[str, Any]:
    """The layout of a sparse call's cache and the format of its rows."""
    width = paged.shape[-1]
    layout = LAYOUT_OF_BYTES.get(width) if paged.element_size() == 1 else "bf16"
    assert layout is not None, f"a record of {width} bytes"
    return layout, row_format(layout, {"v32": 576, "model1": 512}.get(layout, width))
