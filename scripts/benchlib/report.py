"""Tables of results: for the terminal (rich) and for the README (Markdown)."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .against import geometric_mean, ratios
from .cases import D_V, group_of


def progress_bar(console: Console) -> Progress:
    """Progress with a bar, the count and the elapsed time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def best_ceilings(ceilings: list[dict[str, float]]) -> dict[str, float]:
    """The higher of the ceilings measured before and after the cases: the harder roof to be compared with."""
    return {key: max(c[key] for c in ceilings) for key in ceilings[0]}


def roof_share(row: dict[str, Any], ceilings: dict[str, float]) -> tuple[float, str]:
    """The nearer roof and how much of it a row reaches: its least possible time there over its time."""
    compute = row["tflops"] / ceilings["matmul_tflops"]
    memory = row["gbps"] / ceilings["copy_gbps"]
    return (compute, "matmul") if compute >= memory else (memory, "copy")


def intensity(row: dict[str, Any]) -> float:
    """Operations per byte of a row, from its rates."""
    return row["tflops"] * 1e3 / row["gbps"]


def add_shares(rows: list[dict[str, Any]], ceilings: dict[str, float]) -> None:
    """Write `share` and `roof` into every decode row."""
    for row in rows:
        if row["op"] == "dense_decode":
            row["share"], row["roof"] = roof_share(row, ceilings)


def _case_cells(row: dict[str, Any]) -> list[str]:
    causal = "yes" if row["causal"] else "no"
    lengths = "varied" if row["varlen"] else "fixed"
    if row["batch_invariant"]:
        lengths += ", batch-invariant"
    return [str(row["b"]), str(row["s_q"]), str(row["s_k"]), str(row["h_q"]), causal, row["dtype"], lengths]


CASE_HEADINGS = ["b", "s_q", "s_k", "h_q", "causal", "dtype", "lengths"]
RESULT_HEADINGS = ["µs", "cold L2 µs", "TFLOP/s", "GB/s", "share of roof", "metadata µs"]


def _result_cells(row: dict[str, Any]) -> list[str]:
    cold = f"{row['cold_us']:.1f}" if "cold_us" in row else "-"
    share = f"{100 * row['share']:.0f} % {row['roof']}"
    return [
        f"{row['us']:.1f}",
        cold,
        f"{row['tflops']:.0f}",
        f"{row['gbps']:.0f}",
        share,
        f"{row['meta_us']:.1f}",
    ]


def _peer_cell(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "-"


def decode_table(rows: list[dict[str, Any]], stored: list[dict[str, Any]]) -> Table:
    """Decode rows for the terminal, with the ratio to each stored label and the peers' times."""
    rows = [row for row in rows if row["op"] == "dense_decode"]
    compared = [ratios(stored, row) for row in rows]
    labels = list(dict.fromkeys(label for found in compared for label in found))
    peers = list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))
    table = Table(title="Dense decode (main kernel and combine; metadata apart)")
    for heading in CASE_HEADINGS + RESULT_HEADINGS + [f"{label} µs / ours" for label in labels] + peers:
        table.add_column(heading, justify="right")
    for row, found in zip(rows, compared, strict=True):
        ratio_cells = [f"{found[label]:.2f}x" if label in found else "-" for label in labels]
        peer_cells = [_peer_cell(row.get("peers", {}).get(name)) for name in peers]
        table.add_row(*_case_cells(row), *_result_cells(row), *ratio_cells, *peer_cells)
    return table


def metadata_table(rows: list[dict[str, Any]], stored: list[dict[str, Any]]) -> Table:
    """Metadata rows for the terminal."""
    table = Table(title="Metadata kernel")
    for heading in ("batch", "µs", "stored µs / ours"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row["op"] == "metadata":
            found = ratios(stored, row)
            table.add_row(
                str(row["b"]), f"{row['us']:.2f}", ", ".join(f"{k} {v:.2f}x" for k, v in found.items()) or "-"
            )
    return table


def group_means(
    rows: list[dict[str, Any]], stored: list[dict[str, Any]]
) -> dict[str, dict[str, tuple[float, float, int]]]:
    """Per stored label and family of cases: geometric mean, smallest ratio and number of rows."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for label, ratio in ratios(stored, row).items():
            values.setdefault(label, {}).setdefault(group_of(row), []).append(ratio)
    return {
        label: {group: (geometric_mean(found), min(found), len(found)) for group, found in groups.items()}
        for label, groups in values.items()
    }


def means_table(rows: list[dict[str, Any]], stored: list[dict[str, Any]]) -> Table:
    """group_means for the terminal."""
    table = Table(title="Stored µs / ours, by family (above 1: this run is faster)")
    for heading in ("stored", "cases", "geometric mean", "smallest", "rows"):
        table.add_column(heading, justify="right")
    for label, groups in group_means(rows, stored).items():
        for group, (mean, smallest, count) in groups.items():
            table.add_row(label, group, f"{mean:.3f}x", f"{smallest:.3f}x", str(count))
    return table


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """A GitHub table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def markdown_results(rows: list[dict[str, Any]]) -> str:
    """Decode and metadata tables of one run, for the README."""
    decode = [_case_cells(row) + _result_cells(row) for row in rows if row["op"] == "dense_decode"]
    metadata = [row for row in rows if row["op"] == "metadata"]
    parts = []
    if decode:
        parts.append(markdown_table(CASE_HEADINGS + RESULT_HEADINGS, decode))
    if metadata:
        headings = ["metadata kernel, batch", *(str(row["b"]) for row in metadata)]
        parts.append(markdown_table(headings, [["µs", *(f"{row['us']:.1f}" for row in metadata)]]))
    return "\n\n".join(parts)


def describe_ceilings(ceilings: list[dict[str, float]]) -> str:
    """One line on the ceilings before and after."""
    matmul = " and ".join(f"{c['matmul_tflops']:.0f}" for c in ceilings)
    copy = " and ".join(f"{c['copy_gbps'] / 1e3:.2f}" for c in ceilings)
    return (
        f"ceilings of this run, before and after: bf16 8192^3 matmul {matmul} TFLOP/s, "
        f"elementwise copy {copy} TB/s"
    )


METHOD = (
    "CUDA graph of 10 identical calls after half a second of rest, median over replays; FLOPs = "
    f"2 * s_q * h_q * sum(lengths) * (d_qk + {D_V}); bytes = cache read once + q + out. Identical calls find "
    "data that fits in L2 there, as in most published figures; 'cold L2' rotates page sets larger than L2 "
    "instead, where one call's data would fit. Metadata: slope between graphs of 20 and 120 calls. Share: of "
    "the nearer roof, with the higher of the two ceilings of the run."
)
