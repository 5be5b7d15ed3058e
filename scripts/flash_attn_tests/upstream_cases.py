"""pytest plugin: run flash-attention's own test files on rawmla, a sample of their cases.

    python -m pytest -p upstream_cases files/tests/test_flash_attn.py --sample 400

With a GPU the files run there. Without one they run on rawmla's emulated device: CPU tensors stand for CUDA
tensors, and the options below keep the cases small. The files stay as they are.

What rawmla does not have is left out, and counted at the end:
  dropout_p > 0, has_qv, FP8 without a cache or with rotary embeddings, attention_chunk, head dimensions of
  v above 256, and the test of a RuntimeError that needs a wait for the GPU (block_table_bounds).
So is upstream's bw_compatibility, which its own schema of bwd does not meet.
`--all-limits` keeps them, to see the errors.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

HERE = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
left_out: Counter[str] = Counter()
Case = dict[str, Any]
Row = tuple[Any, ...]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("upstream")
    group.addoption("--sample", type=int, default=0, help="about how many cases of a file; 0: all")
    group.addoption("--seed", type=int, default=1, help="which sample")
    group.addoption("--tokens", type=int, default=0, help="longest query or key sequence; 0: any")
    group.addoption("--work", type=int, default=0, help="most queries times keys; 0: any")
    group.addoption("--repeats", type=int, default=0, help="most repeats of loops that look for races")
    group.addoption("--part", default="1/1", help="2/5: the second of five parts of the cases")
    group.addoption("--all-limits", action="store_true", help="keep the cases that rawmla refuses")


# ---------------------------------------------------------------- which cases


def is_fp8(x: Any) -> bool:
    return getattr(x, "dtype", x) is torch.float8_e4m3fn


def refused(function: str, case: Case) -> str | None:
    """Why rawmla does not have a case, or None."""
    if function.endswith("block_table_bounds"):
        return "block_table_bounds"
    if function.endswith("bw_compatibility"):
        return "bw_compatibility: upstream's own schema of bwd has 5 results, the test wants 8"
    if case.get("dropout_p"):
        return "dropout_p"
    if case.get("has_qv"):
        return "qv"
    if is_fp8(case.get("dtype")) and "kvcache" not in function:
        return "FP8 without a cache"
    if is_fp8(case.get("dtype")) and case.get("rotary_fraction"):
        return "FP8 with rotary embeddings"
    return None


def is_skipped(case: Case) -> Any:
    """Whether upstream's test skips a case; a sample would waste its place."""
    get = case.get
    paged = get("paged_kv_block_size", get("page_size"))
    fa2 = "paged_kv_block_size" in case
    return (
        get("new_kv")
        and get("seqlen_q", 0) > get("seqlen_k", 0)
        or "new_kv" in case
        and not get("new_kv")
        and get("rotary_fraction", 0) > 0
        or fa2
        and "new_kv" in case
        and paged is not None
        and (get("has_batch_idx") or get("has_leftpad"))
        or "page_size" in case
        and paged is not None
        and get("seqlen_k") % paged
        or (get("softcap") or 0) > 0
        and (get("dropout_p") or 0) > 0
        or get("has_qv")
        and (get("d") != 64 or is_fp8(get("dtype")))
    )


def is_too_big(config: pytest.Config, case: Case) -> Any:
    tokens, work = config.getoption("tokens"), config.getoption("work")
    length = case.get("seqlen") or 1
    q, k = case.get("seqlen_q") or length, case.get("seqlen_k") or length
    return tokens and max(q, k) > tokens or work and q * k > work


