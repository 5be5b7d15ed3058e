"""The columns of the tables: a heading and how a result row fills it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Cells = list[list[str]]
"""A table: the headings, then the rows."""
EMPTY = "-"
OURS = "rawmla"
CUDNN, FLASH_ATTENTION_4 = "cuDNN", "FlashAttention-4"


@dataclass(frozen=True)
class Column:
    """One column. A cell is never empty: EMPTY stands where a row has no such figure."""

    heading: str
    cell: Callable[[Row], str]


def _number(heading: str, key: str, digits: int = 0, scale: float = 1.0) -> Column:
    return Column(heading, lambda row: f"{row[key] * scale:.{digits}f}" if key in row else EMPTY)


def _share(row: Row) -> str:
    return f"{100 * row['share']:.0f} % {row['roof']}" if "share" in row else EMPTY


def _gathered(row: Row) -> str:
    return f"{row['gathered_us']:.1f} ({row['gather_us']:.1f})" if "gathered_us" in row else EMPTY


def _forward_share(row: Row) -> float:
    """FlashAttention-4's time over cuDNN's, about what earlier runs with both found."""
    return 0.75 if row["d_qk"] == 96 else 0.90


def _backward_share(row: Row) -> float:
    """As `_forward_share`. cuDNN is slow with 192/128 and no mask."""
    if row["d_qk"] == 192 and not row["causal"]:
        return 0.57
    return {96: 0.75, 256: 1.11}.get(row["d_qk"], 0.87)


def _stand_in(way: str, key: str, share: Callable[[Row], float]) -> Column:
    """What stands for FlashAttention-4 where only cuDNN ran beside: a share of cuDNN's time."""

    def cell(row: Row) -> str:
        beside = row.get("beside", {})
        if FLASH_ATTENTION_4 in beside or key not in beside.get(CUDNN, {}):
            return EMPTY
        return f"{share(row) * beside[CUDNN][key] / beside[OURS][key]:.3f}"

    return Column(f"stand-in for {FLASH_ATTENTION_4} / ours, {way}", cell)


def _stand_ins(share: Callable[[Row], float]) -> tuple[Column, Column]:
    return _stand_in("rested", "us", share), _stand_in("sustained", "sustained_us", share)


NAME = Column("case", lambda row: str(row["case"]))
RESTED = _number("rested µs", "us", 1)
WITHOUT_RESTS = _number("no rests µs", "unrested_us", 1)
SUSTAINED = _number("sustained µs", "sustained_us", 1)
SHARE = Column("share of roof", _share)
RATES = (_number("TFLOP/s", "tflops"), _number("GB/s", "gbps"), SHARE)
SHORT = (RESTED, WITHOUT_RESTS, SUSTAINED, SHARE)
"""Of attention, on a terminal."""
EVERY_WAY = (
    RESTED,
    WITHOUT_RESTS,
    SUSTAINED,
    _number("W", "sustained_watts"),
    _number("mJ", "sustained_mj", 2),
    _number("MHz", "sustained_mhz"),
)
ATTENTION = (*EVERY_WAY, _number("cold L2 µs", "cold_us", 1), *RATES)
DECODE = (*ATTENTION, _number("metadata µs", "meta_us", 1))
PREFIX = (*EVERY_WAY, *RATES)
MHA = (*PREFIX, *_stand_ins(_forward_share))
FLEX = PREFIX
BACKWARD = (
    *PREFIX,
    _number("deterministic rested µs", "deterministic_us", 1),
    _number("deterministic / plain", "deterministic_ratio", 3),
    Column("timed as", lambda row: EMPTY if "us" not in row else "calls" if "beside" in row else "graphs"),
)
MHA_BACKWARD = (*BACKWARD, *_stand_ins(_backward_share))
FLEX_BACKWARD = (*BACKWARD, _number("captured gradient / none", "captured_ratio", 3))
BLOCK_MASKS = (_number("µs", "us", 1), _number("one call with its wait µs", "call_us", 1))
PREFILL = (*ATTENTION, Column("gathered first µs (gather)", _gathered))
METADATA = (_number("µs", "us", 2),)
AROUND = (_number("µs", "us", 1), _number("GB/s", "gbps"), Column("share of copy", _share))


def texts(columns: Iterable[Column], rows: Iterable[Row]) -> Cells:
    """The headings, then the cells of every row."""
    columns = list(columns)
    return [[column.heading for column in columns]] + [
        [column.cell(row) for column in columns] for row in rows
    ]
