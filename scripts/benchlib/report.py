"""Tables of results: for the terminal (rich) and for the README (Markdown)."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .against import geometric_mean, ratios
from .cases import D_V, group_of, is_decode, is_prefill, is_sparse, layout_of


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
    """Write `share` and `roof` into every row of decoding, prefill and the operations around them."""
    for row in rows:
        if "family" in row:
            row["share"], row["roof"] = row["gbps"] / ceilings["copy_gbps"], "copy"
        elif is_decode(row) or is_prefill(row):
            row["share"], row["roof"] = roof_share(row, ceilings)


def _case_cells(row: dict[str, Any]) -> list[str]:
    causal = "yes" if row["causal"] else "no"
    lengths = "varied" if row["varlen"] else "fixed"
    if row["batch_invariant"]:
        lengths += ", batch-invariant"
    return [str(row["b"]), str(row["s_q"]), str(row["s_k"]), str(row["h_q"]), causal, row["dtype"], lengths]


def _sparse_case_cells(row: dict[str, Any]) -> list[str]:
    layout = {"v32": "V3.2", "model1": "MODEL1", "bf16": f"bf16 {row['d_qk']}"}[layout_of(row)]
    topk, page = str(row["topk"]), str(row["page_block_size"])
    if row["extra_topk"]:
        topk += f" + {'up to ' if row['extra_length'] else ''}{row['extra_topk']}"
        page += f" + {row['extra_page_block_size']}"
    layout += ", batch-invariant" if row["batch_invariant"] else ""
    return [layout, str(row["b"]), str(row["s_q"]), str(row["s_k"]), str(row["h_q"]), topk, page]


def _prefill_case_cells(row: dict[str, Any]) -> list[str]:
    layout = {"v32": "V3.2", "bf16": "bf16"}[layout_of(row)]
    return [layout, *(str(row[field]) for field in ("s_q", "s_kv", "h_q", "d_qk", "topk"))]


PREFILL_CASE_HEADINGS = ["kv", "s_q", "s_kv", "h_q", "d_qk", "topk"]
SPARSE_CASE_HEADINGS = ["cache", "b", "s_q", "s_k", "h_q", "topk", "page"]
CASE_HEADINGS = ["b", "s_q", "s_k", "h_q", "causal", "dtype", "lengths"]
RATE_HEADINGS = ["µs", "cold L2 µs", "TFLOP/s", "GB/s", "share of roof"]
RESULT_HEADINGS = [*RATE_HEADINGS, "metadata µs"]
PREFILL_RESULT_HEADINGS = [*RATE_HEADINGS, "gathered first µs"]


def _rate_cells(row: dict[str, Any]) -> list[str]:
    cold = f"{row['cold_us']:.1f}" if "cold_us" in row else "-"
    share = f"{100 * row['share']:.0f} % {row['roof']}"
    return [f"{row['us']:.1f}", cold, f"{row['tflops']:.0f}", f"{row['gbps']:.0f}", share]


def _result_cells(row: dict[str, Any]) -> list[str]:
    return [*_rate_cells(row), f"{row['meta_us']:.1f}"]


def _prefill_result_cells(row: dict[str, Any]) -> list[str]:
    gathered = "-"
    if "gathered_us" in row:
        gathered = f"{row['gathered_us']:.1f} (gather {row['gather_us']:.1f})"
    return [*_rate_cells(row), gathered]


def _peer_cell(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "-"


def decode_table(rows: list[dict[str, Any]], stored: list[dict[str, Any]]) -> Table:
    """Dense decode rows for the terminal, with the ratio to each stored label and the peers' times."""
    rows = [row for row in rows if row["op"] == "dense_decode"]
    title = "Dense decode (main kernel and combine; metadata apart)"
    cells = [_case_cells(row) + _result_cells(row) for row in rows]
    return _attention_table(title, CASE_HEADINGS + RESULT_HEADINGS, cells, rows, stored)


def sparse_table(rows: list[dict[str, Any]], stored: list[dict[str, Any]]) -> Table:
    """Sparse decode rows for the terminal, likewise."""
    rows = [row for row in rows if is_sparse(row)]
    title = "Sparse decode (main kernel and combine; metadata apart)"
    cells = [_sparse_case_cells(row) + _result_cells(row) for row in rows]
    return _attention_table(title, SPARSE_CASE_HEADINGS + RESULT_HEADINGS, cells, rows, stored)


def prefill_table(rows: list[dict[str, Any]], stored: list[dict[str, Any]]) -> Table:
    """Sparse prefill rows for the terminal, likewise."""
    rows = [row for row in rows if is_prefill(row)]
    cells = [_prefill_case_cells(row) + _prefill_result_cells(row) for row in rows]
    headings = PREFILL_CASE_HEADINGS + PREFILL_RESULT_HEADINGS
    return _attention_table("Sparse prefill", headings, cells, rows, stored)


def _attention_table(
    title: str,
    headings: list[str],
    row_cells: list[list[str]],
    rows: list[dict[str, Any]],
    stored: list[dict[str, Any]],
) -> Table:
    compared = [ratios(stored, row) for row in rows]
    labels = list(dict.fromkeys(label for found in compared for label in found))
    peers = list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))
    table = Table(title=title)
    for heading in headings + [f"{label} µs / ours" for label in labels] + peers:
        table.add_column(heading, justify="right")
    for cells, row, found in zip(row_cells, rows, compared, strict=True):
        ratio_cells = [f"{found[label]:.2f}x" if label in found else "-" for label in labels]
        peer_cells = [_peer_cell(row.get("peers", {}).get(name)) for name in peers]
        table.add_row(*cells, *ratio_cells, *peer_cells)
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