def tables_of(metafunc: pytest.Metafunc) -> Iterator[tuple[list[str], list[Row]]]:
    """The parameters of a test: [(names, values)]."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        values = mark.args[1]
        yield names, [tuple(v) if len(names) > 1 else (v,) for v in values]


def share_of(config: pytest.Config, function: str) -> int:
    """Cases of a function: those of caches and the two main ones get more."""
    total = config.getoption("sample")
    parts = {"kvcache": 6, "varlen_output": 4, "output": 4, "splitkv": 2, "combine": 2, "varlen_causal": 3}
    for word, part in parts.items():
        if function == f"test_flash_attn_{word}":
            return max(1, total * part // 26)
    return max(1, total // 26)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config, function = metafunc.config, metafunc.function.__name__
    tables = list(tables_of(metafunc))
    limits = config.getoption("all_limits")
    if not tables:
        return
    names = [n for group, _ in tables for n in group]
    chooser = random.Random(f"{function}{config.getoption('seed')}")

    def case_of(row: Row) -> Case:
        return dict(zip(names, itertools.chain.from_iterable(row), strict=True))

    def is_good(case: Case) -> bool:
        return not (is_skipped(case) or is_too_big(config, case) or not limits and refused(function, case))

    if not config.getoption("sample"):
        rows = [row for row in itertools.product(*[v for _, v in tables])]
        for row in rows:
            if not limits and (why := refused(function, case_of(row))):
                left_out[why] += 1
        chosen = [row for row in rows if is_good(case_of(row))]
    else:
        chosen = covering(
            chooser, [v for _, v in tables], lambda row: is_good(case_of(row)), share_of(config, function)
        )
        if not chosen:
            left_out[f"{function}: no case is small enough, or supported"] += 1
    metafunc.definition.own_markers[:] = [
        m for m in metafunc.definition.own_markers if m.name != "parametrize"
    ]
    cases = [case_of(row) for row in chosen]
    ids = ["-".join(f"{n}:{str(c[n]).removeprefix('torch.')}" for n in names) for c in cases]
    metafunc.parametrize(names, [tuple(c[n] for n in names) for c in cases], ids=ids)


def covering(
    chooser: random.Random, tables: list[list[Row]], is_good: Callable[[Row], bool], count: int
) -> list[Row]:
    """At most `count` rows that meet each value, if it has a good row at all, and many pairs of values."""
    seen: set[Any] = set()
    rows: list[Row] = []

    def news(row: Row) -> tuple[int, list[Any]]:
        singles = [(i, repr(v)) for i, v in enumerate(row)]
        pairs = list(itertools.combinations(singles, 2))
        return 1000 * sum(s not in seen for s in singles) + sum(p not in seen for p in pairs), singles + pairs

    def draw() -> Row | None:
        for _ in range(200):
            row = tuple(chooser.choice(values) for values in tables)
            if is_good(row):
                return row
        return None

    def draw_with(i: int, value: Row) -> Row | None:
        for _ in range(300):
            row = tuple(value if i == j else chooser.choice(values) for j, values in enumerate(tables))
            if is_good(row):
                return row
        return None

    def take(row: Row) -> None:
        seen.update(news(row)[1])
        rows.append(row)

    while len(rows) < count:
        candidates = [row for row in (draw() for _ in range(30)) if row is not None]
        if not candidates:
            break
        best = max(candidates, key=lambda row: news(row)[0])
        if not news(best)[0]:
            break
        take(best)
    for i, values in enumerate(tables):
        for value in values:
            if (i, repr(value)) not in seen and (row := draw_with(i, value)) is not None:
                take(row)
    return rows


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    part, parts = map(int, config.getoption("part").split("/"))
    others = [item for i, item in enumerate(items) if i % parts != part - 1]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for i, item in enumerate(items) if i % parts == part - 1]
    if config.getoption("all_limits"):
        return
    dropped = {item: why for item in items if (why := refused(item.function.__name__, {}))}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
    left_out.update(dropped.values())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for why, count in left_out.items():
        terminalreporter.write_line(f"left out: {count} cases, {why}")


# ---------------------------------------------------------------- inside of a test


def product_of_supported(*lists: Any, **options: Any) -> Iterator[Any]:
    """itertools.product of the tests of FlashAttention-3: without d_v above 256 and attention_chunk."""
    frame = sys._getframe(1)
    names: Any = frame.f_locals
    sizes_of_v: Any = names.get("dv_vals")
    chunks: Any = names.get("attention_chunk_vals")
    kept: list[Any] = []
    for given in lists:
        values: Any = given
        if values is sizes_of_v:
            left_out["a d_v above 256, in a loop"] += sum(v > 256 for v in values)
            values = [v for v in values if v <= 256]
        elif values is chunks:
            left_out["attention_chunk, in a loop"] += sum(v > 0 for v in values)
            values = [v for v in values if v == 0]
        kept.append(values)
    return itertools.product(*kept, **options)


@pytest.fixture(autouse=True)
def upstream_module(request: pytest.FixtureRequest) -> Iterator[None]:
    config, module = request.config, request.module
    with contextlib.ExitStack() as stack:

        def put(name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value, create=True))

        if not config.getoption("all_limits") and hasattr(module, "itertools"):
            put("itertools", SimpleNamespace(product=product_of_supported))
        if repeats := config.getoption("repeats"):

            def few_of_one(*bounds: int) -> range:
                if len(bounds) == 1 and bounds[0] >= 50:
                    bounds = (repeats,)
                return builtins.range(*bounds)

            put("range", few_of_one)
        yield


# ---------------------------------------------------------------- the emulated device

FACTORIES = "arange empty full ones rand randint randn randperm tensor zeros".split()


def in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a Python float in float32, as a GPU does: tests take their bounds from x + 0.3 - 0.3."""

    def wrapped(x: Any, y: Any, *others: Any, **options: Any) -> Any:
        if isinstance(y, float) and x.dtype in (torch.float16, torch.bfloat16):
            return method(x.float(), y, *others, **options).to(x.dtype)
        return method(x, y, *others, **options)

    return wrapped


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        if str(options.get("device")) == "cuda":
            options["device"] = "cpu"
        if make is EMPTY and args and isinstance(args[0], int) and args[0] > 2**32:
            args = (1, *args[1:])  # memory to put the GPU under load
        return make(*args, **options)

    return wrapped


EMPTY = torch.empty
_stack = contextlib.ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    if HAS_GPU:
        return
    from emulator import Emulator

    put = mock.patch.object
    for name in FACTORIES:
        _stack.enter_context(put(torch, name, on_cpu(getattr(torch, name))))
    for name in ("__add__", "__sub__"):
        _stack.enter_context(put(torch.Tensor, name, in_float32(getattr(torch.Tensor, name))))
    properties = SimpleNamespace(total_memory=141 << 30, multi_processor_count=4, major=9, minor=0)
    for name, value in {
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_available": lambda: True,
        "manual_seed_all": lambda seed: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }.items():
        _stack.enter_context(put(torch.cuda, name, value))
    folder = Path(os.environ.get("UPSTREAM_BUILD", HERE / "build"))
    _stack.enter_context(Emulator(folder).installed())


def pytest_unconfigure(config: pytest.Config) -> None:
    _stack.close()
