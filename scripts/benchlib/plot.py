"""The roofline plot."""

from pathlib import Path
from typing import Any

from .cases import group_of, is_decode, is_prefill, is_sparse
from .report import best_ceilings, intensity

LARGEST_INTENSITY = 3000.0
"""FLOP per byte where the plot ends."""


def roofline(runs: dict[str, dict[str, Any]], device: str, path: Path) -> None:
    """Write a PNG with every row of decoding and prefill of the runs (label -> rows and ceilings) under the
    roofs of the first run; sparse rows are hollow, those of prefill with thick edges.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    roofs = best_ceilings(next(iter(runs.values()))["ceilings"])
    tera_bytes = roofs["copy_gbps"] / 1e3
    ridge = roofs["matmul_tflops"] / tera_bytes
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    edges = [8.0, ridge, LARGEST_INTENSITY]
    axes.plot(
        edges, [min(x * tera_bytes, roofs["matmul_tflops"]) for x in edges], color="black", linewidth=1.2
    )
    axes.annotate(
        f"copy {tera_bytes:.2f} TB/s", (9, 9 * tera_bytes), xytext=(14, -8), textcoords="offset points"
    )
    axes.annotate(
        f"matmul {roofs['matmul_tflops']:.0f} TFLOP/s",
        (LARGEST_INTENSITY, roofs["matmul_tflops"]),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
    )
    for (label, run), marker in zip(runs.items(), "osD^v", strict=False):
        dense, sparse, prefill = (
            [row for row in run["rows"] if is_decode(row) and not is_sparse(row)],
            [row for row in run["rows"] if is_sparse(row)],
            [row for row in run["rows"] if is_prefill(row)],
        )
        for rows in (dense, sparse, prefill):
            for number, group in enumerate(sorted({group_of(row) for row in rows})):
                chosen = [row for row in rows if group_of(row) == group]
                name = f"{group} ({label})" if len(runs) > 1 else group
                x, y = [intensity(row) for row in chosen], [row["tflops"] for row in chosen]
                colour = f"C{number}"
                axes.scatter(
                    x,
                    y,
                    s=26,
                    marker=marker,
                    facecolors=colour if rows is dense else "none",
                    edgecolors=colour,
                    linewidths=2.5 if rows is prefill else 1.5,
                    alpha=0.8,
                    label=name,
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"rawmla on {device}, under the ceilings of the same run")
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": ""})
    pyplot.close(figure)