def _cache_cells(row: dict[str, Any]) -> list[str]:
    return [str(row["case"]), f"{row['us']:.1f}", f"{row['gbps']:.0f}", f"{100 * row['share']:.0f} %"]


CACHE_HEADINGS = ["operation", "µs", "GB/s", "share of copy"]


def cache_table(rows: list[dict[str, Any]], stored: list[dict[str, Any]]) -> Table:
    """The operations around decoding for the terminal."""
    table = Table(title="Cache readers and writers, index conversion, merging")
    table.add_column(CACHE_HEADINGS[0])
    for heading in (*CACHE_HEADINGS[1:], "stored µs / ours"):
        table.add_column(heading, justify="right")
    for row in rows:
        if "family" in row:
            found = ratios(stored, row)
            table.add_row(*_cache_cells(row), ", ".join(f"{k} {v:.2f}x" for k, v in found.items()) or "-")
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
    """All tables of one run, for the README."""
    decode = [_case_cells(row) + _result_cells(row) for row in rows if row["op"] == "dense_decode"]
    sparse = [_sparse_case_cells(row) + _result_cells(row) for row in rows if is_sparse(row)]
    prefill = [_prefill_case_cells(row) + _prefill_result_cells(row) for row in rows if is_prefill(row)]
    metadata = [row for row in rows if row["op"] == "metadata"]
    cache = [_cache_cells(row) for row in rows if "family" in row]
    parts = []
    if decode:
        parts.append(markdown_table(CASE_HEADINGS + RESULT_HEADINGS, decode))
    if sparse:
        parts.append("Sparse decoding:")
        parts.append(markdown_table(SPARSE_CASE_HEADINGS + RESULT_HEADINGS, sparse))
    if prefill:
        parts.append("Sparse prefill:")
        parts.append(markdown_table(PREFILL_CASE_HEADINGS + PREFILL_RESULT_HEADINGS, prefill))
    if metadata:
        headings = ["metadata kernel, batch", *(str(row["b"]) for row in metadata)]
        parts.append(markdown_table(headings, [["µs", *(f"{row['us']:.1f}" for row in metadata)]]))
    if cache:
        parts.append("Around decoding:")
        parts.append(markdown_table(CACHE_HEADINGS, cache))
    return "\n\n".join(parts)


def describe_ceilings(ceilings: list[dict[str, float]]) -> str:
    """One line on the ceilings before and after."""
    matmul = " and ".join(f"{c['matmul_tflops']:.0f}" for c in ceilings)
    copy = " and ".join(f"{c['copy_gbps'] / 1e3:.2f}" for c in ceilings)
    return (
        f"ceilings of this run, before and after: bf16 8192^3 matmul {matmul} TFLOP/s, "
        f"elementwise copy {copy} TB/s"
    )


def describe_host(host: dict[str, float]) -> str:
    """One line on the host time of a decode call."""
    return (
        f"host time of one decode call {host['decode_call_us']:.1f} µs (median; nine of ten calls up to "
        f"{host['decode_call_p90_us']:.1f}, median of the quietest burst {host['decode_call_quiet_us']:.1f})"
    )


METHOD = (
    "CUDA graph of 10 identical calls, median over replays back to back, after 20 ms of warm-up and, where "
    "warm-up and replays last longer than 30 ms together, a rest as long as 20 replays; "
    f"FLOPs = 2 * s_q * h_q * sum(lengths) * (d_qk + {D_V}); bytes = cache read once + q + out. Identical "
    "calls find data that fits in L2 there, as in most published figures; 'cold L2' rotates page sets larger "
    "than L2 instead, where one call's data would fit. Metadata: slope between graphs of 20 and 120 calls. "
    "Share: of the nearer roof, with the higher of the two ceilings of the run."
)

SPARSE_METHOD = (
    f"Sparse decoding: FLOPs = 2 * h_q * selected tokens * (d_qk + {D_V}); bytes = each selected token as "
    "often as it is selected (656 or 584 bytes, or 2 * d_qk), q and out; indices are a random subset of the "
    "request's s_k tokens."
)

PREFILL_METHOD = (
    "Sparse prefill: a graph has fewer calls where 10 are more than 10 TFLOP together; "
    f"FLOPs = 2 * s_q * h_q * topk * (d_qk + {D_V}); bytes = each selected token once, however often it is "
    "selected, q and out; indices are a random subset of the s_kv tokens. 'Gathered first': all tokens of a "
    "paged cache gathered into bf16 rows, then bf16 prefill, together."
)


CACHE_METHOD = (
    "Around decoding: bytes = every token or row read and written once; what fits in L2 comes from there."
)


def methods(rows: list[dict[str, Any]]) -> str:
    """How the rows of a run were measured and counted."""
    parts = [METHOD]
    parts += [SPARSE_METHOD] if any("family" not in row and is_sparse(row) for row in rows) else []
    parts += [PREFILL_METHOD] if any(is_prefill(row) for row in rows if "family" not in row) else []
    parts += [CACHE_METHOD] if any("family" in row for row in rows) else []
    return " ".join(parts)
