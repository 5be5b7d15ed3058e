"""The scripts' arithmetic, file formats and reports; nothing here needs a GPU."""

import gc
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
from full_cases import full_unless

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402
import gpu_check  # noqa: E402
import update_figures  # noqa: E402
from benchlib import (  # noqa: E402
    against,
    ahead,
    cases,
    columns,
    families,
    files,
    flex_backward_cases,
    flex_cases,
    mha_cases,
    nogpu,
    plot,
    power,
    prefix_cases,
    record,
    report,
    source,
    speed,
)

PEERS = ROOT / "docs" / "peers-h200.json"
CEILINGS = [{"matmul_tflops": 700.0, "copy_gbps": 4200.0}, {"matmul_tflops": 720.0, "copy_gbps": 4240.0}]
SLOWER = "decode-b128-q1-k8192-h64-bf16-fixed"
"""A case that FlashAttention-3 has a stored time of: 282.2 µs."""


def made_up_row(case: Any, us: float, family: families.Family | None = None) -> dict[str, Any]:
    """A result row as bench.py writes it, for a time that nobody measured: 5 % more without rests and 10 %
    more under load.
    """
    family = family or families.family_of(case.id)
    row = {"case": case.id, **case.fields(), "us": us}
    if family.name == "plan of a decoding step":
        return {**row, "unrested_us": us}
    if family.name == "block masks":
        return {**row, "us_min": us, "us_max": us, "call_us": us + 50}
    row["gbps"] = case.bytes_moved() / us / 1e3
    if family.attention:
        row |= {"us_min": us, "us_max": us, "rel_l2": 0.002, "unrested_us": 1.05 * us}
        row |= {"sustained_us": 1.1 * us, "sustained_watts": 690.4, "sustained_mhz": 1605.2}
        row["tflops"] = case.flops() / us / 1e6
        row |= {"meta_us": 3.0} if columns.DECODE == family.columns else {}
        if family.columns == columns.PREFILL and case.layout != "bf16":
            row |= {"gathered_us": us + 7, "gather_us": 7.0}
    report.add_shares([row], report.best_ceilings(CEILINGS))
    return row


def made_up_us(case: Any) -> float:
    """A time near what the roofs allow."""
    work = case.flops() if hasattr(case, "flops") else 0
    data = case.bytes_moved() if hasattr(case, "bytes_moved") else 0
    return max(work / 6e8, data / 3e6) + 2


def made_up_run() -> dict[str, Any]:
    rows = [made_up_row(case, made_up_us(case)) for case in families.all_cases()]
    host = {"decode_call_us": 15.0, "decode_call_p90_us": 17.0, "decode_call_quiet_us": 14.0}
    host |= {"flex_call_us": 55.0, "flex_call_p90_us": 61.0, "flex_call_quiet_us": 52.0}
    host["flex_first_call_s"] = 4.3
    return {"rows": rows, "ceilings": CEILINGS, "host": host, "errors": [], "sustain_seconds": 2.0}


def made_up_part(stage: str, more: dict[str, Any], **machine: Any) -> record.Part:
    """A part of a record; keywords change its machine."""
    there = {"device": "NVIDIA H200", "driver": "0", "gpus": 1, "cores": 16, "nvrtc": "0.0"}
    there |= {"torch": "2", "cupy": "14"} | machine
    part = {"stage": stage, "begin": "2000-01-01T00:00:00+00:00", "source_sha256": "0" * 64, "ended": True}
    part |= {"git_commit": "c" * 40, "machine": there, "options": {"bench_args": "--replays 7"}, "seconds": 5}
    return record.sealed({**part, **more})


def file_row(name: str, passed: int, failed: int = 0, skipped: int = 0, **reasons: int) -> dict[str, Any]:
    """The row of a test file."""
    counts = {"passed": passed, "failed": failed, "skipped": skipped, "seconds": 1.0, "long": {}}
    failures = [f"{name}::{number}" for number in range(failed)]
    return {"file": name, **counts, "failures": failures, "skip_reasons": reasons}


def made_up_parts() -> list[record.Part]:
    tests = [
        file_row("tests/gpu/test_dense_bits.py", 3),
        {**file_row("tests/gpu/test_dense_frameworks.py", 1000, 0, 2), "skip_reasons": {"needs two GPUs": 2}},
        file_row("tests/gpu/test_programs.py", 4, 1),
        file_row("tests/test_readme.py", 1, 0, 1),
        file_row("tests/test_cli.py", 5),
    ]
    tools = [{"tool": "memcheck", "clean": True}, {"tool": "initcheck", "clean": False}]
    return [
        made_up_part("bench", made_up_run()),
        made_up_part("tests", {"rows": tests}),
        made_up_part("sanitizer", {"rows": tools}),
    ]


def test_every_case_is_of_one_family_and_has_one_name() -> None:
    everything = [case for family in families.FAMILIES for case in family.cases()]
    assert len({case.id for case in everything}) == len(everything) == len(families.all_cases())
    assert len(cases.sparse_cases()) == sum(
        len(f.cases()) for f in families.FAMILIES if "sparse " in f.name
    ) - len(cases.prefill_cases())
    for family in families.FAMILIES:
        for case in family.cases():
            assert families.family_of(case.id) is family and families.case_named(case.id) == case
            assert case.group and "op" in case.fields()


def test_rows_of_another_time_are_left_out() -> None:
    rows = made_up_run()["rows"]
    assert families.named(rows) == rows
    assert families.named([{"case": "of another time", "us": 1.0}, {"op": "dense_decode", "b": 1}]) == []


def test_select() -> None:
    assert families.select(None) == families.all_cases()
    assert {case.id for case in families.select("^metadata")} == {
        f"metadata-b{b}" for b in cases.METADATA_BATCHES
    }
    with pytest.raises(ValueError, match="no case matches 'no such case'"):
        families.select("no such case")
    with pytest.raises(ValueError, match="expected a regular expression"):
        families.select("(")


def test_lengths() -> None:
    case = cases.DecodeCase(128, 2, 4096, 128, causal=True, varlen=True)
    assert case.lengths() == case.lengths()
    assert len(case.lengths()) == 128
    assert min(case.lengths()) >= 2
    assert len(set(case.lengths())) > 100
    assert cases.DecodeCase(3, 1, 70, 16, causal=False, varlen=False).lengths() == [70, 70, 70]


def stored_decode_rows() -> list[dict[str, Any]]:
    data = json.loads(PEERS.read_text())
    return [row for row in data["FlashMLA@9241ae3"] if row["op"] == "dense_decode"]


@pytest.mark.parametrize(
    "row", stored_decode_rows(), ids=lambda row: f"b{row['b']}-q{row['s_q']}-k{row['s_k']}-h{row['h_q']}"
)
def test_counts_agree_with_published_rates(row: dict[str, Any]) -> None:
    case = cases.DecodeCase(*(row[key] for key in ("b", "s_q", "s_k", "h_q", "causal", "varlen", "dtype")))
    assert case in cases.decode_cases()
    assert case.flops() / row["us"] / 1e6 == pytest.approx(row["tflops"], rel=1e-3)
    assert case.bytes_moved() / row["us"] / 1e3 == pytest.approx(row["gbps"], rel=1e-3)


def stored_sparse_rows() -> list[dict[str, Any]]:
    data = json.loads(PEERS.read_text())
    return [row for row in data["FlashMLA@9241ae3"] if row["op"].startswith("sparse_decode")]


@pytest.mark.parametrize(
    "row",
    stored_sparse_rows(),
    ids=lambda row: "-".join(str(row.get(key)) for key in ("op", "b", "s_q", "h_q", "topk", "extra_length")),
)
def test_sparse_counts_agree_with_published_rates(row: dict[str, Any]) -> None:
    (case,) = (
        case
        for case in cases.sparse_cases()
        if not case.batch_invariant
        and all(case.fields()[key] == row[key] for key in row if key in case.fields())
    )
    assert case.flops() / row["us"] / 1e6 == pytest.approx(row["tflops"], rel=1e-3)
    assert case.bytes_moved() / row["us"] / 1e3 == pytest.approx(row["gbps"], rel=1e-3)


def stored_of(found: list[against.Stored], *names: str) -> list[against.Stored]:
    """Those of the families that have these names."""
    return [other for other in found if families.family_of(other.case).name in names]


def test_stored_sparse_rows_match_one_case_each() -> None:
    stored = stored_of(
        against.load(PEERS),
        "sparse decoding, V3.2 cache",
        "sparse decoding, V4 cache",
        "sparse decoding, bf16 cache",
    )
    assert len(stored) == len({other.case for other in stored}) == len(stored_sparse_rows()) + 3
    assert {other.label for other in stored} == {"FlashMLA"}
    assert not any("invariant" in other.case or "bf16" in other.case for other in stored)


def stored_prefill_rows() -> list[dict[str, Any]]:
    data = json.loads(PEERS.read_text())
    return [row for row in data["FlashMLA@9241ae3"] if row["op"].startswith("sparse_prefill")]


@pytest.mark.parametrize(
    "row",
    stored_prefill_rows(),
    ids=lambda row: "-".join(str(row[key]) for key in ("s_q", "s_kv", "h_q", "d_qk", "topk")),
)
def test_prefill_counts_agree_with_published_rates(row: dict[str, Any]) -> None:
    case = cases.PrefillCase(*(row[key] for key in ("s_q", "s_kv", "h_q", "d_qk", "topk")))
    assert case in cases.prefill_cases()
    assert case.flops() / row["us"] / 1e6 == pytest.approx(row["tflops"], rel=1e-3)


def test_prefill_bytes() -> None:
    """A token counts once, and only if it can be selected."""
    q_and_out = 2 * 128 * (576 + 512)
    assert cases.PrefillCase(1, 8192, 128, 576, 2048).bytes_moved() == 2048 * 1152 + q_and_out
    assert cases.PrefillCase(64, 8192, 128, 576, 2048).bytes_moved() == 8192 * 1152 + 64 * q_and_out
    paged = cases.PrefillCase(64, 8192, 128, 576, 2048, "v32", 64)
    assert paged.bytes_moved() == 8192 * 656 + 64 * q_and_out


def test_stored_prefill_rows_match_one_case_each() -> None:
    stored = stored_of(against.load(PEERS), "sparse prefill, MLA")
    assert len(stored) == len(stored_prefill_rows()) + 2
    assert {other.case for other in stored} == {
        case.id for case in cases.prefill_cases() if case.layout == "bf16" and not case.batch_invariant
    }


