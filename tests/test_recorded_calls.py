"""The recorded calls of engines (tests/contracts), without a GPU: rawmla's functions take them, and their
views are what was recorded.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from calls.fakes import FakeArray, make_world
from contract_calls import Recorded, attention_calls, functions_of, recorded

from rawmla.engines import sglang, vllm
from rawmla.mla.plan import FlashMLASchedMeta

torch = pytest.importorskip("torch")


def test_every_engine_and_call_site_is_there() -> None:
    """As in the list of docs/engines.md, in every version that the plug-ins name as tested."""
    newest = {"0.33.0", "0.5.23"}
    found = Counter((call.engine, call.function) for call in recorded() if newest & {*call.versions})
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
    versions: dict[str, set[str]] = {}
    for call in recorded():
        versions.setdefault(call.engine, set()).update(call.versions)
    tested = {"vllm": vllm, "vllm-backend": vllm, "sglang": sglang}
    assert versions == {name: {*plug_in.ENGINE.tested} for name, plug_in in tested.items()}
    assert {call.source for call in recorded()} == {"recorded", "read"}
    assert len({call.id for call in recorded()}) == len(recorded())


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
