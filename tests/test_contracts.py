"""The recorded calls of engines (tests/contracts), without a GPU: rawmla's functions take them, and their views
hold what the recorded strides say.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
from contract_calls import Call, Recorded, attention_calls, recorded

from rawmla import reference
from rawmla.compat.flash_mla import flash_mla_interface
from rawmla.mla.plan import FlashMLASchedMeta

torch = pytest.importorskip("torch")


def test_every_engine_and_call_site_is_there() -> None:
    """As in the list of docs/engines.md."""
    found = Counter((call.engine, call.function) for call in recorded())
    assert found == {
        ("vllm", "get_mla_metadata"): 12,
        ("vllm", "flash_mla_with_kvcache"): 17,
        ("vllm", "flash_mla_sparse_fwd"): 10,
        ("sglang", "get_mla_decoding_metadata"): 5,
        ("sglang", "flash_mla_with_kvcache"): 8,
        ("sglang", "flash_mla_sparse_fwd"): 3,
    }
    assert {call.source for call in recorded()} == {"recorded", "read"}
    assert len({call.id for call in recorded()}) == len(recorded())


@pytest.mark.parametrize("record", recorded(), ids=[record.id for record in recorded()])
def test_the_drop_in_takes_the_arguments(record: Recorded) -> None:
    """By position and by name as recorded, each under the name that the engine means."""
    function = getattr(flash_mla_interface, record.function)
    values = list(record.arguments.values())
    names = list(record.arguments)
    if record.function == "get_mla_metadata":  # any arguments; the engine gives them unnamed
        inspect.signature(function).bind(*record.arguments.get("args", ()), **record.arguments.get("kwargs", {}))
        return
    bound = inspect.signature(function).bind(
        *values[: record.positional],
        **dict(zip(names[record.positional :], values[record.positional :], strict=True)),
    )
    assert bound.arguments == record.arguments


def _small(record: Recorded) -> bool:
    """Of a size that the reference in NumPy computes within seconds."""
    q = record.arguments["q"]["shape"]
    indices = record.arguments.get("indices")
    keys = 1024 if indices is None else indices["shape"][-1]
    rows = 1
    for n in q[:-1]:
        rows *= n
    return rows * keys <= 400_000


SMALL = [record for record in attention_calls() if _small(record)]


class Reference:
    """The functions by FlashMLA's names, computed by `rawmla.reference`."""

    FlashMLASchedMeta = FlashMLASchedMeta

    @staticmethod
    def get_mla_decoding_metadata(lengths: Any, *arguments: Any) -> tuple[Any, Any]:
        """Arrays of the right shapes, which the reference does not read."""
        return torch.zeros(66, 8, dtype=torch.int32), torch.zeros(len(lengths) + 1, dtype=torch.int32)

    @staticmethod
    def flash_mla_with_kvcache(**arguments: Any) -> Any:
        for name in ("use_legacy", "kv_format", "descale_q", "descale_k"):
            arguments.pop(name, None)
        arguments["tile_scheduler_metadata"] = None
        return reference.flash_mla_with_kvcache(**arguments)

    @staticmethod
    def flash_mla_sparse_fwd(*values: Any, **arguments: Any) -> Any:
        arguments.pop("use_legacy", None)
        base = "2" if arguments.pop("return_log2_lse", None) else "e"
        return reference.flash_mla_sparse_fwd(*values, **arguments, log_base=base)


@pytest.mark.parametrize("record", SMALL, ids=[record.id for record in SMALL])
def test_replay_on_the_reference(record: Recorded) -> None:
    """What tests/gpu/test_engine_contracts.py does, with both references: views, values and comparison."""
    call = Call(record, Reference, "cpu", exact_keys=True)
    for name, given in record.arguments.items():
        if isinstance(given, dict) and "shape" in given:
            view = call.arguments[name]
            assert (list(view.shape), list(view.stride())) == (given["shape"], given["strides"])
            assert view.storage_offset() == given["offset"]
    call.check(call.run())


def test_a_write_outside_out_is_noticed() -> None:
    record = next(r for r in attention_calls() if r.arguments.get("out") is not None and _small(r))
    call = Call(record, Reference, "cpu", exact_keys=True)
    got = call.run()
    call.check(got)
    call.parents["out"][-1] = 0
    with pytest.raises(AssertionError, match="outside"):
        call.check(got)