def test_other_names_of_fields(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    case = cases.sparse_cases()[-9]
    fields = case.fields()
    assert fields["extra_topk"] > 0
    other = {new: old for old, new in against.OTHER_NAMES.items()}
    stored = {other.get(key, key): value for key, value in {**fields, "us": 10.0}.items()}
    path.write_text(json.dumps({"list": [stored]}))
    assert against.load(path) == [against.Stored("list", case.id, {"no rests": 10.0})]
    path.write_text(json.dumps({"list": [{**stored, "extra_len": not fields["extra_length"]}]}))
    with pytest.raises(ValueError, match="no times"):
        against.load(path)


def test_extra_lengths() -> None:
    for case in cases.sparse_cases():
        lengths = case.extra_lengths()
        assert (lengths is None) == (case.extra_tokens is None)
        if lengths is not None:
            assert len(lengths) == case.b and sum(lengths) == case.extra_tokens
            assert min(lengths) >= 0 and max(lengths) <= case.extra_topk and len(set(lengths)) > case.b // 4
            assert lengths == case.extra_lengths()


def test_fixed_length_rows_have_their_case() -> None:
    stored = [other for other in against.load(PEERS) if other.case.endswith("-fixed")]
    assert sum(other.label == "FlashAttention-3" for other in stored) == 16
    # One FlashMLA row of the other list has fixed lengths too.
    assert sum(other.label == "FlashMLA" for other in stored) >= 16


def ratios(row: dict[str, Any], stored: list[against.Stored]) -> dict[tuple[str, str], float]:
    return {(pair.label, pair.way): pair.ratio for pair in against.pairs(row, stored)}


def test_stored_times_are_compared_with_figures_without_rests_alone() -> None:
    stored = against.load(PEERS)
    row = made_up_row(families.case_named(SLOWER), 200.0)
    assert ratios(row, stored) == {
        ("FlashMLA", "no rests"): pytest.approx(299.6 / 210),
        ("FlashAttention-3", "no rests"): pytest.approx(282.2 / 210),
    }
    rested_only = {key: value for key, value in row.items() if key != "unrested_us"}
    assert against.pairs(rested_only, stored) == []
    varied = made_up_row(families.case_named(SLOWER.replace("fixed", "varlen")), 200.0)
    assert set(ratios(varied, stored)) == {("FlashMLA", "no rests")}
    metadata = made_up_row(families.case_named("metadata-b128"), 4.0)
    assert ratios(metadata, stored) == {("FlashMLA", "no rests"): pytest.approx(5.0)}


def test_a_row_where_another_library_is_faster_shows() -> None:
    """FlashAttention-3 is faster here, FlashMLA is not: the better of the two counts, everywhere."""
    stored = against.load(PEERS)
    row = {**made_up_row(families.case_named(SLOWER), 280.0), "unrested_us": 292.2}
    pair = against.better(against.pairs(row, stored), "no rests")
    assert pair is not None and pair.label == "FlashAttention-3"
    faster = made_up_row(families.case_named("decode-b128-q1-k8192-h16-bf16-fixed"), 200.0)
    text = report.text_report([row, faster], stored)
    line = next(line for line in text.splitlines() if line.startswith(SLOWER))
    assert line.split()[-1] == "0.966"
    summary = text[text.index("fastest other library") :]
    assert "0.97¹" in summary and speed.MARK_NOTE in summary
    assert "programmatic dependent launch" in " ".join(summary.split())
    cells = report.family_cells(families.family_of(SLOWER), [row, faster], stored)
    assert cells[1][-3:] == ["299.6", "282.2", "0.966"]
    assert any(one[-2:] == ["0.966", SLOWER] for one in report.summary_cells([row, faster], stored))


def test_runs_are_compared_figure_by_figure(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = made_up_run()
    path.write_text(json.dumps(run))
    stored = against.load(path)
    for row in run["rows"]:
        assert ratios(row, stored) == {("run", "rested"): pytest.approx(1.0)}
    rested = [
        {key: value for key, value in row.items() if not key.startswith(("unrested", "sustained"))}
        for row in run["rows"]
    ]
    path.write_text(json.dumps({**run, "rows": rested}))
    assert len(against.load(path)) == len(run["rows"])
    only_without_rests = {key: value for key, value in run["rows"][0].items() if key != "us"}
    assert ratios(only_without_rests, stored) == {("run", "no rests"): pytest.approx(1.0)}
    assert ratios(only_without_rests, against.load(path)) == {}
    record.write(made_up_parts(), path)
    assert set(ratios(run["rows"][0], against.load(path))) == {("run NVRTC 0.0", "rested")}


def test_libraries_that_ran_beside() -> None:
    row = made_up_row(families.case_named(SLOWER), 200.0)
    row["beside"] = {
        "rawmla": {"us": 210.0, "unrested_us": 220.0, "sustained_us": 240.0, "sustained_watts": 690.0},
        "FlashMLA": {"us": 315.0, "unrested_us": 330.0, "sustained_us": 240.0, "sustained_watts": 680.0},
        "FlashAttention-3": {"us": 189.0, "unrested_us": 440.0, "sustained_us": 360.0},
    }
    found = ratios(row, [])
    assert found["FlashMLA beside", "rested"] == pytest.approx(1.5)
    assert found["FlashMLA beside", "sustained"] == pytest.approx(1.0)
    assert found["FlashAttention-3 beside", "rested"] == pytest.approx(0.9)
    assert len(found) == 6
    headings, cells = report.family_cells(families.family_of(SLOWER), [row], [])
    shown = dict(zip(headings, cells, strict=True))
    assert shown["rawmla beside sustained µs"] == "240.0" and shown["better / ours, rested"] == "0.900"
    assert shown["better / ours, no rests"] == "1.500" and shown["FlashMLA beside rested µs"] == "315.0"


def test_the_best_split_count_is_the_one_compared(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    row = {"b": 1, "s_q": 1, "s_k": 8192, "h_q": 128, "fa3_us": 20.0, "fa3_best_us": 10.0}
    path.write_text(json.dumps({"list": [row]}))
    assert against.load(path) == [
        against.Stored("FlashAttention-3", "decode-b1-q1-k8192-h128-bf16-fixed", {"no rests": 10.0})
    ]


@pytest.mark.parametrize("text", ("{}", "[]", "no JSON", '{"rows": []}', '{"list": [{"b": 5, "us": 1}]}'))
def test_files_without_times_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stored.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="stored.json"):
        against.load(path)
    with pytest.raises(ValueError, match="missing.json"):
        against.load(tmp_path / "missing.json")


def test_means_by_family() -> None:
    rows = made_up_run()["rows"]
    stored = [against.Stored("twice", row["case"], {"rested": 2 * row["us"]}) for row in rows]
    slow = against.Stored("once", rows[3]["case"], {"rested": rows[3]["us"]})
    found = against.means(rows, [*stored, slow])
    assert {mean.way for mean in found} == {"rested"}
    whole = {mean.family: mean for mean in found if mean.group == "all"}
    assert set(whole) == {family.name for family in families.FAMILIES}
    assert sum(mean.rows for mean in whole.values()) == len(rows)
    groups = {family: [m for m in found if m.family == family and m.group != "all"] for family in whole}
    for family, parts in groups.items():
        assert len(parts) != 1 and sum(part.rows for part in parts) in (0, whole[family].rows)
    assert {part.group for part in groups["dense decoding, MLA"]} == {
        "b >= 64, h_q 128",
        "b >= 64, h_q 8 to 64",
        "b 16 to 32",
        "b <= 4",
        "batch-invariant",
    }
    dense = whole.pop("dense decoding, MLA")
    assert dense.least == pytest.approx(1.0) and dense.least_case == rows[3]["case"]
    assert dense.mean == pytest.approx(2 ** (1 - 1 / dense.rows))
    for mean in whole.values():
        assert mean.mean == pytest.approx(2.0) and mean.least == pytest.approx(2.0)
    assert against.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_share_of_the_nearer_roof() -> None:
    ceilings = report.best_ceilings(CEILINGS)
    assert ceilings == {"matmul_tflops": 720.0, "copy_gbps": 4240.0}
    assert report.roof_share({"tflops": 360.0, "gbps": 1000.0}, ceilings) == (0.5, "matmul")
    assert report.roof_share({"tflops": 36.0, "gbps": 2120.0}, ceilings) == (0.5, "copy")
    case = cases.DecodeCase(128, 1, 8192, 128, causal=False, varlen=False)
    row = made_up_row(case, 500.0)
    assert report.intensity(row) == pytest.approx(case.flops() / case.bytes_moved())


def test_tables_fit_a_terminal() -> None:
    """Of made-up rows with another library beside each; what is too long is folded, and nothing is cut."""
    rows = made_up_run()["rows"]
    for row in rows:
        figures = {key: row[key] for key in ("us", "unrested_us", "sustained_us") if key in row}
        row["beside"] = {columns.OURS: figures, "a library with a long name": figures}
    text = report.text_report(rows, against.load(PEERS))
    assert "…" not in text
    lines = [line for line in text.splitlines() if line != against.NOTE]
    assert all(len(line) <= report.WIDTH for line in lines)
    table = report.fitted([["a", "b c"], ["x" * 150, "[1]"], ["short", "22"]]).splitlines()
    assert table[0].split() == ["b"] and table[1].split() == ["a", "c"]
    assert table[2].split() == ["x" * 95, "[1]"] and table[3] == "x" * 55
    assert table[4].split() == ["short", "22"] and len(table[4]) == len(table[2])
    short = [row for row in rows if len(row["case"]) < 33]
    assert len(short) >= 50
    for row in short:
        cells = next(line.split() for line in lines if line.split()[:1] == [row["case"]])
        digits = 2 if row["case"].startswith("metadata") else 1
        assert f"{row['us']:.{digits}f}" in cells
        for key in ("unrested_us", "sustained_us"):
            assert key not in row or f"{row[key]:.{digits}f}" in cells or "metadata" in row["case"]


def test_tables_of_pages_are_complete() -> None:
    rows = made_up_run()["rows"]
    stored = against.load(PEERS)
    for family in families.FAMILIES:
        cells = report.family_cells(family, rows, stored)
        assert len(cells) == 1 + len(family.cases()) and len({len(row) for row in cells}) == 1
        assert all(cell for row in cells for cell in row)
        page = report.markdown(cells).splitlines()
        assert len({line.count("|") for line in page}) == 1
        assert len({row[0] for row in cells}) == len(cells)


def test_cells() -> None:
    stored = against.load(PEERS)
    case = next(case for case in cases.prefill_cases() if case.layout == "v32")
    headings, cells = report.family_cells(families.family_of(case.id), [made_up_row(case, 50.0)], stored)
    shown = dict(zip(headings, cells, strict=True))
    assert shown["gathered first µs (gather)"] == "57.0 (7.0)"
    assert (shown["no rests µs"], shown["sustained µs"]) == ("52.5", "55.0")
    assert (shown["W"], shown["MHz"], shown["cold L2 µs"]) == ("690", "1605", "-")


def test_methods() -> None:
    everything = families.methods(families.all_cases())
    for family in families.FAMILIES:
        assert family.method in everything
    dense = families.methods(families.select("^decode|^metadata"))
    assert dense == f"{families.ATTENTION_METHOD} {families.DENSE_METHOD}"


def test_roofline_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    closed: list[Any] = []
    monkeypatch.setattr(pyplot, "close", closed.append)
    path = tmp_path / "roofline.png"
    plot.roofline(made_up_run()["rows"], CEILINGS, "a device", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["roofline.png"]
    (figure,) = closed
    (axes,), (legend,) = figure.axes, figure.legends
    plotted = [family for family in families.FAMILIES if family.attention]
    assert [text.get_text() for text in legend.get_texts()] == [family.name for family in plotted]
    points = [collection for collection in axes.collections if len(collection.get_offsets())]
    assert [len(found.get_offsets()) for found in points] == [len(family.cases()) for family in plotted]
    assert len({tuple(found.get_edgecolors()[0]) for found in points}) == len(plotted)
    box, whole = legend.get_window_extent(), figure.bbox
    assert not box.overlaps(axes.get_window_extent())
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0
    for found in points:
        x, y = found.get_offsets().data.T
        low, high = axes.get_xlim(), axes.get_ylim()
        assert low[0] < min(x) and max(x) < low[1] and high[0] < min(y) and max(y) < high[1]


def tiny_tree(root: Path) -> Path:
    for folder in source.HASHED_FOLDERS:
        (root / folder / "sub").mkdir(parents=True)
        (root / folder / "sub" / "file.txt").write_text(folder)
    return root


def test_source_hash(tmp_path: Path) -> None:
    one, two = tiny_tree(tmp_path / "one"), tiny_tree(tmp_path / "two")
    assert source.source_hash(one) == source.source_hash(two)
    (two / "rawmla" / "__pycache__").mkdir()
    (two / "rawmla" / "__pycache__" / "x.pyc").write_bytes(b"x")
    (two / "README.md").write_text("outside")
    assert source.source_hash(one) == source.source_hash(two)
    for folder in ("cuda_src", "rawmla", "tests", "scripts", "examples"):
        before = source.source_hash(two)
        (two / folder / "sub" / "file.txt").write_text("changed")
        assert source.source_hash(two) != before


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch, emulator_folder: Path) -> None:
    monkeypatch.setattr(bench, "why_no_timing", lambda: "no GPU in this test")
    monkeypatch.setattr(nogpu, "FOLDER", emulator_folder)


@pytest.mark.usefixtures("without_gpu")
def test_bench_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The families of the cases chosen run, and their kernels are compiled; each line fits the screen."""
    if (reason := nogpu.missing_reason()) is not None:
        pytest.skip(reason)
    path = tmp_path / "bench.json"
    assert bench.main(["--cases", "^decode-b1-|^metadata|^flex-block-mask", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["timed"] is False and result["good"] is True
    errors = result["errors"]
    assert list(errors) == ["Dense decoding, MLA", "Block masks"]
    assert 1e-4 < errors["Dense decoding, MLA"] < 5e-3 and errors["Block masks"] == 0
    names = [row["label"].partition("[")[0] for row in result["kernels"]]
    assert names == [
        *("mla_metadata", "mla_dense_decode", "mla_combine"),
        *("block_mask_states", "block_mask_lists"),
    ]
    assert all(
        row["spill_stores"] == row["spill_loads"] == row["local_bytes"] == 0 for row in result["kernels"]
    )
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "no GPU in this test: nothing is timed." and lines[-1].endswith("Nothing was timed.")
    assert all(len(line) <= report.WIDTH for line in lines)
    for row, name in zip(result["kernels"], names, strict=True):
        assert any(name in line.split() and str(row["registers"]) in line.split() for line in lines)
    assert f"{errors['Dense decoding, MLA']:.1e}" in printed.out
    assert "[1/2]" in printed.err and "[2/2]" in printed.err
    assert os.listdir(tmp_path) == ["bench.json"]


@pytest.mark.usefixtures("without_gpu")
def test_what_fails_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong result, and a kernel that does not compile, are reported; the other families still run."""
    if (reason := nogpu.missing_reason()) is not None:
        pytest.skip(reason)
    from tests.emulator import cases as emulated

    def wrong(case: Any) -> None:
        raise AssertionError("wrong by 1\nand more")

    def build(spec: Any) -> Any:
        if spec.name == "mla_cache_write":
            raise nogpu.CompileError("write is broken", log="", options=(), source_path=None)
        figures = dict.fromkeys(("registers", "spill_stores", "spill_loads"), 8)
        return types.SimpleNamespace(meta={**figures, "static_shared_bytes": 1, "dynamic_shared_bytes": 2})

    monkeypatch.setitem(emulated.MAKE, "block_mask", wrong)
    monkeypatch.setattr(nogpu.jit, "build", build)
    chosen = [families.family_of(name) for name in ("flex-block-mask-causal-s8192", "convert-r128-k2048")]
    result = nogpu.run("no GPU", chosen)
    assert not result["good"] and result["errors"] == {"Block masks": None, "Around decoding": 0.0}
    out = capsys.readouterr().out
    assert f"FAILED: {chosen[0].small}: AssertionError: wrong by 1\n" in out
    assert "FAILED: write is broken\n" in out
    (line,) = (line for line in out.splitlines() if "mla_cache_gather" in line)
    assert line.split() == ["mla_cache_gather", "8", "16", "3"]


def test_bench_without_an_emulator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says why no kernel runs; a variant of each is compiled."""
    specs = [types.SimpleNamespace(name=label[0], label=label) for label in ("a[1]", "b[1]", "a[2]")]
    meta = dict.fromkeys(("registers", "spill_stores", "spill_loads"), 0)
    meta |= {"static_shared_bytes": 0, "dynamic_shared_bytes": 0}
    monkeypatch.setattr(nogpu, "missing_reason", lambda: "the emulator needs g++")
    monkeypatch.setattr(nogpu.kernels, "all_specs", lambda: specs)
    monkeypatch.setattr(nogpu.jit, "build", lambda spec: types.SimpleNamespace(meta=meta))
    result = nogpu.run("no GPU", families.FAMILIES)
    assert result["good"] and sorted(row["label"] for row in result["kernels"]) == ["a[1]", "b[1]"]
    out = capsys.readouterr().out
    assert "the emulator needs g++: no kernel runs" in out and "Nothing was timed." in out


def test_small_cases() -> None:
    """Every family has one, but the plans that decoding makes; each is a command of the emulator."""
    pytest.importorskip("torch")
    from tests.emulator.__main__ import case_of

    without = [family.name for family in families.FAMILIES if not family.small]
    assert without == ["plan of a decoding step"]
    for family in families.FAMILIES:
        if family.small:
            name, *fields = shlex.split(family.small)
            assert case_of(name, fields)


def test_bench_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from kit import gpu

    monkeypatch.setattr(gpu, "_open_driver", lambda: None)
    gpu.missing_hopper_reason.cache_clear()
    try:
        assert "no NVIDIA driver" in str(bench.why_no_timing())
    finally:
        gpu.missing_hopper_reason.cache_clear()


def test_kernels_are_compiled_on_all_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three at a time here, or the barrier breaks; the rows keep the order of the kernels."""
    together = threading.Barrier(3, timeout=30)

    def build(spec: Any) -> Any:
        together.wait()
        if spec.label == "b":
            raise nogpu.CompileError("b is broken", log="", options=(), source_path=None)
        return types.SimpleNamespace(meta={"registers": 1})

    specs = [types.SimpleNamespace(label=label) for label in "abc"]
    monkeypatch.setattr(nogpu.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(nogpu.jit, "build", build)
    rows = nogpu.compile_specs(specs)
    assert [row["label"] for row in rows] == ["a", "b", "c"]
    assert "b is broken" in rows[1]["problem"] and "problem" not in rows[2]
    assert "[3/3]" in capsys.readouterr().err


def test_list_obeys_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [case.id for case in families.all_cases()]
    assert bench.main(["--list", "--cases", "metadata-b4096|merge-p2-b1-"]) == 0
    assert capsys.readouterr().out.split() == ["metadata-b4096", "merge-p2-b1-h128-bfloat16"]


WRONG_USAGE = {
    "replays": ["--replays", "4"],
    "negative load": ["--sustain-seconds", "-1"],
    "endless load": ["--sustain-seconds", "inf"],
    "pattern": ["--cases", "("],
    "no such case": ["--cases", "no such case"],
    "no such case, listed": ["--list", "--cases", "no such case"],
    "no stored file": ["--against", "missing.json"],
    "stored text": ["--against", "text.json"],
    "stored folder": ["--against", "folder"],
    "stored times of nothing": ["--against", "empty.json"],
    "results into no folder": ["--json", "missing/bench.json"],
    "results into a file": ["--json", "text.json/bench.json"],
    "results over a folder": ["--json", "folder"],
    "plot into no folder": ["--plot", "missing/roofline.png"],
    "plot over a folder": ["--plot", "folder"],
    "no such option": ["--no-such-option"],
}


@pytest.mark.parametrize("arguments", WRONG_USAGE.values(), ids=WRONG_USAGE)
def test_wrong_usage_is_refused_before_anything_runs(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def must_not_run(*_: Any) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(bench, "why_no_timing", must_not_run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["empty.json", "folder", "text.json"]


def test_plot_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main(["--plot", str(tmp_path / "roofline.png")])
    assert 'pip install -e ".[plot]"' in capsys.readouterr().err


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    path.write_text("old")
    files.check_writable(path)
    assert path.read_text() == "old"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            files.write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["bench.json"]
    files.write_whole(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["bench.json"]


INTERRUPTED = """
import sys, time
sys.path.insert(0, "scripts")
import bench
def wait():
    print("running", flush=True)
    time.sleep(60)
bench.why_no_timing = wait
sys.exit(bench.main(sys.argv[1:]))
"""


def test_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "--json", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted\n")
    assert os.listdir(tmp_path) == []


def without_measuring(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[[Any, families.Settings], dict[str, Any]]
) -> list[str]:
    """Make the timed program run here, with made-up rows. Returns what is done, in order."""
    torch = pytest.importorskip("torch")
    from benchlib import flex_measure, measure

    done: list[str] = []

    def did(what: str, answer: Any) -> Callable[..., Any]:
        return lambda *_: (done.append(what), answer)[1]

    def one(case: Any, settings: families.Settings) -> dict[str, Any]:
        done.append(case.id)
        return measured(case, settings)

    for family in families.FAMILIES:
        monkeypatch.setitem(family.__dict__, "measure", one)
    kernels = [{"label": "a", "nvrtc": "0.0"}, {"label": "b", "nvrtc": "0.0"}]
    monkeypatch.setattr(bench, "why_no_timing", lambda: None)
    monkeypatch.setenv(ahead.COMPILE_THREADS, "1")
    monkeypatch.setattr(ahead, "begin", lambda names: subprocess.Popen([sys.executable, "-c", ""]))
    monkeypatch.setattr(nogpu, "compile_specs", did("compile", kernels))
    environment = {"device": "D", "driver": "1", "versions": {"nvrtc": "0.0"}}
    monkeypatch.setattr(bench, "environment", did("environment", environment))
    monkeypatch.setattr(measure, "measure_ceilings", did("ceilings", CEILINGS[0]))
    host = made_up_run()["host"]
    of_decoding = {key: value for key, value in host.items() if key.startswith("decode")}
    of_flex = {key: value for key, value in host.items() if key.startswith("flex")}
    monkeypatch.setattr(measure, "time_host", did("host", of_decoding))
    monkeypatch.setattr(flex_measure, "time_host", did("host of flex", of_flex))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return done


FAMILY_BY_NAME = {case.id: families.family_of(case.id) for case in families.all_cases()}


def good_row(case: Any) -> dict[str, Any]:
    return made_up_row(case, made_up_us(case), FAMILY_BY_NAME[case.id])


@pytest.mark.parametrize("stored", (False, True), ids=("alone", "against"))
def test_a_timed_run(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole program but for the measuring: settings arrive, each case is measured once, all of it is
    printed and stored.
    """
    seen: list[tuple[str, families.Settings]] = []

    def measured(case: Any, settings: families.Settings) -> dict[str, Any]:
        seen.append((case.id, settings))
        reason = "not for plans" if case.id.startswith("metadata") else "not here"
        return {**good_row(case), "not_compared": {"A": reason}}

    done = without_measuring(monkeypatch, measured)
    path = tmp_path / "bench.json"
    arguments = ["--cases", "^decode-b128|metadata|merge", "--json", str(path)]
    assert bench.main([*arguments, *(["--against", str(PEERS)] if stored else [])]) == 0
    chosen = families.select("^decode-b128|metadata|merge")
    assert [name for name, _ in seen] == [case.id for case in chosen]
    assert {settings for _, settings in seen} == {families.Settings(5, 2.0, False)}
    assert done[:3] == ["compile", "environment", "ceilings"]
    assert done[-3:] == ["ceilings", "host", "host of flex"]
    printed = capsys.readouterr()
    assert all(case.id in printed.out and case.id in printed.err for case in chosen)
    for reason in ("not for plans", "not here"):
        assert printed.out.count(f"not compared with A: {reason}\n") == 1
    assert ("fastest other library" in printed.out) == stored
    result = json.loads(path.read_text())
    assert result["timed"] is True and result["sustain_seconds"] == 2.0
    assert [row["case"] for row in result["rows"]] == [case.id for case in chosen]
    assert families.DENSE_METHOD in result["method"] and families.SPARSE_METHOD not in result["method"]
    assert result["errors"] == [] and len(result["ceilings"]) == 2
    assert result["host"] == made_up_run()["host"] and report.describe_host(result["host"]) in printed.out
    assert len(result["source_sha256"]) == 64 and os.listdir(tmp_path) == ["bench.json"]


SOME_CASES = "^decode-b128-q1-k8192-h64|^prefill-bf16d576-q64|metadata-b1$|merge-p2"


def test_a_case_that_fails_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row is stored before the next case begins; after a failure the others still run, and all the
    reports know such a row.
    """
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.json"
    chosen = [case.id for case in families.select(SOME_CASES)]
    broken = {chosen[0]: AssertionError("wrong by 1\nand more"), chosen[-1]: RuntimeError()}

    def measured(case: Any, settings: families.Settings) -> dict[str, Any]:
        if case.id != chosen[0]:
            known = json.loads(path.read_text())["rows"]
            assert [row["case"] for row in known] == chosen[: chosen.index(case.id)]
            assert all("error" in row or "tflops" not in row or "share" in row for row in known)
        if case.id in broken:
            raise broken[case.id]
        return good_row(case)

    without_measuring(monkeypatch, measured)
    picture = tmp_path / "plot.png"
    assert bench.main(["--cases", SOME_CASES, "--json", str(path), "--plot", str(picture)]) == 1
    run = json.loads(path.read_text())
    rows = {row["case"]: row for row in run["rows"]}
    assert list(rows) == chosen
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {
        chosen[0]: "AssertionError: wrong by 1",
        chosen[-1]: "RuntimeError",
    }
    assert run["errors"] == [f"{chosen[0]}: AssertionError: wrong by 1", f"{chosen[-1]}: RuntimeError"]
    printed = capsys.readouterr()
    for text in run["errors"]:
        assert f"FAILED: {text}" in printed.out and f"FAILED  {text}" in printed.err
    assert picture.exists() and len(run["ceilings"]) == 2
    assert {other.case for other in against.load(path)} == set(chosen) - set(broken)
    parts = [made_up_part("bench", {key: run[key] for key in gpu_check.OF_A_BENCHMARK if key != "host"})]
    page = update_figures.performance_page(parts, PEERS)
    assert f"Failed: {chosen[0]}: AssertionError: wrong by 1; {chosen[-1]}: RuntimeError." in page
    assert "host time" not in page and f"| `{chosen[0]}` | - |" in page
    assert f"`{chosen[1]}`" in page and update_figures.readme_section(parts, PEERS)


def test_what_fails_after_the_cases_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    without_measuring(monkeypatch, lambda case, settings: good_row(case))
    from benchlib import measure

    def fail() -> Any:
        raise RuntimeError("CUDA error: no more\nhints")

    monkeypatch.setattr(measure, "time_host", fail)
    assert bench.main(["--cases", SOME_CASES, "--json", str(path)]) == 1
    run = json.loads(path.read_text())
    assert run["errors"] == ["ceilings and host time after the cases: RuntimeError: CUDA error: no more"]
    assert len(run["rows"]) == len(families.select(SOME_CASES)) and "host" not in run


def test_flex_cases_are_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in one of the processes, which begin before the kernels are compiled and end before anything is
    timed; a single case needs none.
    """
    done = without_measuring(monkeypatch, lambda case, settings: good_row(case))
    begun: list[str] = []

    class Process:
        def wait(self) -> None:
            done.append("waited")

        def kill(self) -> None:
            done.append("killed")

    def begin(names: Any) -> Any:
        done.append("begun")
        begun.extend(names)
        return Process()

    monkeypatch.setattr(ahead, "begin", begin)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 3)
    assert bench.main(["--cases", "^flex-b|metadata-b1$"]) == 0
    flex = [*flex_cases.flex_cases(), *flex_backward_cases.flex_backward_cases()]
    assert sorted(begun) == sorted(case.id for case in flex)
    after = ["killed", "waited"] * 3  # what has ended already
    assert done[:12] == ["begun"] * 3 + ["compile"] + ["waited"] * 3 + after[:5]
    assert done[12:15] == [after[5], "environment", "ceilings"]
    assert "compiled the functions of flex cases: 0 s" in capsys.readouterr().err
    done.clear()
    begun.clear()
    assert bench.main(["--cases", "^flex-b2-.*-full$|metadata-b1$"]) == 0 and begun == []

    def interrupted(specs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nogpu, "compile_specs", interrupted)
    done.clear()
    assert bench.main(["--cases", "^flex-b"]) == bench.INTERRUPTED
    assert done == ["begun"] * 3 + after


def test_what_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A case's own call and those beside it; one that fails does not keep the others."""
    pytest.importorskip("torch")
    from benchlib import backward_peers, flex_measure, peers

    names = [peer.name for peer in peers.FLEX]
    assert [peer.name for peer in backward_peers.FLEX] == names, "made of those before the change below"
    called: list[tuple[str, str]] = []

    def prepare(case: Any) -> Any:
        called.append(("ours", case.id))
        if case.mask == "window":
            raise ValueError("no window\nat all")
        return types.SimpleNamespace(inputs=case.id)

    def calls(name: str) -> Callable[[Any, Any], list[Any]]:
        def one(case: Any, inputs: Any) -> list[Any]:
            assert inputs == case.id
            called.append((name, case.id))
            raise ImportError("not here")

        return one

    monkeypatch.setattr(flex_measure, "prepare", prepare)
    monkeypatch.setattr(peers, "FLEX", [peers.Peer(name, name, calls(name)) for name in ("A", "B")])
    full, causal, _, window, *_, further = flex_cases.flex_cases()
    ahead.compile_cases([case.id for case in (window, further, full)])
    assert called == [
        ("ours", window.id),
        ("ours", further.id),
        *((name, full.id) for name in ("ours", "A", "B")),
    ]
    assert capsys.readouterr().err == f"not compiled ahead: {window.id}: ValueError: no window\n"


def test_a_process_that_compiles_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds its modules, and the cases that it is given."""
    pytest.importorskip("torch")

    def start(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert command[:2] == [sys.executable, "-m"]
        code = f"import runpy; runpy.run_module({command[2]!r}, run_name='__main__', alter_sys=True)"
        return fresh.run(("-c", code, *command[3:]), tmp_path, env)

    monkeypatch.setattr(ahead, "subprocess", types.SimpleNamespace(Popen=start))
    process = ahead.begin([])
    assert process.returncode == 0, process.stderr


def test_progress() -> None:
    stream = io.StringIO()
    progress = report.Progress(10, stream)
    for text in ("one", "two"):
        progress.step(text)
    assert stream.getvalue() == "[ 1/10]    0 s,  0.0 s  one\n[ 2/10]    0 s,  0.0 s  two\n"


def test_an_interrupted_benchmark_leaves_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    chosen = [case.id for case in families.select(SOME_CASES)]

    def measured(case: Any, settings: families.Settings) -> dict[str, Any]:
        if case.id == chosen[2]:
            raise KeyboardInterrupt
        return good_row(case)

    without_measuring(monkeypatch, measured)
    assert bench.main(["--cases", SOME_CASES, "--json", str(path)]) == bench.INTERRUPTED
    run = json.loads(path.read_text())
    assert [row["case"] for row in run["rows"]] == chosen[:2] and run["versions"]["nvrtc"] == "0.0"


def test_a_kernel_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    without_measuring(monkeypatch, lambda case, settings: good_row(case))
    kernels = [{"label": "a", "nvrtc": "0.0"}, {"label": "b", "problem": "b is broken"}]
    monkeypatch.setattr(nogpu, "compile_specs", lambda specs: kernels)
    assert bench.main(["--cases", "metadata-b1$", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["errors"] == ["does not compile: b"]


@pytest.mark.parametrize("writable", (True, False), ids=("writable for others", "without kernels"))
def test_prebuilt_kernels_that_cannot_be_used(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the remedy, before anything is timed; and no kernel of another compiler is timed."""
    compile_specs = nogpu.compile_specs
    done = without_measuring(monkeypatch, lambda case, settings: good_row(case))
    monkeypatch.setattr(nogpu, "compile_specs", compile_specs)
    folder = tmp_path / "cubins"
    folder.mkdir()
    folder.chmod(0o775 if writable else 0o755)
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", str(folder))
    assert bench.main([]) == bench.UNUSABLE_CUBINS
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "compiled " not in line)
    assert line.startswith("bench.py: rawmla: RAWMLA_CUBIN_DIR") and str(folder) in line
    assert line.endswith(f"(chmod -R go-w {folder})") == writable
    assert done == []


def test_the_load_of_all_cases_is_bounded() -> None:
    everything = families.all_cases()
    under_load = [case for case in everything if families.family_of(case.id).attention]
    assert bench.sustain_seconds(everything, 2.0) == 2.0
    assert bench.sustain_seconds(under_load[:3], 5.0) == 5.0
    long = bench.sustain_seconds(everything, 5.0)
    assert long * len(under_load) == pytest.approx(bench.SUSTAINED_TOTAL_SECONDS)
    assert bench.sustain_seconds(everything, 0.0) == bench.sustain_seconds(families.select("merge"), 0.0) == 0


class FakeGPU:
    """A GPU and the host's clock in seconds, for timing.Graph: replays are queued and run one after another.
    After half a second of work without a pause of a tenth, a replay takes half as long again.
    """

    def __init__(self, replay: float) -> None:
        self.replay_seconds = replay
        self.now = self.free_at = 0.0
        self.busy_since = 0.0
        self.runs: list[tuple[float, float]] = []
        self.naps: list[tuple[float, float]] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.time: float | None = None

            def record(self) -> None:
                self.time = max(gpu.now, gpu.free_at)

            def synchronize(self) -> None:
                assert self.time is not None
                gpu.now = max(gpu.now, self.time)

            def elapsed_time(self, end: Any) -> float:
                return (end.time - self.time) * 1e3

        class Graph:
            def replay(self) -> None:
                gpu.now += 1e-7
                start = max(gpu.now, gpu.free_at)
                if start - gpu.free_at > 0.1:
                    gpu.busy_since = start
                slow = 1.5 if start - gpu.busy_since > 0.5 else 1.0
                gpu.free_at = start + slow * gpu.replay_seconds
                gpu.runs.append((start, gpu.free_at))

        class Context:
            def __init__(self, *_: Any, **__: Any) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: Any) -> None: ...

        class Stream:
            def wait_stream(self, other: Any) -> None: ...
            def synchronize(self) -> None:
                gpu.now = max(gpu.now, gpu.free_at)

        self.torch = types.SimpleNamespace(
            cuda=types.SimpleNamespace(
                Event=Event,
                CUDAGraph=Graph,
                Stream=Stream,
                current_stream=Stream,
                stream=Context,
                graph=Context,
                synchronize=lambda: Stream().synchronize(),
                _sleep=self.hold_back,
            )
        )
        self.time = types.SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)

    def hold_back(self, cycles: int) -> None:
        self.free_at = max(self.now, self.free_at) + cycles / 2e9

    def sleep(self, seconds: float) -> None:
        self.naps.append((self.now, seconds))
        self.now += seconds


def on_fake_gpu(monkeypatch: pytest.MonkeyPatch, replay: float) -> FakeGPU:
    from benchlib import timing

    gpu = FakeGPU(replay)
    monkeypatch.setattr(timing, "torch", gpu.torch)
    monkeypatch.setattr(timing, "time", gpu.time)
    monkeypatch.setattr(power, "read_smi", lambda: (690.0, 1600.0))
    monkeypatch.setattr(power.importlib.util, "find_spec", lambda name: None)
    return gpu


def gaps(runs: list[tuple[float, float]]) -> list[float]:
    return [after[0] - before[1] for before, after in zip(runs, runs[1:], strict=False)]


@pytest.mark.parametrize("replay", (1e-4, 5e-3, 4e-2), ids=lambda value: f"{1e3 * value:g}ms")
def test_the_ways_of_timing(replay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchlib import timing

    gpu = on_fake_gpu(monkeypatch, replay)
    calls: list[int] = []
    graph = timing.Graph(timing.repeat(calls.append, 10), 10)
    assert calls == 2 * list(range(10))  # once before the capture

    unrested = graph.without_rests(5)
    assert unrested.us == pytest.approx(replay * 1e5, rel=0.01)
    assert len(gpu.runs) >= 5 + timing.WARMUP_REPLAYS and gpu.runs[-6][1] >= timing.WARMUP_SECONDS
    assert max(gaps(gpu.runs)) < 1e-4 and not gpu.naps

    gpu.runs.clear()
    assert graph.rested(5).us == pytest.approx(replay * 1e5, rel=0.01)
    *before, after = [seconds for _, seconds in gpu.naps]
    assert after == pytest.approx(10 * 5 * replay, rel=0.01)
    assert len(before) == (1 if replay > 1e-3 else 0)
    assert (
        max(gaps(gpu.runs)) == pytest.approx(20 * replay, rel=0.01) if before else max(gaps(gpu.runs)) < 1e-4
    )

    gpu.runs.clear()
    gpu.naps.clear()
    figures = graph.sustained(2.0)
    load = [run for run in gpu.runs if run[1] <= gpu.naps[0][0] + 1e-9]
    assert load == gpu.runs and max(gaps(load[3:])) < 1e-4, "the load pauses"
    assert 2.0 <= load[-1][1] - load[0][0] < 2.3
    assert figures["us"] == pytest.approx(1.5 * replay * 1e5, rel=1e-6), "not the mean of the second half"
    assert gpu.naps[0][1] == timing.REST_AFTER_LOAD_SECONDS


def test_what_a_graph_reads_outlives_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchlib import timing

    class Tensor:
        """Something that calls read, such as the block mask of a peer."""

    def graph_over(tensor: Tensor) -> timing.Graph:
        return timing.Graph(timing.repeat(lambda _: tensor, 1), 1)

    on_fake_gpu(monkeypatch, 1e-3)
    read = Tensor()
    alive = weakref.ref(read)
    graph = graph_over(read)
    del read
    gc.collect()
    assert alive() is not None
    del graph
    gc.collect()
    assert alive() is None


def test_a_load_shorter_than_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchlib import timing

    on_fake_gpu(monkeypatch, 0.04)
    graph = timing.Graph(lambda: None, 1)
    assert graph.sustained(0.001)["us"] == pytest.approx(4e4)


def test_power_is_read_by_nvidia_smi_where_nvml_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Event()

    def nvml() -> tuple[float, float]:
        raise RuntimeError("no NVML library")

    def smi() -> tuple[float, float]:
        read.set()
        return 650.0, 1600.0

    monkeypatch.setattr(power.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(power, "read_nvml", nvml)
    monkeypatch.setattr(power, "read_smi", smi)
    with power.Meter(0.0) as meter:
        assert read.wait(30)
        meter._thread.join(30)
    assert meter.figures() == {"watts": 650.0, "mhz": 1600.0}


@pytest.mark.parametrize("nvml", (True, False), ids=("NVML", "nvidia-smi"))
def test_a_reading_that_ends_after_the_load_is_dropped(nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    meter = power.Meter(0.0)

    def slow() -> tuple[float, float]:
        begun.set()
        assert meter._stop.wait(30)
        return 75.0, 345.0

    def must_not_run() -> None:
        raise AssertionError("another reading after the load")

    monkeypatch.setattr(power, "read_nvml", slow)
    monkeypatch.setattr(power, "read_smi", must_not_run if nvml else slow)
    meter._nvml = nvml
    with meter:
        assert begun.wait(30)
    assert meter.figures() == {}


def test_power_is_read_during_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(600.0, 1700.0), (700.0, 1500.0)])
    read = threading.Event()

    def nvml() -> tuple[float, float]:
        try:
            return next(readings)
        except StopIteration:
            read.set()
            raise RuntimeError("NVML is gone") from None

    monkeypatch.setattr(power.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(power, "read_nvml", nvml)
    monkeypatch.setattr(power, "SECONDS_BETWEEN", 0.0)
    with power.Meter(0.0) as meter:
        assert read.wait(30)
    assert meter.figures() == {"watts": 650.0, "mhz": 1600.0}
    with power.Meter(3600.0) as meter:
        pass
    assert meter.figures() == {}


@pytest.mark.parametrize(
    ("output", "reading"), [("697.35, 1605\n", (697.35, 1605.0)), ("[N/A], 1605\n", None), ("", None)]
)
def test_nvidia_smi(
    output: str, reading: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = types.SimpleNamespace(pci_bus_id="0000:1B:00.0")
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda: device))
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def run(command: list[str], **_: Any) -> Any:
        assert "--id=0000:1B:00.0" in command
        return types.SimpleNamespace(stdout=output)

    monkeypatch.setattr(power.subprocess, "run", run)
    assert power.read_smi() == reading


class FakeGraph:
    """A graph of calls that notes what is done with it and by whom."""

    log: list[tuple[str, str]] = []
    called: list[str] = []

    def __init__(self, calls: Callable[[], None], count: int) -> None:
        self.called.clear()
        calls()
        assert len(self.called) == count
        self.name = self.called[0]

    def us(self, way: str) -> float:
        self.log.append((self.name, way))
        return {"ours": 100.0, "slow": 300.0, "fast": 150.0}[self.name] + {"rested": 0, "no rests": 5}[way]

    def rested(self, replays: int) -> Any:
        from benchlib.timing import Timing

        return Timing.of([self.us("rested")])

    def without_rests(self, replays: int) -> Any:
        from benchlib.timing import Timing

        return Timing.of([self.us("no rests")])

    def sustained(self, seconds: float) -> dict[str, float]:
        self.log.append((self.name, f"{seconds} s"))
        return {"us": 120.0, "watts": 690.0, "mhz": 1600.0}


def test_libraries_run_beside_in_turns_and_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchlib import measure, peers

    def call(name: str) -> Callable[[int], Any]:
        return lambda _: FakeGraph.called.append(name)

    def missing(*_: Any) -> Any:
        raise ImportError("no module named b")

    def broken(*_: Any) -> Any:
        raise ValueError("no such shape\nand many more lines")

    others = (
        peers.Peer("A", "a", lambda case, inputs: [call("slow"), call("fast")]),
        peers.Peer("B", "b", missing),
        peers.Peer("C", "c", broken),
    )
    monkeypatch.setattr(measure, "Graph", FakeGraph)
    monkeypatch.setattr(measure, "rest", lambda: None)
    case = cases.PrefillCase(4096, 8192, 128, 576, 2048)
    ready = measure.Prepared(None, call("ours"), 1, 0.001, lambda replays: {"more": 1.0}, 4)
    FakeGraph.log.clear()
    row = measure.time_attention(case, lambda case: ready, families.Settings(5, 2.0, True), others)
    assert row["case"] == case.id and row["more"] == 1.0
    assert (row["us"], row["unrested_us"], row["sustained_us"]) == (100.0, 105.0, 120.0)
    assert (row["sustained_watts"], row["sustained_mhz"]) == (690.0, 1600.0)
    assert row["not_compared"] == {"B": "b: not importable here", "C": "ValueError: no such shape"}
    assert set(row["beside"]) == {"rawmla", "A"}
    assert row["beside"]["A"]["us"] == 150.0 and row["beside"]["rawmla"]["sustained_us"] == 120.0
    # Without rests first; then in turns, each library as often and in the same ways as ours.
    assert FakeGraph.log[:3] == [("ours", "no rests"), ("ours", "rested"), ("ours", "2.0 s")]
    turns = [entry for entry in FakeGraph.log[3:] if entry[0] != "slow"]
    turns.remove(("fast", "no rests"))  # when the faster of A's two calls was looked for
    # Every round begins its part without rests behind the last library's load, which is not counted.
    uncounted = [turns.pop(6 * number + 2) for number in range(measure.ROUNDS_BESIDE)]
    assert uncounted == [("fast", "no rests")] * measure.ROUNDS_BESIDE
    assert len(turns) == 6 * measure.ROUNDS_BESIDE
    assert turns[0::2] == [("ours", way) for _, way in turns[1::2]]
    assert all(name == "fast" for name, _ in turns[1::2])
    assert ratios(row, [])["A beside", "rested"] == 1.5

    FakeGraph.log.clear()
    row = measure.time_attention(case, lambda case: ready, families.Settings(5, 0.0, False), others)
    assert FakeGraph.log == [("ours", "no rests"), ("ours", "rested")]
    assert "sustained_us" not in row and "beside" not in row


def test_timed_check_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from benchlib import measure
    from rawmla import reference

    for case in (
        cases.DecodeCase(3, 2, 100, 6, causal=True, varlen=True, h_kv=2),
        cases.DecodeCase(2, 1, 70, 4, causal=False, varlen=False, dtype="fp16", d_qk=512),
    ):
        inputs = measure.make_inputs(case, sets=2, device="cpu")
        pages = [
            table[i, : -(-n // 64)] for table in inputs.block_tables for i, n in enumerate(case.lengths())
        ]
        used = np.concatenate([page.numpy() for page in pages])
        assert sorted(used) == list(range(inputs.k_cache.shape[0]))
        want, _ = reference.flash_mla_with_kvcache(
            inputs.q.float().numpy(),
            inputs.k_cache.float().numpy(),
            inputs.block_tables[0].numpy(),
            inputs.cache_seqlens.numpy(),
            cases.D_V,
            None,
            causal=case.causal,
        )
        for request in range(case.b):
            got = measure.attention_of_request(case, inputs, request).numpy()
            np.testing.assert_allclose(got, want[request], rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(allow_tf32=True))
        assert measure.check_output(case, inputs, torch.from_numpy(want)) < 1e-4
        with pytest.raises(AssertionError, match="relative error"):
            measure.check_output(case, inputs, torch.from_numpy(want * 1.02))
        assert torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("layout", ("v32", "model1", "bf16"))
def test_timed_sparse_inputs_and_their_check(layout: str) -> None:
    torch = pytest.importorskip("torch")
    from benchlib import sparse_measure
    from rawmla import reference

    d_qk = 512 if layout == "model1" else 576
    case = cases.SparseCase(3, 2, 100, 6, 40, layout, d_qk, 32, 20, 7, extra_tokens=31)
    inputs = sparse_measure.make_inputs(case, sets=2, device="cpu")
    assert inputs.q.shape == (3, 2, 6, d_qk) and len(inputs.index_sets) == 2
    slots = []
    for indices, extra_indices in inputs.index_sets:
        assert indices.shape == (3, 2, 40) and extra_indices.shape == (3, 2, 20)
        for rows in (*indices.flatten(0, 1), *extra_indices.flatten(0, 1)):
            assert len(set(rows.tolist())) == len(rows)
        slots.append({slot // 32 for slot in indices.flatten().tolist()})
    assert not slots[0] & slots[1], "the sets share pages"
    assert int(indices.max()) < inputs.k_cache.shape[0] * 32

    keywords = inputs.keywords(case, 0)
    as_bytes = {
        name: value.double().numpy() if value.element_size() == 2 else value.numpy()
        for name, value in {**keywords, "k_cache": inputs.k_cache}.items()
        if isinstance(value, torch.Tensor)
    }
    k_cache = as_bytes.pop("k_cache")
    out, _ = reference.flash_mla_with_kvcache(
        inputs.q.double().numpy(), k_cache, None, None, 512, is_fp8_kvcache=layout != "bf16", **as_bytes
    )
    assert np.isfinite(out).all() and out.any()
    assert sparse_measure.check_output(case, inputs, torch.from_numpy(out).bfloat16()) < 0.002
    with pytest.raises(AssertionError, match="relative error"):
        sparse_measure.check_output(case, inputs, torch.from_numpy(out * 1.02))


PREFILL_CASES = (
    cases.PrefillCase(11, 300, 6, 576, 40),
    cases.PrefillCase(2, 90, 3, 512, 90, batch_invariant=True),
    cases.PrefillCase(11, 300, 6, 576, 40, "v32", 64),
)


def prefill_in_numpy(
    q: Any, kv: Any, indices: Any, sm_scale: float, *, is_fp8_kvcache: bool = False, **_: bool
) -> tuple[Any, None, None]:
    """What the timed operation computes, on tensors of the host: rows of bf16 as a cache of one page."""
    import torch

    from rawmla import reference

    assert kv.is_contiguous() and indices.dtype == torch.int32
    k_cache = kv.numpy() if is_fp8_kvcache else kv[None].double().numpy()
    keywords = {"softmax_scale": sm_scale, "indices": indices.numpy(), "is_fp8_kvcache": is_fp8_kvcache}
    out, _ = reference.flash_mla_with_kvcache(
        q[:, None].double().numpy(), k_cache, None, None, 512, **keywords
    )
    return torch.from_numpy(out)[:, 0].bfloat16(), None, None


@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.id)
def test_timed_prefill_inputs_and_their_check(
    case: cases.PrefillCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from benchlib import prefill_measure

    monkeypatch.setattr(prefill_measure, "RANDOM_AT_A_TIME", 4 * case.s_kv)
    inputs = prefill_measure.make_inputs(case, sets=3, device="cpu")
    assert inputs.q.shape == (case.s_q, case.h_q, case.d_qk) and float(inputs.q.abs().max()) == 1
    assert inputs.positions.shape == inputs.indices.shape == (case.s_q, 1, case.topk)
    for row in inputs.positions[:, 0].tolist():
        assert len(set(row)) == case.topk and set(row) <= set(range(case.s_kv)) and row != sorted(row)
    assert len({kv.data_ptr() for kv in inputs.kv_sets}) == len(inputs.kv_sets) == 3
    if case.layout == "bf16":
        assert all(kv.shape == (case.s_kv, 1, case.d_qk) for kv in inputs.kv_sets)
        assert inputs.block_table is None and inputs.indices is inputs.positions
    else:
        page = case.page_block_size
        pages = -(-case.s_kv // page)
        assert all(kv.shape == (pages, page, 1, 656) for kv in inputs.kv_sets)
        assert sorted(inputs.block_table[0].tolist()) == list(range(pages))
        where = inputs.block_table[0].long()[inputs.positions // page] * page + inputs.positions % page
        assert torch.equal(inputs.indices.long(), where)

    fp8 = case.layout != "bf16"
    out, _, _ = prefill_in_numpy(
        inputs.q, inputs.kv_sets[0], inputs.indices, case.d_qk**-0.5, is_fp8_kvcache=fp8
    )
    assert bool(out.isfinite().all()) and bool(out.any())
    assert prefill_measure.check_output(case, inputs, out) < 0.003
    for token in (0, case.s_q - 1):
        wrong = out.clone()
        wrong[token] *= 1.03
        with pytest.raises(AssertionError, match="relative error"):
            prefill_measure.check_output(case, inputs, wrong)


def without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the calls of a graph, two where there would be ten, and time nothing."""
    from benchlib import measure, prefill_measure, timing

    class Once:
        def __init__(self, calls: Any, count: int) -> None:
            calls()

        def rested(self, replays: int) -> timing.Timing:
            return timing.Timing(20.0, 19.0, 21.0)

        without_rests = rested

    for module in (measure, prefill_measure):
        monkeypatch.setattr(module, "rest", lambda: None)
        monkeypatch.setattr(module, "CALLS_PER_GRAPH", 2)
    for module in (measure, timing):
        monkeypatch.setattr(module, "Graph", Once)


DECODE_CASES = (
    cases.DecodeCase(3, 2, 100, 6, causal=True, varlen=True),
    cases.DecodeCase(2, 1, 70, 4, causal=False, varlen=False, dtype="fp16", batch_invariant=True),
    cases.SparseCase(3, 2, 100, 6, 40, "v32", 576, 32, 20, 7, extra_tokens=31),
    cases.SparseCase(2, 1, 100, 3, 40, "bf16", 512, 64),
)


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.id)
def test_decode_row(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls to time give the right result, use every set and the plan; here nothing is timed."""
    torch = pytest.importorskip("torch")
    import rawmla
    from benchlib import measure, sparse_measure
    from rawmla import reference

    plans: list[Any] = []
    called: list[int] = []

    def get_mla_metadata(*_: Any, enable_batch_invariant: bool, out: Any = None) -> Any:
        plans.append(enable_batch_invariant)
        return out or ("plan", "splits")

    def in_numpy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return (
            value.double().numpy()
            if value.is_floating_point() and value.element_size() == 2
            else value.numpy()
        )

    def decode(
        q: Any, k_cache: Any, table: Any, lengths: Any, d_v: int, meta: Any, *_: Any, **keywords: Any
    ) -> Any:
        assert meta == "plan"
        called.append((keywords["indices"] if table is None else table).data_ptr())
        if "enable_batch_invariant" in keywords:
            assert keywords.pop("enable_batch_invariant") == case.batch_invariant
        given = {key: in_numpy(value) for key, value in keywords.items()}
        out, _ = reference.flash_mla_with_kvcache(
            in_numpy(q), in_numpy(k_cache), in_numpy(table), in_numpy(lengths), d_v, **given
        )
        return torch.from_numpy(out).to(q.dtype), None

    module: Any = sparse_measure if isinstance(case, cases.SparseCase) else measure
    make_inputs = module.make_inputs
    monkeypatch.setattr(module, "make_inputs", lambda case, sets: make_inputs(case, sets, "cpu"))
    monkeypatch.setattr(module, "l2_bytes", lambda: case.bytes_moved() + 1)
    monkeypatch.setattr(sparse_measure, "time_plan", lambda case, replays: 3.0)
    without_timing(monkeypatch)
    monkeypatch.setattr(measure, "METADATA_GRAPH_CALLS", (1, 2))
    monkeypatch.setattr(rawmla, "flash_mla_with_kvcache", decode, raising=False)
    monkeypatch.setattr(rawmla, "get_mla_metadata", get_mla_metadata, raising=False)
    row = measure.time_attention(case, module.prepare, families.Settings(5, 0.0, False), ())
    assert row["case"] == case.id and row["cold_us"] == 20.0 and "meta_us" in row
    assert len(set(called)) == measure.rotated_sets(case, case.bytes_moved() + 1) > 1
    assert set(plans) == {case.batch_invariant}
    assert 0 < row["rel_l2"] < 0.005
    assert row["gbps"] == pytest.approx(case.bytes_moved() / 20e3)


@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.id)
def test_prefill_row(case: cases.PrefillCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls to time give the right result and use every set; here nothing is timed."""
    torch = pytest.importorskip("torch")
    import rawmla
    from benchlib import measure, prefill_measure
    from kit import torch_reference
    from kit.sparse import row_format

    called: list[int] = []

    def prefill(q: Any, kv: Any, *arguments: Any, **keywords: Any) -> tuple[Any, None, None]:
        called.append(kv.data_ptr())
        assert keywords.get("enable_batch_invariant", False) == case.batch_invariant
        return prefill_in_numpy(q, kv, *arguments, **keywords)

    def gather(cache: Any, table: Any, lengths: Any, rows: Any, *, workspace_starts: Any) -> None:
        token = torch.arange(int(lengths[0]))
        page = table[0].long()[token // case.page_block_size]
        slots = page * case.page_block_size + token % case.page_block_size
        rows[int(workspace_starts[0]) :] = torch_reference.dequantise(cache, slots, row_format("v32", 576))

    make_inputs = prefill_measure.make_inputs
    monkeypatch.setattr(prefill_measure, "make_inputs", lambda case, sets: make_inputs(case, sets, "cpu"))
    monkeypatch.setattr(prefill_measure, "l2_bytes", lambda: 2 * case.bytes_moved())
    without_timing(monkeypatch)
    monkeypatch.setattr(rawmla, "flash_mla_sparse_fwd", prefill, raising=False)
    monkeypatch.setattr(rawmla, "gather_kv_cache", gather)
    settings = families.Settings(5, 0.0, False)
    row = measure.time_attention(case, prefill_measure.prepare, settings, ())
    assert len(set(called)) == 7 + (case.layout != "bf16")  # the sets, and the rows gathered into
    assert row["cold_us"] == 20.0
    assert 0 < row["rel_l2"] < 0.005
    assert row["tflops"] == pytest.approx(case.flops() / 20e6)
    assert ("gathered_us" in row) == ("gather_us" in row) == (case.layout != "bf16")


def test_calls_per_graph() -> None:
    pytest.importorskip("torch")
    from benchlib import measure

    chosen = (*cases.prefill_cases(), *mha_cases.mha_cases(), *prefix_cases.prefix_cases())
    for case in (*chosen, *flex_cases.flex_cases()):
        calls = measure.calls_per_graph(case)
        assert 2 <= calls <= 10 and calls * case.flops() <= measure.GRAPH_FLOPS
        assert calls == 10 or (calls + 1) * case.flops() > measure.GRAPH_FLOPS
    assert measure.calls_per_graph(cases.PrefillCase(1 << 20, 8192, 128, 576, 2048)) == 1


def test_dense_attention_counts() -> None:
    """Rates that were published with times, and windows and lengths counted pair by pair."""
    by_id = {case.id: case for case in mha_cases.mha_cases()}
    for name, us, tflops in (
        ("mha-b2-s8192-h16-d128-causal-bf16-fixed", 890, 618),
        ("mha-b8-s2048-h16-d128-causal-bf16-fixed", 335.9, 409),
        ("mha-b2-s8192-h16-d192v128-bf16-fixed", 1831, 751),
        ("mha-b2-s8192-h16-d64-causal-bf16-fixed", 620, 443),
    ):
        assert by_id[name].flops() / us / 1e6 == pytest.approx(tflops, abs=0.51)
    for causal in (False, True):
        case = mha_cases.MhaCase(3, 40, causal, 1, 1, 1, 1, varlen=True, window=7)
        seen = 0
        for queries, keys in case.lengths():
            own = keys - queries + np.arange(queries)[:, None]
            key = np.arange(keys)
            seen += int(((key >= own - 7) & ((key <= own) | (not causal))).sum())
        assert case.flops() == 4 * seen
    grouped = mha_cases.MhaCase(2, 10, h_q=4, h_kv=2, d_qk=5, d_v=3)
    assert grouped.bytes_moved() == 2 * (20 * 4 + 20 * 2) * 8


def test_varied_lengths_have_the_mean_of_the_fixed_ones() -> None:
    for case in mha_cases.mha_cases():
        queries, keys = zip(*case.lengths(), strict=True)
        assert len(queries) == case.b and min(queries) >= 1
        assert all(k >= q for q, k in case.lengths())
        assert case.s - 1 <= sum(queries) / case.b <= case.s
        assert (len(set(queries)) == case.b) == case.varlen or case.b in (1, 32)


MHA_CASES = (
    mha_cases.MhaCase(2, 20, h_q=6, h_kv=2, d_qk=24, d_v=16, sink=True),
    mha_cases.MhaCase(2, 20, causal=False, h_q=2, h_kv=2, d_qk=16, d_v=16, softcap=1.0, dtype="fp16"),
    mha_cases.MhaCase(3, 20, h_q=4, h_kv=2, d_qk=16, d_v=24, window=3, varlen=True),
    mha_cases.MhaCase(3, 20, causal=False, h_q=2, h_kv=1, d_qk=16, d_v=24, window=5),
)


@pytest.mark.parametrize("case", MHA_CASES, ids=lambda case: case.id)
def test_timed_dense_attention_and_its_check(
    case: mha_cases.MhaCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from benchlib import mha_measure

    inputs = mha_measure.make_inputs(case, "cpu")
    keywords = mha_measure.options(case, inputs, "attn_sink")
    on_host = {
        name: value.double().numpy() if name == "attn_sink" and value is not None else value
        for name, value in keywords.items()
    }
    if case.varlen:
        on_host |= {name: keywords[name].numpy() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    name = "flash_attn_varlen_func" if case.varlen else "flash_attn_func"
    arrays = [array.double().numpy() for array in (inputs.q, inputs.k, inputs.v)]
    out, _ = getattr(mha_measure.rawmla.reference, name)(*arrays, **on_host)
    out = torch.from_numpy(out)
    begin = 0
    for request, (queries, _) in enumerate(case.lengths()):
        own = out[begin : begin + queries] if case.varlen else out[request]
        begin += queries
        for token in range(queries):
            got = mha_measure.attention_of_token(case, inputs, request, token)
            torch.testing.assert_close(got, own[token], rtol=1e-9, atol=1e-12)
    assert mha_measure.check_output(case, inputs, out.to(inputs.q.dtype)) < 0.003
    with pytest.raises(AssertionError, match="has an error"):
        mha_measure.check_output(case, inputs, 1.02 * out)

    called: list[Any] = []
    monkeypatch.setattr(
        mha_measure.rawmla, name, lambda *a, **k: (called.append((a, k)), (out.to(a[0].dtype), None))[1]
    )
    monkeypatch.setattr(mha_measure, "make_inputs", lambda _: inputs)
    ready = mha_measure.prepare(case)
    assert (ready.sets, ready.calls) == (1, 10) and ready.rel_l2 < 0.003
    ready.call(0)
    assert len(called) == 2 and called[0] == called[1]


def test_peers_of_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN gets no case that torch would compute differently; FlashAttention-4 gets what ours gets."""
    torch = pytest.importorskip("torch")
    from benchlib import mha_measure, peers

    cudnn, flash = peers.MHA
    seen: list[tuple[str, dict[str, Any]]] = []

    def function(name: str) -> Callable[..., None]:
        return lambda q, k, v, **keywords: seen.append((name, keywords))

    names = ("flash_attn_func", "flash_attn_varlen_func")
    module = types.SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", function("torch"))
    for case in MHA_CASES:
        inputs = mha_measure.make_inputs(case, "cpu")
        with pytest.raises(ValueError, match="neither varied lengths"):
            cudnn.calls(case, inputs)
        (call,) = flash.calls(case, inputs)
        call(0)
        name, keywords = seen[-1]
        assert name == names[case.varlen] and keywords["causal"] == case.causal
        assert keywords["window_size"] == (case.window, 0 if case.causal else None)
        assert (keywords["learnable_sink"] is not None) == case.sink and keywords["softcap"] == case.softcap
    case = mha_cases.MhaCase(1, 8, h_q=2, h_kv=1, d_qk=8, d_v=8)
    (call,) = cudnn.calls(case, mha_measure.make_inputs(case, "cpu"))
    call(0)
    assert seen[-1] == ("torch", {"is_causal": True, "enable_gqa": True})


def test_dense_attention_is_always_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchlib import measure, mha_measure, peers

    seen: list[Any] = []
    monkeypatch.setattr(measure, "time_attention", lambda *arguments: seen.append(arguments))
    case = mha_cases.mha_cases()[0]
    FAMILY_BY_NAME[case.id].measure(case, families.Settings(5, 2.0, False))
    assert seen == [(case, mha_measure.prepare, families.Settings(5, 2.0, True), peers.MHA)]


@pytest.mark.parametrize(("d", "share"), ((128, 0.9), (96, 0.75)))
def test_the_stand_in_for_a_library_that_is_not_there(d: int, share: float) -> None:
    case = next(case for case in mha_cases.mha_cases() if case.d_qk == d)
    row = made_up_row(case, 800.0)
    ours = {"us": 800.0, "unrested_us": 810.0, "sustained_us": 900.0}
    row["beside"] = {"rawmla": ours, "cuDNN": {"us": 1000.0, "unrested_us": 1010.0, "sustained_us": 900.0}}

    def shown() -> dict[str, str]:
        headings, cells = report.family_cells(families.family_of(case.id), [row], [])
        return dict(zip(headings, cells, strict=True))

    assert shown()["better / ours, rested"] == "1.250" and shown()["cuDNN beside sustained µs"] == "900.0"
    assert shown()["stand-in for FlashAttention-4 / ours, rested"] == f"{share * 1.25:.3f}"
    assert shown()["stand-in for FlashAttention-4 / ours, sustained"] == f"{share:.3f}"
    row["beside"]["FlashAttention-4"] = {"us": 790.0}
    assert shown()["stand-in for FlashAttention-4 / ours, rested"] == "-"
    assert shown()["better / ours, rested"] == "0.988"


def test_stored_rows_of_dense_attention_match_one_case_each(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    for case in mha_cases.mha_cases():
        path.write_text(json.dumps({"Another@1": [{**case.fields(), "us": 10.0}]}))
        assert against.load(path) == [against.Stored("Another", case.id, {"no rests": 10.0})]


def stored_prefix_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(PEERS.read_text())["vLLM's Triton kernel"]
    return rows


@pytest.mark.parametrize(
    "row",
    stored_prefix_rows(),
    ids=lambda row: "-".join(str(row[key]) for key in ("b", "query_len", "ctx_len", "cache", "window")),
)
def test_prefix_prefill_counts_agree_with_published_rates(row: dict[str, Any]) -> None:
    (case,) = (
        case
        for case in prefix_cases.prefix_cases()
        if all(row[key] == value for key, value in case.fields().items())
    )
    assert case.flops() / row["us"] / 1e6 == pytest.approx(row["tflops"], abs=0.5)


def test_stored_prefix_rows_match_one_case_each(tmp_path: Path) -> None:
    stored = stored_of(against.load(PEERS), "prefix prefill")
    assert len(stored) == len({other.case for other in stored}) == len(stored_prefix_rows()) == 6
    assert {other.label for other in stored} == {"vLLM's Triton kernel"}
    path = tmp_path / "list.json"
    for case in prefix_cases.prefix_cases():
        path.write_text(json.dumps({"Another@1": [{**case.fields(), "us": 10.0}]}))
        assert against.load(path) == [against.Stored("Another", case.id, {"no rests": 10.0})]
    row = {**made_up_row(families.case_named(stored[0].case), 2000.0), "unrested_us": 2827.0}
    headings, cells = report.family_cells(families.family_of(row["case"]), [row], stored)
    shown = dict(zip(headings, cells, strict=True))
    assert (
        shown["vLLM's Triton kernel no rests µs"] == "8481.0" and shown["better / ours, no rests"] == "3.000"
    )


def test_prefix_prefill_counts() -> None:
    """Positions counted pair by pair, and the cache's bytes that they lie in."""
    case = prefix_cases.PrefixCase(3, 20, 30, h_q=4, h_kv=2, d=8, window=25, ragged=True)
    assert sorted(case.query_lengths()) == [1, 20, 40]
    seen = 0
    for queries in case.query_lengths():
        own = 30 + np.arange(queries)[:, None]
        key = np.arange(30 + queries)
        seen += int(((key <= own) & (own - key < 25)).sum())
    assert case.flops() == 4 * 8 * 4 * seen
    new = 2 * 61 * (4 + 4 + 2 + 2) * 8  # q, out, k, v
    assert case.bytes_moved() == new + 2 * 2 * 8 * 3 * 2 * 24
    fp8 = prefix_cases.PrefixCase(3, 20, 30, h_q=4, h_kv=2, d=8, cache="fp8", fp8_out=True)
    assert fp8.bytes_moved() == 60 * (2 * 8 + 4) * 8 + 2 * 8 * 3 * 2 * 30


def test_ragged_prefix_prefill_has_the_tokens_of_the_fixed_one() -> None:
    (ragged,) = (case for case in prefix_cases.prefix_cases() if case.ragged)
    lengths = ragged.query_lengths()
    assert (min(lengths), max(lengths)) == (1, 2048) and lengths == ragged.query_lengths()
    assert sum(lengths) == pytest.approx(ragged.b * ragged.query_len, abs=ragged.b)
    assert ragged.flops() == pytest.approx(prefix_cases.prefix_cases()[0].flops(), rel=0.03)


PREFIX_CASES = (
    prefix_cases.PrefixCase(2, 9, 37, h_q=6, h_kv=2, d=24, sink=True),
    prefix_cases.PrefixCase(2, 9, 37, h_q=4, h_kv=2, d=16, cache="fp8", alibi=True, page_block_size=5),
    prefix_cases.PrefixCase(3, 9, 20, h_q=2, h_kv=1, d=16, window=12, ragged=True),
    prefix_cases.PrefixCase(2, 9, 0, h_q=2, h_kv=2, d=16, fp8_out=True),
)


@pytest.mark.parametrize("case", PREFIX_CASES, ids=lambda case: case.id)
def test_timed_prefix_prefill_and_its_check(
    case: prefix_cases.PrefixCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from benchlib import prefix_measure

    inputs = prefix_measure.make_inputs(case, "cpu")
    if case.fp8_out:
        inputs.v.mul_(0.01)  # results of a few keys are as small as those of many then
    given, keywords = prefix_measure.arguments(case, inputs)
    assert given[3] is inputs.out
    doubles = [array.double() for array in given[:3]]
    cache = [array.double() if case.cache == "bf16" else array.view(torch.uint8) for array in given[5:7]]
    out = torch.empty_like(doubles[0])
    sinks = {"sinks": inputs.sinks.double() if case.sink else None, "fp8_out_scale": None}
    arrays = [
        x.numpy() if isinstance(x, torch.Tensor) else x for x in (*doubles, out, given[4], *cache, *given[7:])
    ]
    on_host = {key: x.numpy() if isinstance(x, torch.Tensor) else x for key, x in (keywords | sinks).items()}
    prefix_measure.rawmla.reference.context_attention_fwd(*arrays, **on_host)
    row = 0
    for request, queries in enumerate(case.query_lengths()):
        keys = prefix_measure.keys_of_request(case, inputs, request)
        for token in range(queries):
            got = prefix_measure.attention_of_token(case, inputs, keys, row, token)
            torch.testing.assert_close(got, out[row], rtol=1e-9, atol=1e-12)
            row += 1
    assert row == len(out)

    def stored(values: Any) -> Any:
        if not case.fp8_out:
            return values.to(inputs.out.dtype)
        return (values / prefix_measure.OUT_SCALE).clamp(-448, 448).to(inputs.out.dtype)

    error = prefix_measure.check_output(case, inputs, stored(out))
    assert error < 0.003 or (case.fp8_out and 0.01 < error < 0.035)
    with pytest.raises(AssertionError, match="has an error"):
        prefix_measure.check_output(case, inputs, stored(out * (1.06 if case.fp8_out else 1.02)))

    called: list[Any] = []
    monkeypatch.setattr(
        prefix_measure.rawmla,
        "context_attention_fwd",
        lambda *a, **k: (called.append((a, k)), stored(out))[1],
    )
    monkeypatch.setattr(prefix_measure, "make_inputs", lambda _: inputs)
    ready = prefix_measure.prepare(case)
    assert (ready.sets, ready.calls, ready.rel_l2) == (1, 10, error)
    ready.call(0)
    assert len(called) == 2
    for a, k in called:
        assert all(x is y for x, y in zip(a, given, strict=True)) and k.keys() == keywords.keys()
        assert all(k[name] is keywords[name] for name in k)


def test_flex_counts() -> None:
    """Densities and rates that were published with times, and blocks counted pair by pair."""
    by_id = {case.id: case for case in flex_cases.flex_cases()}
    for name, density, us, tflops in (
        ("flex-b2-s8192-h16-d128-causal", 0.508, 963, 580),
        ("flex-b2-s8192-h16-d128-full", 1, 2237, 492),
        ("flex-b2-s8192-h16kv2-d128-causal", 0.508, 1341, 416),
        ("flex-b2-s8192-h16-d128-window1024", 0.132, 490, 296),
        ("flex-b2-s8192-h16-d128-causal-alibi", 0.508, 1472, 379),
        ("flex-b2-s8192-h16-d64-causal", 0.508, 775, 360),
    ):
        assert by_id[name].density() == pytest.approx(density, abs=0.0005)
        assert by_id[name].flops() / us / 1e6 == pytest.approx(tflops, abs=0.7)
    for mask, extent in (("window", 150), ("documents", 90), ("prefix", 200), ("causal", 0), ("full", 0)):
        case = flex_cases.FlexCase(3, 512, h_q=4, h_kv=2, d=8, mask=mask, extent=extent, further=True)
        pairs = np.zeros((512, 512), dtype=bool)
        for token in range(512):
            begin, end = case.visible(token)
            pairs[token, begin:end] = True
        blocks = pairs.reshape(4, 128, 4, 128).any(axis=(1, 3))
        assert [set(np.flatnonzero(row)) for row in blocks] == case.attended(128)
        assert case.flops() == 3 * 4 * 4 * 8 * int(blocks.sum()) * 128**2
        assert case.bytes_moved() == 3 * 512 * (2 * 2 * 8 * (4 + 2) + 4 * (4 + 4))
    compared = [case for case in flex_cases.flex_cases() if case.is_compared]
    assert len(compared) == 8 and not any(case.further or case.cuda_text for case in compared)


def test_stored_rows_of_flex_attention_match_one_case_each(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    for case in flex_cases.flex_cases():
        path.write_text(json.dumps({"Another@1": [{**case.fields(), "us": 10.0}]}))
        assert against.load(path) == [against.Stored("Another", case.id, {"no rests": 10.0})]


FLEX_CASES = (
    flex_cases.FlexCase(2, 40, h_q=4, h_kv=2, d=24, score="alibi"),
    flex_cases.FlexCase(2, 40, h_q=2, h_kv=2, d=16, score="softcap", block_size=16),
    flex_cases.FlexCase(1, 40, h_q=2, h_kv=1, d=16, mask="window", extent=7, score="bias"),
    flex_cases.FlexCase(3, 40, h_q=2, h_kv=2, d=16, mask="documents", extent=9, further=True),
    flex_cases.FlexCase(2, 40, h_q=2, h_kv=2, d=16, mask="prefix", extent=13),
    flex_cases.FlexCase(2, 40, h_q=4, h_kv=2, d=16, score="scale"),
    flex_cases.FlexCase(2, 40, h_q=2, h_kv=2, d=16, mask="full"),
    flex_cases.FlexCase(2, 40, h_q=2, h_kv=2, d=16, cuda_text=True),
)


UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flex attention is its plain definition, which it else compiles in part."""
    torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@UNFUSED
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", FLEX_CASES, ids=lambda case: case.id)
def test_timed_flex_attention_and_its_check(
    case: flex_cases.FlexCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition of the check agrees with torch's, which asks the functions of the case; rawmla can trace
    these, knows them again, and gets them.
    """
    torch = pytest.importorskip("torch")
    from torch.nn.attention import flex_attention as torch_flex

    import rawmla
    from benchlib import flex_measure
    from rawmla.flex import memo, mods

    inputs = flex_measure.make_inputs(case, "cpu")
    score, mask = flex_measure.functions(case, inputs)
    assert (score is None, mask is None) == (case.score is None, case.mask == "full")
    given = {"score_mod": score, "mask_mod": mask}
    traced = {kind: memo.read(one, kind, "cpu").frame.mod for kind, one in given.items() if one is not None}
    with monkeypatch.context() as patched:
        patched.setattr(memo, "trace", None)
        again = flex_measure.functions(case, inputs)
        for kind, one in zip(given, again, strict=True):
            assert one is None or memo.read(one, kind, "cpu").frame.mod.text == traced[kind].text

    block_mask = mask and torch_flex.create_block_mask(mask, None, None, case.s, case.s, device="cpu")
    doubles = [array.double() for array in (inputs.q, inputs.k, inputs.v)]
    keywords = {"enable_gqa": case.h_kv != case.h_q}
    torch._dynamo.reset()  # it compiles a few variants of its eager attention at most
    lse_too = torch_flex.AuxRequest(lse=True)
    out, aux = torch_flex.flex_attention(*doubles, score, block_mask, return_aux=lse_too, **keywords)
    lse = aux.lse
    largest = torch.empty(out.shape[:3], dtype=torch.float64)
    for request in range(case.b):
        for token in range(case.s):
            got = flex_measure.attention_of_token(case, inputs, request, token)
            largest[request, :, token] = got[2]
            for one, want in zip(got, (out, lse), strict=False):
                torch.testing.assert_close(one, want[request, :, token].double(), rtol=1e-6, atol=1e-6)
            assert (got[2] <= got[1]).all()
    right = out.to(inputs.q.dtype)
    further = rawmla.AuxOutput(lse.float(), largest.float()) if case.further else None
    results = (right, further) if case.further else (right,)
    error = flex_measure.check_output(case, inputs, *results)
    assert 0 < error < 0.003
    with pytest.raises(AssertionError, match="has an error"):
        flex_measure.check_output(case, inputs, 1.02 * right)
    for name in ("lse", "max_scores") if case.further else ():
        wrong = further._replace(**{name: getattr(further, name) + 0.01})
        with pytest.raises(AssertionError, match=f"{name} of token 0 of request 0 has an error"):
            flex_measure.check_output(case, inputs, right, wrong)

    called: list[Any] = []
    made: list[Any] = []
    answer = results if case.further else right
    monkeypatch.setattr(
        rawmla, "flex_attention", lambda *a, **k: (called.append((a, k)), answer)[1], raising=False
    )
    monkeypatch.setattr(
        rawmla, "create_block_mask", lambda *a, **k: (made.append((a, k)), "mask")[1], raising=False
    )
    monkeypatch.setattr(flex_measure, "make_inputs", lambda _: inputs)
    ready = flex_measure.prepare(case)
    assert (ready.sets, ready.calls, ready.rel_l2) == (1, 10, error)
    ready.call(0)
    assert len(called) == 2 and called[0] == called[1]
    (arguments, options), request = called[0], rawmla.AuxRequest(lse=True, max_scores=True)
    assert options == {**keywords, "return_aux": request if case.further else None}
    assert all(x is y for x, y in zip(arguments, (inputs.q, inputs.k, inputs.v), strict=False))
    assert (arguments[3] is None) == (case.score is None)
    assert arguments[4] == (None if case.mask == "full" else "mask")
    if case.mask != "full":
        (((function, *sizes), options),) = made
        assert sizes == [None, None, case.s, case.s]
        assert options == {"device": "cuda", "BLOCK_SIZE": case.block_size}
        assert isinstance(function, mods.CudaMod) == case.cuda_text


@UNFUSED
@pytest.mark.usefixtures("uncompiled")
def test_peers_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are compiled once, get what ours gets, and are not compared where they give something else."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import flex_attention as torch_flex

    from benchlib import flex_measure, peers

    triton, flash = peers.FLEX
    eager = torch_flex.flex_attention
    seen: list[dict[str, Any]] = []
    compiled: list[Any] = []
    factor = 1.0

    def attention(q: Any, k: Any, v: Any, *functions: Any, kernel_options: Any, **keywords: Any) -> Any:
        seen.append(kernel_options)
        return factor * eager(q, k, v, *functions, **keywords)

    compile_really = torch.compile

    def compile_now(function: Any, **keywords: Any) -> Any:
        if function is not attention:  # torch's own, for its eager answer
            return compile_really(function, **keywords)
        assert keywords == {"dynamic": False, "fullgraph": True}
        compiled.append(function)
        return function

    monkeypatch.setattr(torch_flex, "flex_attention", attention)
    monkeypatch.setattr(torch, "compile", compile_now)
    plain = [case for case in FLEX_CASES if not (case.further or case.cuda_text)]
    for case in plain:
        inputs = flex_measure.make_inputs(case, "cpu")
        (call,) = triton.calls(case, inputs)
        call(0)
        assert seen == [None, None] and len(compiled) == 1
        seen.clear()
        compiled.clear()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError):
        flash.calls(case, inputs)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("flash_attn.cute"))
    assert len(flash.calls(case, inputs)) == 1 and seen == [{"BACKEND": "FLASH"}]
    factor = 1.02
    for peer in peers.FLEX:
        with pytest.raises(AssertionError, match="has an error"):
            peer.calls(case, inputs)


def test_flex_attention_is_compared_where_torch_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchlib import flex_measure, measure, peers

    seen: list[Any] = []
    monkeypatch.setattr(measure, "time_attention", lambda *arguments: seen.append(arguments))
    for case in flex_cases.flex_cases():
        FAMILY_BY_NAME[case.id].measure(case, families.Settings(5, 2.0, False))
        beside = peers.FLEX if case.is_compared else ()
        assert seen.pop() == (case, flex_measure.prepare, families.Settings(5, 2.0, True), beside)


def test_block_mask_row(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import rawmla
    from benchlib import flex_measure, measure

    case = flex_cases.BlockMaskCase(1024)

    def made(seq: int, mask: Any) -> Any:
        """A mask of rawmla from torch's lists."""
        from torch.nn.attention.flex_attention import create_block_mask

        theirs = create_block_mask(mask, None, None, seq, seq, device="cpu")
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        lists = [getattr(theirs, name) for name in names]
        return rawmla.BlockMask.from_kv_blocks(*lists, seq_lengths=(seq, seq))

    right = made(1024, flex_measure.causal)
    flex_measure.check_block_mask(case, right)
    with pytest.raises(AssertionError, match="other blocks than"):
        flex_measure.check_block_mask(case, made(1024, lambda b, h, q, k: q <= k))
    with pytest.raises(AssertionError, match="other full blocks"):
        flex_measure.check_block_mask(case, made(1024, lambda b, h, q, k: (q >= k) & (q != 1000)))

    called: list[Any] = []
    monkeypatch.setattr(
        rawmla, "create_block_mask", lambda *a, **k: (called.append((a, k)), right)[1], raising=False
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(flex_measure, "rest", lambda: None)
    monkeypatch.setattr(measure, "HOST_BURSTS", 1)
    without_timing(monkeypatch)
    row = flex_measure.time_block_mask(case, 5)
    assert row["case"] == case.id and row["us"] == 20.0 and row["call_us"] > 0
    arguments = ((flex_measure.causal, None, None, 1024, 1024), {"device": "cuda"})
    assert all(one == arguments for one in called) and len(called) > 2


def test_host_time_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed calls have the same functions; the first call of another one finds an empty cache."""
    torch = pytest.importorskip("torch")
    import rawmla
    from benchlib import flex_measure, measure
    from rawmla.flex.trace import trace

    called: list[tuple[Any, str]] = []

    def attention(q: Any, k: Any, v: Any, score: Any, block_mask: Any) -> None:
        called.append((score, os.environ["RAWMLA_CACHE_DIR"]))
        assert block_mask == "mask" and q.shape[2] == flex_measure.HOST_TOKENS
        if called[-1][1] != "before":
            assert os.listdir(called[-1][1]) == [] and "sin" in trace(score, "score_mod", "cpu").text

    make_inputs = flex_measure.make_inputs
    monkeypatch.setattr(flex_measure, "make_inputs", lambda case: make_inputs(case, "cpu"))
    monkeypatch.setenv("RAWMLA_CACHE_DIR", "before")
    monkeypatch.setattr(rawmla, "flex_attention", attention, raising=False)
    monkeypatch.setattr(rawmla, "create_block_mask", lambda *a, **k: "mask", raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "HOST_BURSTS", 2)
    figures = flex_measure.time_host()
    assert set(figures) == {key for key in made_up_run()["host"] if key.startswith("flex")}
    assert figures["flex_call_quiet_us"] <= figures["flex_call_us"] <= figures["flex_call_p90_us"]
    *warm, (_, folder) = called
    assert len(warm) == 3 * measure.HOST_CALLS and len(set(warm)) == 1 and warm[0][1] == "before"
    assert not os.path.exists(folder) and os.environ["RAWMLA_CACHE_DIR"] == "before"


def test_host_time_in_words() -> None:
    host = made_up_run()["host"]
    text = report.describe_host(host)
    assert text.startswith("host time of one decode call 15.0 µs") and "one flex call 55.0 µs" in text
    assert text.endswith("the first flex call of a new function 4.3 s, with its compilation")
    older_host = {key: value for key, value in host.items() if key.startswith("decode")}
    assert report.describe_host(older_host) == text[: text.index("; host time of one flex call")]


def test_rotated_sets() -> None:
    pytest.importorskip("torch")
    from benchlib import measure

    l2 = 60 << 20
    small = cases.DecodeCase(1, 1, 8192, 128, causal=False, varlen=False)
    large = cases.DecodeCase(128, 1, 8192, 128, causal=False, varlen=False)
    assert measure.rotated_sets(large, l2) == 1
    assert measure.rotated_sets(small, l2) * small.bytes_moved() > measure.COLD_L2_FACTOR * l2


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" file="tests/gpu/test_a.py" name="test_one" time="1.5"/>
<testcase classname="tests.gpu.test_a" file="tests/gpu/test_a.py" name="test_two" time="0.5">
<failure message="no">no</failure></testcase>
<testcase classname="tests.test_b.TestClass" file="tests/test_b.py" name="test_three" time="0">
<skipped message="no GPU"/></testcase>
<testcase classname="tests.gpu.test_a" file="tests/gpu/test_a.py" name="test_four" time="7.5">
<error message="broken">broken</error></testcase>
<testcase classname="" name="tests.test_c" time="0"><error message="not collected">no</error></testcase>
</testsuite></testsuites>"""


def test_junit_counts() -> None:
    found = gpu_check.parse_junit(JUNIT)
    assert list(found) == ["tests/gpu/test_a.py", "tests/test_b.py", "tests/test_c.py"]
    failures = ["tests.gpu.test_a::test_two", "tests.gpu.test_a::test_four"]
    assert found["tests/gpu/test_a.py"] == {
        "passed": 1,
        "failed": 2,
        "skipped": 0,
        "seconds": 9.5,
        "failures": failures,
        "skip_reasons": {},
        "long": {"tests.gpu.test_a::test_four": 7.5},
    }
    assert found["tests/test_b.py"]["skip_reasons"] == {"no GPU": 1}
    assert found["tests/test_c.py"]["failed"] == 1
    total = gpu_check.sum_counts(found)
    assert (total["passed"], total["failed"], total["skipped"], len(total["failures"])) == (1, 3, 1, 3)


@pytest.mark.parametrize(
    ("options", "passed", "left_out"),
    ((("-n", "1"), 1, 2), (("--full",), 3, 0), (("-k", "two"), 0, 1)),
    ids=("several", "full", "some"),
)
def test_full_cases_are_left_out(
    options: tuple[str, ...], passed: int, left_out: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless --full is given, and a line counts those that -k would have run."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "kit").symlink_to(ROOT / "tests" / "kit")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: some\n")
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_one(): pass\n"
        "@pytest.mark.full\ndef test_two(): pass\n"
        "@pytest.mark.full\ndef test_three(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert f"{passed} passed" in printed or (not passed and "passed" not in printed), printed
    wanted = [f"{left_out} cases left out: --full runs them too (docs/checks.md)"] * (left_out > 0)
    assert [line for line in printed.splitlines() if "left out" in line] == wanted, printed


@pytest.mark.parametrize(
    ("named", "wanted"),
    [("", "left out the 1 files of tests/gpu: "), ("gpu/test_b.py", "skipped 2 tests: ")],
    ids=("all", "a file"),
)
def test_without_a_gpu_its_tests_are_left_out(
    named: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "kit").symlink_to(ROOT / "tests" / "kit")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: some\n")
    (tmp_path / "test_a.py").write_text("def test_one(): pass\n")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "test_b.py").write_text("def test_two(): pass\ndef test_three(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *named.split()]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert wanted in printed and ("1 passed" in printed) == (not named), printed


def test_known_seconds() -> None:
    """The mean of a file's tests, and its long ones."""
    counts = {"passed": 2, "failed": 1, "skipped": 5, "seconds": 12.0}
    rows = [{"file": "a.py", **counts, "long": {"a::x": 8.0}}, {**file_row("c.py", 0), "seconds": 9.0}]
    assert gpu_check.known_seconds(rows) == {"a.py": 4.0, "a::x": 8.0}


def test_order_and_parts_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New files, long tests, then the others of a file together; each test is in one of the parts."""
    spec = importlib.util.spec_from_file_location("conftest_of_tests", ROOT / "tests" / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    assert conftest.junit_name("tests/gpu/test_a.py::Class::test_b[x::y-1]") == (
        "tests.gpu.test_a.Class::test_b[x::y-1]"
    )
    nodes = ["t/a.py::one", "t/a.py::two[x]", "t/b.py::one", "t/b.py::C::two", "t/c.py::one", "t/c.py::two"]
    dropped: list[Any] = []
    config = types.SimpleNamespace(
        hook=types.SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    )

    def order() -> list[str]:
        items = [types.SimpleNamespace(nodeid=node) for node in nodes]
        conftest.Order().pytest_collection_modifyitems(config, items)
        return [item.nodeid for item in items]

    for name in ("TEST_SECONDS", "TEST_PART"):
        monkeypatch.delenv(name, raising=False)
    assert order() == nodes
    path = tmp_path / "seconds.json"
    path.write_text(json.dumps({"t/b.py": 2.0, "t/a.py": 1.0, "t.a::two[x]": 9.0, "t.b.C::two": 0.5}))
    monkeypatch.setenv("TEST_SECONDS", str(path))
    assert order() == [*nodes[4:], nodes[1], nodes[2], nodes[0], nodes[3]]
    parts = []
    for part in (1, 2, 3, 4):
        monkeypatch.setenv("TEST_PART", f"{part}/4")
        dropped.clear()
        parts.append(order())
        assert {item.nodeid for item in dropped} == set(nodes) - set(parts[-1])
    assert parts[0] == [nodes[4], nodes[0]]
    assert sorted(name for part in parts for name in part) == sorted(nodes)


def begun(stage: str, *arguments: str) -> gpu_check.Run:
    """A run of a stage that has no row yet."""
    options = gpu_check.parse_arguments(list(arguments))
    return gpu_check.Run(options, {**made_up_part(stage, {"rows": []}), "ended": False}, [])


def small_suite(root: Path) -> None:
    (root / "tests" / "gpu").mkdir(parents=True)
    (root / "tests" / "gpu" / "test_a.py").write_text(
        "import pytest\ndef test_one(): pass\n"
        "@pytest.mark.skip(reason='needs two GPUs')\ndef test_two(): pass\n"
    )
    (root / "tests" / "gpu" / "test_host_time.py").write_text(
        "import os\ndef test_alone(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
    )
    (root / "tests" / "test_b.py").write_text("def test_three(request): assert request.config.option.full\n")
    (root / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--full', action='store_true')\n"
    )


@pytest.mark.parametrize(
    "arguments", full_unless(lambda given: not given, ([], ["--test-args", ""])), ids=("several", "one")
)
def test_the_tests_of_a_tree(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One run with several processes, counted per file; what measures time runs alone."""
    if not arguments:
        pytest.importorskip("xdist")
    small_suite(tmp_path)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):  # of the run that this test is in
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    path = tmp_path / "record.json"
    monkeypatch.setattr(gpu_check, "RECORD", path)
    run = begun("tests", "--record", str(path), *arguments)
    assert gpu_check.run_tests(run)
    assert record.read(path) == [record.sealed(run.part)]
    counts = {row["file"]: (row["passed"], row["failed"], row["skipped"]) for row in run.part["rows"]}
    assert counts == {
        "tests/gpu/test_a.py": (1, 0, 1),
        "tests/gpu/test_host_time.py": (1, 0, 0),
        "tests/test_b.py": (1, 0, 0),
    }

    def again() -> tuple[bool, dict[str, Any]]:
        run = begun("tests", "--record", str(path), "--tests", "test_b", *arguments)
        good = gpu_check.run_tests(run)
        return good, run.part["rows"][-1] if run.part["rows"] else {}

    (tmp_path / "tests" / "test_b.py").write_text(
        'import pytest\npytest.skip("no such GPU", allow_module_level=True)\n'
    )
    good, row = again()
    assert good and row["skipped"] == 1
    (tmp_path / "tests" / "test_b.py").write_text("\n")
    assert again() == (False, {}), "a file without a test"
    (tmp_path / "tests" / "test_b.py").write_text("import no_such_module\n")
    good, row = again()
    assert not good and row["failed"] == 1


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)", 3),
        ("no summary", None),
    ],
)
def test_sanitizer_summary(output: str, errors: int | None) -> None:
    assert gpu_check.sanitizer_errors(output) == errors


SANITIZER = """
import os, subprocess, sys
tool, arguments = sys.argv[2], sys.argv[9:]
assert sys.argv[1:8:2] == ["--tool", "--error-exitcode", "--port", "--launch-timeout"]
assert arguments.pop(0) == "--more"
print("port", sys.argv[6])
status = subprocess.run(arguments).returncode
bad = (tool, os.environ["TEST_PART"]) == ("racecheck", "1/2")
silent = (tool, os.environ["TEST_PART"]) == ("initcheck", "2/2")
if not silent:
    print(f"RACECHECK SUMMARY: {4 * bad} hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors")
sys.exit(int(sys.argv[4]) if bad else status)
"""


def test_the_sanitizer_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All parts of all tools run; what one part finds, or fails to say, makes its tool not clean."""
    small_suite(tmp_path)
    (tmp_path / "tests" / "gpu" / "test_c.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.sanitizer\n"
        "def test_one(): assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
        "def test_two(): assert os.environ['OMP_NUM_THREADS'] == '1'\n"
    )
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!{sys.executable} -IS\n{SANITIZER}")
    program.chmod(0o700)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    assert gpu_check.files_with_marker("sanitizer") == ["tests/gpu/test_c.py"]
    path = tmp_path / "record.json"
    monkeypatch.setattr(gpu_check, "RECORD", path)
    arguments = ["--record", str(path), "--sanitizer-args=--more", "--sanitizer-parts", "2"]
    run = begun("sanitizer", *arguments)
    assert not gpu_check.run_sanitizer(run)
    assert record.read(path) == [record.sealed(run.part)]
    found = {
        row["tool"]: tuple(row[key] for key in ("passed", "failed", "errors", "exit_status", "clean"))
        for row in run.part["rows"]
    }
    assert found == {
        "memcheck": (4, 0, 0, 0, True),
        "racecheck": (4, 0, 4, gpu_check.SANITIZER_ERROR, False),
        "synccheck": (4, 0, 0, 0, True),
        "initcheck": (4, 0, None, 0, False),
    }
    out = capfd.readouterr().out
    assert out.count("2 passed") == 8
    assert len(set(re.findall(r"^port (\d+)$", out, re.MULTILINE))) == 8
    whole = ["--sanitizer-parts", "1", "--tools", "memcheck"]
    assert gpu_check.run_sanitizer(begun("sanitizer", *arguments, *whole))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    assert not gpu_check.run_sanitizer(begun("sanitizer", *arguments))
    with pytest.raises(SystemExit):
        gpu_check.parse_arguments(["--sanitizer-parts", "0"])


def test_the_sanitizer_gets_every_case() -> None:
    """The files that are looked for have all that is marked; the GPU's tests can be collected anywhere."""
    arguments = ["-q", "-p", "no:cacheprovider", "--collect-only", "-m", "sanitizer", "tests/gpu"]
    answer = fresh.run(("-c", "import pytest, sys; sys.exit(pytest.main())", *arguments), ROOT, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = {line.partition("::")[0] for line in answer.stdout.splitlines() if "::" in line}
    assert found == set(gpu_check.files_with_marker("sanitizer"))


def test_a_part_without_a_case_is_not_clean() -> None:
    def part(passed: int, status: int = 0, failed: int = 0) -> Any:
        counts = {**gpu_check.empty_counts(), "passed": passed, "failed": failed}
        return {"a.py": counts}, status, "ERROR SUMMARY: 0 errors"

    assert gpu_check.sanitizer_verdict([part(1), part(2)])["clean"]
    for bad in (part(0), part(0, 5), part(1, 1, 1), ({}, 0, "ERROR SUMMARY: 0 errors")):
        verdict = gpu_check.sanitizer_verdict([part(1), bad])
        assert not verdict["clean"] and verdict["exit_status"] == bad[1]


def test_a_record_with_a_changed_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure, a line that is gone, a machine: by every script that reads the record."""
    path = tmp_path / "record.json"
    record.write(made_up_parts(), path)
    assert record.read(path) == made_up_parts()
    text = path.read_text()
    first = made_up_run()["rows"][0]
    assert sum(line.startswith("{") and '"case"' in line for line in text.splitlines()) == len(
        families.all_cases()
    ), "a row a line"
    lines = text.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if first["case"] in line)
    for changed in (
        text.replace('"passed": 3,', '"passed": 4,'),
        "".join(lines[:at] + lines[at + 1 :]),
        text.replace('"gpus": 1', '"gpus": 2', 1),
    ):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(record.RecordError, match="it was changed after its run"):
            record.read(path)
        with pytest.raises(ValueError, match="it was changed after its run"):
            against.load(path)
        monkeypatch.setattr(update_figures, "RECORD", path)
        assert update_figures.main(["--check"]) == 2
        merged = tmp_path / "merged.json"
        assert gpu_check.main(["--merge", str(path), "--record", str(merged)]) == 2 and not merged.exists()
        assert capsys.readouterr().err.count("it was changed after its run") == 2
    for text in ("{}", "[]", "no JSON", '{"parts": [{}]}'):
        path.write_text(text)
        with pytest.raises(record.RecordError, match="expected a record"):
            record.read(path)


def test_parts_of_one_record_have_sources_and_machine_in_common(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "docs" / "record.json"
    part = made_up_part("tests", {"rows": [file_row("tests/test_a.py", 1)]})
    same = record.identity(part)
    assert gpu_check.earlier_parts(path, same) == []
    record.write([part], path)
    assert gpu_check.earlier_parts(path, same) == [part]
    assert capsys.readouterr().out == ""
    for key, value in same.items():
        assert gpu_check.earlier_parts(path, {**same, key: "another"}) == []
        assert capsys.readouterr().out == (
            f"record.json: made with other {key} {value}; a new record is started\n"
        )
    for other in (
        made_up_part("tests", {"rows": [], "source_sha256": "1" * 64}),
        made_up_part("tests", {"rows": []}, device="NVIDIA H100"),
        made_up_part("tests", {"rows": []}, driver="1"),
    ):
        with pytest.raises(record.RecordError, match="expected .*, got "):
            record.merged([[part], [other]])
    assert record.merged([[part], [made_up_part("tests", {"rows": []}, gpus=2)]])
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_what_runs_again_is_kept_beside_the_first_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later row counts, whole: no field of the earlier one is in it. The pages show both."""
    name = "tests/test_a.py"
    row = {**made_up_row(families.case_named(SLOWER), 100.0), "cold_us": 1.0}
    failed = {"case": "metadata-b1", "error": "RuntimeError"}
    fast = {"case": SLOWER, "us": 90.0}
    first = [
        made_up_part(
            "bench", {**made_up_run(), "rows": [row, failed], "errors": ["metadata-b1: RuntimeError"]}
        ),
        made_up_part("tests", {"rows": [file_row(name, 91, 1), file_row("tests/test_b.py", 1)]}),
        made_up_part("sanitizer", {"rows": [{"tool": "memcheck", "clean": False}]}),
    ]
    later = {"begin": "2000-01-02T00:00:00+00:00"}
    second = [
        made_up_part("bench", {**made_up_run(), "rows": [fast, {**failed, "us": 2.0}], **later}),
        made_up_part("tests", {"rows": [file_row(name, 92)], **later}),
        made_up_part("sanitizer", {"rows": [{"tool": "memcheck", "clean": True}], **later}),
    ]
    del second[0]["rows"][1]["error"]
    second[0] = record.sealed(second[0])
    paths = [tmp_path / "second.json", tmp_path / "first.json"]
    record.write(second, paths[0])
    record.write(first, paths[1])
    monkeypatch.setattr(gpu_check, "test_files", lambda: [name, "tests/test_b.py", "tests/test_c.py"])
    merged = tmp_path / "merged.json"
    assert gpu_check.main(["--merge", *map(str, paths), "--record", str(merged)]) == 1
    lacks = capsys.readouterr().out.splitlines()
    assert lacks[-1] == "6 parts: NOT WHOLE" and "tests: without tests/test_c.py" in lacks
    assert not any("RuntimeError" in line or "memcheck" in line for line in lacks)
    assert len(lacks) == 1 + len(families.all_cases()) - 2 + 1 + 3
    parts = record.read(merged)
    assert parts == [*first, *second]
    assert record.merged([parts, first]) == parts, "a part counts once"
    assert record.latest(parts, "bench")[0] == fast and record.errors(parts) == []
    assert record.errors(first) == ["metadata-b1: RuntimeError"]
    page = update_figures.performance_page(parts, PEERS)
    assert "Tests there: 93 passed, 0 failed, 0 skipped; clean under" in page
    assert "results of a second run: 4." in update_figures.readme_section(parts, PEERS)
    for line in (
        f"- `{name}`: first 91 passed, 1 failed, 0 skipped, then 92 passed, 0 failed, 0 skipped",
        "- `memcheck`: first not clean, then clean",
        f"- `{SLOWER}`: first 100.0 µs, then 90.0 µs",
        "- `metadata-b1`: first RuntimeError, then 2.0 µs",
    ):
        assert line in page.splitlines()
    other = made_up_part("bench", {**made_up_run(), "rows": [fast]}, nvrtc="9.9")
    assert not record.repeated(record.compilers([first[0], other])["9.9"], "bench"), "another compiler's"


def test_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From several machines' files; every part says its machine, and an interrupted one that it is."""
    monkeypatch.setattr(gpu_check, "test_files", lambda: ["tests/test_a.py"])
    tools = [{"tool": tool, "clean": True} for tool in gpu_check.SANITIZER_TOOLS]
    parts = [
        made_up_part("bench", {**made_up_run(), "ended": False}),
        made_up_part("tests", {"rows": [file_row("tests/test_a.py", 1)]}, gpus=2),
        made_up_part("sanitizer", {"rows": tools}),
    ]
    for number, part in enumerate(parts):
        record.write([part], tmp_path / f"{number}.json")
    names = [str(path) for path in sorted(tmp_path.iterdir())]
    merged = tmp_path / "merged.json"
    assert gpu_check.main(["--merge", *names, "--record", str(merged)]) == 0
    assert capsys.readouterr().out == "3 parts: whole and good\n"
    headings, *rows = update_figures.parts_cells(record.read(merged))
    shown = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [one["seconds"] for one in shown] == ["did not end", "5", "5"]
    assert [one["gpus"] for one in shown] == ["1", "2", "1"]
    assert shown[0]["options"] == "bench_args --replays 7"


def test_a_call_of_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each stage that had a row, with options and verdict; a later call adds to them."""
    machine = made_up_part("tests", {})["machine"]
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: machine)

    def stage(good: bool, rows: list[Any]) -> Any:
        def run(run: gpu_check.Run) -> bool:
            run.part["rows"] += rows
            return good

        return run

    clean = {"tool": "memcheck", "clean": False}
    monkeypatch.setattr(
        gpu_check,
        "RUNS",
        {
            "bench": stage(False, []),
            "tests": stage(True, [file_row("tests/test_a.py", 1)]),
            "sanitizer": stage(False, [clean]),
        },
    )
    path = tmp_path / "record.json"
    assert gpu_check.main(["--record", str(path), "--tests", "a", "--commit", "c"]) == 1
    found = [(part["stage"], part["good"], part["ended"]) for part in record.read(path)]
    assert found == [("tests", True, True), ("sanitizer", False, True)]
    part = record.read(path)[0]
    assert part["options"]["tests"] == "a" and part["git_commit"] == "c" and part["machine"] == machine
    assert gpu_check.main(["--record", str(path), "--stage", "tests"]) == 0
    assert [part["stage"] for part in record.read(path)] == ["tests", "sanitizer", "tests"]
    path.write_text(path.read_text().replace('"passed": 1', '"passed": 2', 1))
    assert gpu_check.main(["--record", str(path), "--stage", "tests"]) == 2


FAKE_BENCH = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
run = {"versions": {"nvrtc": "1.0"}, "rows": [], "errors": [], "sustain_seconds": 2.0, "more": 1}
for name, us in json.loads(sys.argv[-1]).items():
    if us is None:
        sys.exit(1)
    run["rows"].append({"case": name, "us": us})
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(run))
    aside.replace(path)
    if us == "wait":
        time.sleep(60)
"""


def test_the_record_has_what_a_benchmark_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that ends early or is interrupted too."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "bench.py").write_text(FAKE_BENCH)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "SECONDS_BETWEEN_LOOKS", 0.01)
    path = tmp_path / "record.json"

    def run(cases: dict[str, Any], *arguments: str) -> bool:
        extra = ["--bench-args", f"'{json.dumps(cases)}'", "--record", str(path), *arguments]
        return gpu_check.run_bench(begun("bench", *extra))

    def stored() -> dict[str, Any]:
        (part,) = record.read(path)
        assert part["machine"]["nvrtc"] == "1.0" and "more" not in part and not part["ended"]
        return {row["case"]: row["us"] for row in part["rows"]}

    assert not run({"metadata-b1": 1.0, "metadata-b32": None})
    assert stored() == {"metadata-b1": 1.0}
    assert "ended with status 1" in capfd.readouterr().out
    assert run({SLOWER: 2.0}) and stored() == {SLOWER: 2.0}
    assert not run({"metadata-b1": None}) and stored() == {SLOWER: 2.0}

    def interrupt(_: float) -> None:
        if "metadata-b32" in stored():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gpu_check.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run({"metadata-b1": 5.0, "metadata-b32": "wait"})
    assert stored() == {"metadata-b1": 5.0, "metadata-b32": "wait"}

    cubins = tmp_path / "cubins"
    assert not run({"metadata-b1": 1.0}, "--cubins", str(cubins))
    assert "--cubins: " in capfd.readouterr().out
    (cubins / "a-1").mkdir(parents=True)
    (cubins / "a-1" / "meta.json").write_text(json.dumps({"nvrtc": "2.0"}))
    before = path.read_text()
    assert not run({"metadata-b1": 9.0}, "--cubins", str(cubins))
    assert path.read_text() == before
    assert "not recorded" in capfd.readouterr().out
    (cubins / "a-1" / "meta.json").write_text(json.dumps({"nvrtc": "1.0"}))
    assert run({"metadata-b1": 9.0}, "--cubins", str(cubins)) and stored()["metadata-b1"] == 9.0


def test_stages() -> None:
    def stages(*arguments: str) -> list[str]:
        return gpu_check.stages_of(gpu_check.parse_arguments(list(arguments)))

    assert stages() == ["bench", "tests", "sanitizer"]
    assert stages("--skip-sanitizer") == ["bench", "tests"]
    assert stages("--stage", "tests", "--stage", "bench") == ["bench", "tests"]


def test_prebuilt_folder_is_labelled_by_its_compiler(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one NVRTC version"):
        gpu_check.cubin_compiler(tmp_path)
    for name in ("a-1", "b-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text(json.dumps({"nvrtc": "12.9"}))
    assert gpu_check.cubin_compiler(tmp_path) == "12.9"
    (tmp_path / "b-2" / "meta.json").write_text(json.dumps({"nvrtc": "13.0"}))
    with pytest.raises(ValueError, match="one NVRTC version"):
        gpu_check.cubin_compiler(tmp_path)


def test_the_tests_are_named_by_group() -> None:
    text = update_figures.performance_page(made_up_parts(), PEERS)
    for line in (
        "| dense | 2 | 1,003 | 0 | 2 |",
        "| programs | 1 | 4 | 1 | 0 |",
        "| no GPU needed | 1 | 5 | 0 | 0 |",
        "| README's examples | 1 | 1 | 0 | 1 |",
    ):
        assert line in text.splitlines()
    assert "Skipped because: needs two GPUs." in text


def test_the_tests_in_one_sentence() -> None:
    assert update_figures.describe_tests(made_up_parts()) == (
        "Tests there: 1,013 passed, 1 failed, 3 skipped; clean under compute-sanitizer's memcheck; "
        "not clean under compute-sanitizer's initcheck."
    )
    assert update_figures.describe_tests([]) == "Tests there: not run."


def slower_parts() -> list[record.Part]:
    """A record of three cases: one in which another library is faster, one that cuDNN ran beside, a plan."""
    run = made_up_run()
    wanted = (SLOWER, "mha-b2-s8192-h16-d128-causal-bf16-fixed", "metadata-b1")
    run["rows"] = [row for row in run["rows"] if row["case"] in wanted]
    slower, beside, _ = run["rows"]
    slower |= {"us": 280.0, "unrested_us": 292.2, "sustained_us": 300.0}
    ours = {"us": 100.0, "unrested_us": 110.0, "sustained_us": 120.0}
    theirs = {"us": 300.0, "unrested_us": 440.0, "sustained_us": 108.0}
    beside["beside"] = {columns.OURS: ours, columns.CUDNN: theirs}
    return [made_up_part("bench", run)]


def test_the_speed_of_families() -> None:
    """Ratios of what ran beside, rested and sustained; else those to stored times, which are marked."""
    (part,) = slower_parts()
    _, *rows = speed.cells(speed.summary(part["rows"], against.load(PEERS)))
    dash = columns.EMPTY
    assert rows[:2] == [
        ["Dense decoding, MLA", "FlashAttention-3", "1", "0.97¹", "0.97¹", dash, dash],
        ["Dense attention", "cuDNN", "1", "3.00", "3.00", "0.90", "0.90"],
    ]
    assert [row[:3] for row in rows[2:]] == [["Plan of a decoding step", "FlashMLA", "1"]]
    whole = speed.summary(made_up_run()["rows"], against.load(PEERS))
    assert {one.family for one in whole} == {families.family_of(other.case) for other in against.load(PEERS)}
    (prefill,) = (one for one in whole if one.family.name == "sparse prefill, MLA")
    assert prefill.peers == "FlashMLA", "with padded heads too"


def test_readme_section() -> None:
    assert update_figures.readme_section([], PEERS) == update_figures.NOTHING_YET
    text = update_figures.readme_section(slower_parts(), PEERS)
    assert len(text.splitlines()) < 25
    (line,) = (line for line in text.splitlines() if line.startswith("| Dense decoding"))
    assert "0.97¹" in line
    assert "NVRTC 0.0" in text and "docs/performance.md" in text and "docs/speed.png" in text
    assert "commit `ccccccc`" in text and "Tests there: not run." in text
    tests_alone = [part for part in made_up_parts() if part["stage"] == "tests"]
    assert update_figures.readme_section(tests_alone, PEERS).startswith("NVIDIA H200, driver 0, 2000-01-01")
    page = f"before\n{update_figures.BEGIN}\nold\n{update_figures.END}\nafter\n"
    assert update_figures.replace_section(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="once each"):
        update_figures.replace_section("no markers", "new")


def test_the_picture_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for each mean, to its figure, which is written beside it; a mark at each least."""
    pytest.importorskip("matplotlib")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    closed: list[Any] = []
    monkeypatch.setattr(pyplot, "close", closed.append)
    (part,) = slower_parts()
    found = speed.summary(part["rows"], against.load(PEERS))
    path = tmp_path / "speed.png"
    plot.bars(found, "a title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = closed
    (axes,) = figure.axes
    shown = [one for one in found if one.family.attention]
    assert len(shown) < len(found), "a plan is no attention"
    means = [mean for one in shown for mean in one.means]
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx([m.mean for m in means])
    assert [text.get_text() for text in axes.texts] == [f"{mean.mean:.2f}" for mean in means]
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"]
    assert marks == pytest.approx([mean.least for mean in means])
    low, high = axes.get_xlim()
    assert low < min(marks) and max(mean.mean for mean in means) < high
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"{one.family.title}\nbeside {one.peers}" for one in shown]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["rested", "sustained", "without rests, stored times", plot.LEAST]
    figure.draw_without_rendering()
    whole = figure.bbox
    for text in (*axes.texts, *axes.get_yticklabels(), legend):
        box = text.get_window_extent()
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    plot.bars([], "nothing was compared", path)


def test_other_devices_show_no_ratio() -> None:
    """Stored times are of an H200."""
    parts = [made_up_part("bench", made_up_run(), device="NVIDIA H100")]
    text = update_figures.readme_section(parts, PEERS)
    assert not any(line.startswith("| Dense") for line in text.splitlines())
    assert "Stored times of other libraries were" not in update_figures.performance_page(parts, PEERS)


def test_performance_page_has_every_figure() -> None:
    versions = ["13.10.1", "13.9.2", "13.0.48rc1", "12.9.86, 13.0.88", "12.9.86", "unknown"]
    mixed = [made_up_part("bench", {}, nvrtc=version) for version in sorted(versions)]
    assert list(record.compilers(mixed)) == versions
    parts = [*made_up_parts(), made_up_part("bench", made_up_run(), nvrtc="0.10")]
    text = update_figures.performance_page(parts, PEERS)
    assert text.index("NVRTC 0.10") < text.index("NVRTC 0.0")
    assert text.count(families.ATTENTION_METHOD) == 1
    for case in families.all_cases():
        assert text.count(f"| `{case.id}` |") == 2
    for family in families.FAMILIES:
        assert text.count(f"### {family.title}\n") == 2
    assert text.count("geometric mean") == 2 and "roofline.png" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables)
    assert update_figures.NOTHING_YET in update_figures.performance_page([], PEERS)


def test_the_pages_come_from_the_record() -> None:
    assert update_figures.main(["--check"]) == 0
