"""The roofline plot."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .columns import Row
from .families import FAMILIES, family_of
from .files import write_whole
from .report import best_ceilings, intensity
from .speed import Speed

INTENSITIES = (8.0, 10000.0)
"""FLOP per byte where the plot begins and ends."""

MARKERS = "osD^v<>PXp"

BARS = {
    "rested": ("#1f5fa8", "rested"),
    "sustained": ("#e08a1e", "sustained"),
    "no rests": ("#8fa8c4", "without rests, stored times"),
}
"""The colour and the name of a bar, by how the times were taken."""

BAR = 0.4
"""The space of a bar, as a fraction of the space of a family."""

LEAST = "least of its cases"

RATIOS = (0.8, 0.9, 1, 1.25, 1.5, 2, 3, 4, 6, 8)
DPI = 150


def roofline(rows: Sequence[Row], ceilings: list[dict[str, float]], title: str, path: Path) -> None:
    """Write a PNG with every row of attention under the higher of the ceilings. Each family has its own
    marker and colour; the legend is below the axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    roofs = best_ceilings(ceilings)
    tera_bytes, matmul = roofs["copy_gbps"] / 1e3, roofs["matmul_tflops"]
    ridge = matmul / tera_bytes
    figure, axes = pyplot.subplots(figsize=(9, 6))
    axes.set_xscale("log")
    axes.set_yscale("log")
    edges = [INTENSITIES[0], ridge, INTENSITIES[1]]
    axes.plot(edges, [min(x * tera_bytes, matmul) for x in edges], color="black", linewidth=1.2)
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
        ncols=-(-len(families) // 3),
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.5,
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    (x0, y0), (x1, y1) = axes.transData.transform([(40, 40 * tera_bytes), (80, 80 * tera_bytes)])
    copy_label.set_rotation(math.degrees(math.atan2(y1 - y0, x1 - x0)))  # along the roof
    _write(figure, path)


def bars(speeds: Sequence[Speed], title: str, path: Path) -> None:
    """Write a PNG with a bar for each family of attention and way of timing: from 1, where rawmla and the
    other library are as fast, to the geometric mean. A mark shows the least.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    shown = [speed for speed in speeds if speed.family.attention]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.52 * len(shown)))
    axes.set_xscale("log")
    for number, speed in enumerate(shown):
        for place, mean in enumerate(speed.means):
            y = number + (place - (len(speed.means) - 1) / 2) * BAR
            colour, label = BARS[mean.way]
            axes.barh(y, mean.mean - 1, 0.9 * BAR, left=1, color=colour, label=label)
            axes.plot(mean.least, y, "D", markersize=5, color="black", markeredgecolor="white", label=LEAST)
            axes.text(max(mean.mean, 1) * 1.015, y, f"{mean.mean:.2f}", va="center", fontsize=10)
    axes.axvline(1, color="black", linewidth=1.2)
    axes.set_yticks(range(len(shown)))
    axes.set_yticklabels([f"{speed.family.title}\nbeside {speed.peers}" for speed in shown], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * max([1, *(mean.mean for speed in shown for mean in speed.means)]))
    axes.xaxis.set_major_locator(ticker.FixedLocator(RATIOS))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(True, axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time of the fastest other library / time of rawmla: right of 1, rawmla is faster")
    figure.suptitle(title)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    entries = [label for _, label in BARS.values() if label in handles] + [LEAST] * bool(shown)
    figure.legend(
        [handles[label] for label in entries],
        entries,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.955),
        ncols=4,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.955))
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, metadata={"Software": ""})
    pyplot.close(figure)
    write_whole(path, picture.getvalue())
