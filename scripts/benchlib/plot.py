"""The roofline plot."""

import io
import math
from pathlib import Path
from typing import Any

from .families import FAMILIES, family_of, named
from .files import write_whole
from .report import best_ceilings, intensity

INTENSITIES = (8.0, 10000.0)
"""FLOP per byte where the plot begins and ends."""

MARKERS = "osD^v<>PXp"


def roofline(run: dict[str, Any], title: str, path: Path) -> None:
    """Write a PNG with every row of attention of a run under the roofs of that run. Each family
    has its own marker and colour; the legend lies below the axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    roofs = best_ceilings(run["ceilings"])
    tera_bytes, matmul = roofs["copy_gbps"] / 1e3, roofs["matmul_tflops"]
    ridge = matmul / tera_bytes
    figure, axes = pyplot.subplots(figsize=(9, 6))
    axes.set_xscale("log")
    axes.set_yscale("log")
    edges = [INTENSITIES[0], ridge, INTENSITIES[1]]
    axes.plot(edges, [min(x * tera_bytes, matmul) for x in edges], color="black", linewidth=1.2)
    rows = named(run["rows"])
    families = [family for family in FAMILIES if family.attention]
    for number, (family, marker) in enumerate(zip(families, MARKERS, strict=False)):
        own = [row for row in rows if family_of(row["case"]) is family and "tflops" in row]
        axes.scatter(
            [intensity(row) for row in own],
            [row["tflops"] for row in own],
            s=34,
            marker=marker,
            facecolors="none",
            edgecolors=f"C{number}",
            linewidths=1.4,
            label=family.name,
        )
    axes.set_xlim(INTENSITIES)
    axes.set_ylim(top=2.2 * matmul)
    copy_label = axes.text(40, 40 * tera_bytes * 1.2, f"copy {tera_bytes:.2f} TB/s", rotation_mode="anchor")
    axes.text(
        INTENSITIES[1] / 1.1, 1.12 * matmul, f"bf16 matmul {matmul:.0f} TFLOP/s", ha="right", va="bottom"
    )
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title)
    axes.grid(True, which="major", linewidth=0.3)
    figure.legend(
        loc="lower center",
        ncols=-(-len(families) // 2),
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.5,
    )
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    (x0, y0), (x1, y1) = axes.transData.transform([(40, 40 * tera_bytes), (80, 80 * tera_bytes)])
    copy_label.set_rotation(math.degrees(math.atan2(y1 - y0, x1 - x0)))  # along the roof
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": ""})
    pyplot.close(figure)
    write_whole(path, picture.getvalue())
