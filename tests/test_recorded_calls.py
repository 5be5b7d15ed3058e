"""The recorded calls of engines (tests/contracts), without a GPU: rawmla's functions take them, and their
views are what was recorded.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
from calls.fakes import FakeArray, make_world
from contract_calls import Call, Recorded, attention_calls, functions_of, recorded

from rawmla import reference
from rawmla.mla.plan import FlashMLASchedMeta

torch = pytest.importorskip("torch")


def test_every_engine_and_call_site_is_there() -> None:
    """As in the list of docs/engines.md."""
    found = Counter((call.engine, call.function) for call in recorded())
    assert found == {
        ("vllm", "get_mla_metadata"): 12,
        ("vllm", "flash_mla_with_kvcache"): 17,
        ("vllm", "flash_mla_sparse_fwd"): 10,
        ("vllm-backend", "flash_mla_with_kvcache"): 11,
        ("vllm-backend", "flash_mla_sparse_fwd"): 4,
        ("sglang", "get_mla_decoding_metadata"): 5,
        ("sglang", "flash_mla_with_kvcache"): 8,
        ("sglang", "flash_mla_sparse_fwd"): 3,
    }
    assert {call.source for call in recorded()} == {"recorded", "read"}
    assert len({call.id for call in recorded()}) == len(recorded())


# get_mla_metadata takes any arguments.
WITH_NAMES = [record for record in recorded() if record.function != "get_mla_metadata"]


@pytest.mark.parametrize("record", WITH_NAMES, ids=[record.id for record in WITH_NAMES])
def test_the_arguments_are_taken(record: Recorded) -> None:
    """By position and by name as recorded, each under the name that the engine means."""
    function = getattr(functions_of(record), record.function)
    values = list(record.arguments.values())
    names = list(record.arguments)
    bound = inspect.signature(function).bind(
        *values[: record.positional],
        **dict(zip(names[record.positional :], values[record.positional :], strict=True)),
    )
    assert bound.arguments == record.arguments


ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint8": 1, "float8_e4m3fn": 1}


def stand_in(value: Any) -> Any:
    """A recorded argument without memory: its shape, strides and alignment."""
    if isinstance(value, list):
        return tuple(map(stand_in, value))
    if not isinstance(value, dict):
        return value
    if "plan" in value:
        filled = {"tile_scheduler_metadata": FakeArray((66, 8)), "num_splits": FakeArray((65,))}
        return FlashMLASchedMeta(**(filled if value["plan"] == "filled by the engine" else {}))
    address = 1 << 20
    return FakeArray(
        tuple(value["shape"]),
        value["dtype"],
        tuple(value["strides"]),
        ptr=address + value["offset"] * ITEMSIZE[value["dtype"]],
    )


@pytest.mark.parametrize("record", attention_calls(), ids=[record.id for record in attention_calls()])
def test_the_views_are_taken_as_they_are(record: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the launch: every check is passed, and no query is copied."""
    world = make_world(monkeypatch)
    arguments = {name: stand_in(value) for name, value in record.arguments.items()}
    values = list(arguments.values())[: record.positional]
    named = dict(list(arguments.items())[record.positional :])
    results = getattr(functions_of(record), record.function)(*values, **named)
    assert world.framework.copied == []
    assert len(world.decodes) + len(world.sparse) == 1
    given = arguments.get("out")
    assert given is None or results[0] is given


def _small(record: Recorded) -> bool:
    """Of a size that the reference in NumPy computes within seconds."""
    q = record.arguments["q"]
    q = (q[0] if isinstance(q, list) else q)["shape"]
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
    def flash_mla_with_kvcache(*values: Any, **arguments: Any) -> Any:
        names = list(inspect.signature(reference.flash_mla_with_kvcache).parameters)
        arguments |= dict(zip(names, values, strict=False))
        arguments |= {"q": whole(arguments["q"]), "tile_scheduler_metadata": None}
        for name in ("use_legacy", "kv_format", "descale_q", "descale_k"):
            arguments.pop(name, None)
        return reference.flash_mla_with_kvcache(**arguments)

    @staticmethod
    def flash_mla_sparse_fwd(q: Any = None, *values: Any, **arguments: Any) -> Any:
        for name in ("use_legacy", "enable_batch_invariant"):
            arguments.pop(name, None)
        if "log_base" not in arguments:
            arguments["log_base"] = "2" if arguments.pop("return_log2_lse", None) else "e"
        return reference.flash_mla_sparse_fwd(whole(q), *values, **arguments)


def whole(q: Any) -> Any:
    """A query whose parts may lie apart."""
    return torch.cat(q, dim=-1) if isinstance(q, tuple) else q


@pytest.mark.parametrize("record", SMALL, ids=[record.id for record in SMALL])
def test_replay_on_the_reference(record: Recorded) -> None:
    """What tests/gpu/test_engine_contracts.py does, with both references: views, values and comparison."""
    call = Call(record, Reference, "cpu", exact_keys=True)
    for name, recorded_as in record.arguments.items():
        parts = recorded_as if isinstance(recorded_as, list) else [recorded_as]
        views = call.q_parts if name == "q" else (call.arguments[name],)
        for given, view in zip(parts, views, strict=True):
            if not isinstance(given, dict) or "shape" not in given:
                continue
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
