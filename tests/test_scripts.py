"""The scripts' arithmetic, file formats and reports; nothing here needs a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402
import gpu_check  # noqa: E402
import update_figures  # noqa: E402
from benchlib import against, cache_cases, cases, nogpu, plot, report, source  # noqa: E402

PEERS = ROOT / "docs" / "peers-h200.json"
CEILINGS = [{"matmul_tflops": 700.0, "copy_gbps": 4200.0}, {"matmul_tflops": 720.0, "copy_gbps": 4240.0}]


def made_up_row(case: cases.DecodeCase | cases.SparseCase | cases.PrefillCase, us: float) -> dict[str, Any]:
    """A result row as bench.py writes it, for a time that nobody measured."""
    row = {**case.fields(), "us": us, "us_min": us, "us_max": us, "rel_l2": 0.002}
    if not isinstance(case, cases.PrefillCase):
        row["meta_us"] = 3.0
    elif case.layout != "bf16":
        row |= {"gathered_us": us + 7, "gather_us": 7.0}
    row["tflops"] = case.flops() / us / 1e6
    row["gbps"] = case.bytes_moved() / us / 1e3
    report.add_shares([row], report.best_ceilings(CEILINGS))
    return row


def made_up_run() -> dict[str, Any]:
    rows = [made_up_row(case, case.bytes_moved() / 2e6 + 10) for case in cases.decode_cases()]
    rows += [made_up_row(case, case.bytes_moved() / 2e6 + 10) for case in cases.sparse_cases()]
    rows += [made_up_row(case, case.flops() / 6e8 + 10) for case in cases.prefill_cases()]
    rows += [{**cases.MetadataCase(b).fields(), "us": 3.0} for b in cases.METADATA_BATCHES]
    for case in cache_cases.all_cases():
        us = case.bytes_moved() / 2e6 + 2
        fields = case.fields()
        rows.append({"case": case.id, "op": fields["family"], **fields, "us": us})
        rows[-1]["gbps"] = case.bytes_moved() / us / 1e3
    report.add_shares(rows, report.best_ceilings(CEILINGS))
    host = {"decode_call_us": 15.0, "decode_call_p90_us": 17.0, "decode_call_quiet_us": 14.0}
    method = "a method"
    return {"rows": rows, "ceilings": CEILINGS, "host": host, "method": method, "versions": {"nvrtc": "0.0"}}


def made_up_record() -> dict[str, Any]:
    return {
        "source_sha256": "0" * 64,
        "device": "a device",
        "driver": "0",
        "date": "2000-01-01",
        "tests": {"tests/test_a.py": {"passed": 3, "failed": 0, "skipped": 1}},
        "sanitizer": {"memcheck": {"clean": True}},
        "bench": {"0.0": made_up_run()},
    }


def test_case_names_are_unique() -> None:
    names = [case.id for case in cases.all_cases()]
    assert len(set(names)) == len(names)


def test_select() -> None:
    everything = cases.all_cases()
    assert cases.select(everything, None) == everything
    assert {case.id for case in cases.select(everything, "^metadata")} == {
        f"metadata-b{b}" for b in cases.METADATA_BATCHES
    }
    with pytest.raises(ValueError, match="matches none"):
        cases.select(everything, "no such case")


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
    return [row for row in data["FlashMLA@9241ae3"] if cases.is_sparse(row)]


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


def test_stored_sparse_rows_match_one_case_each() -> None:
    rows = [case.fields() for case in cases.sparse_cases()]
    stored = [row for row in against.load(PEERS) if cases.is_sparse(row)]
    assert len(stored) == len(stored_sparse_rows()) + 3
    for other in stored:
        assert sum(against.matches(other, row) for row in rows) == 1


def stored_prefill_rows() -> list[dict[str, Any]]:
    data = json.loads(PEERS.read_text())
    return [row for row in data["FlashMLA@9241ae3"] if cases.is_prefill(row)]


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
    rows = [case.fields() for case in cases.prefill_cases()]
    stored = [row for row in against.load(PEERS) if cases.is_prefill(row)]
    assert len(stored) == len(stored_prefill_rows()) + 2
    for other in stored:
        assert sum(against.matches(other, row) for row in rows) == 1
    compared = [against.ratios(stored, {**row, "us": 1.0}) for row in rows]
    assert [len(found) for found in compared] == [int(cases.layout_of(row) == "bf16") for row in rows]


def test_other_names_of_fields(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    row = {**cases.sparse_cases()[-9].fields(), "us": 10.0}
    assert row["extra_topk"] > 0
    other = {new: old for old, new in against.OTHER_NAMES.items()}
    path.write_text(json.dumps({"list": [{other.get(key, key): value for key, value in row.items()}]}))
    assert against.ratios(against.load(path), {**row, "us": 5.0}) == {"list": pytest.approx(2.0)}
    assert not against.ratios(against.load(path), {**row, "extra_length": not row["extra_length"]})


def test_extra_lengths() -> None:
    for case in cases.sparse_cases():
        lengths = case.extra_lengths()
        assert (lengths is None) == (case.extra_tokens is None)
        if lengths is not None:
            assert len(lengths) == case.b and sum(lengths) == case.extra_tokens
            assert min(lengths) >= 0 and max(lengths) <= case.extra_topk and len(set(lengths)) > case.b // 4
            assert lengths == case.extra_lengths()


def test_fixed_length_rows_have_their_case() -> None:
    stored = [row for row in against.load(PEERS) if row["label"].endswith(" fixed")]
    assert len(stored) == 32
    rows = [case.fields() for case in cases.decode_cases()]
    for other in stored:
        assert any(against.matches(other, row) for row in rows)


def test_ratios(tmp_path: Path) -> None:
    case = cases.DecodeCase(128, 1, 8192, 16, causal=False, varlen=False)
    ratios = against.ratios(against.load(PEERS), made_up_row(case, 200.0))
    assert ratios == {"flashmla fixed": pytest.approx(278.2 / 200), "fa3 fixed": pytest.approx(281.6 / 200)}
    varied = cases.DecodeCase(128, 1, 8192, 16, causal=False, varlen=True)
    assert set(against.ratios(against.load(PEERS), made_up_row(varied, 200.0))) == {"FlashMLA@9241ae3"}
    metadata = {**cases.MetadataCase(128).fields(), "us": 4.0}
    assert against.ratios(against.load(PEERS), metadata) == {"FlashMLA@9241ae3": pytest.approx(5.0)}


def test_the_best_split_count_is_the_one_compared(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    row = {"b": 1, "s_q": 1, "s_k": 64, "h_q": 8, "fa3_us": 20.0, "fa3_best_us": 10.0}
    path.write_text(json.dumps({"list": [row]}))
    assert [(found["label"], found["us"]) for found in against.load(path)] == [("fa3 fixed", 10.0)]


def test_against_reads_its_own_formats(tmp_path: Path) -> None:
    run = made_up_run()
    stored = tmp_path / "run.json"
    stored.write_text(json.dumps(run))
    for row in run["rows"]:
        assert against.ratios(against.load(stored), row) == {"run": pytest.approx(1.0)}
    stored.write_text(json.dumps(made_up_record()))
    assert set(against.ratios(against.load(stored), run["rows"][0])) == {"run NVRTC 0.0"}
    stored.write_text("{}")
    with pytest.raises(ValueError, match="no timings"):
        against.load(stored)


def test_means_by_family() -> None:
    rows = made_up_run()["rows"]
    stored = [{**row, "label": "twice", "us": 2 * row["us"]} for row in rows]
    means = report.group_means(rows, stored)["twice"]
    families = {"b >= 64, h_q 128", "b >= 64, h_q 8 to 64", "b 16 to 32", "b <= 4"}
    families |= {"sparse V3.2, b >= 64", "sparse V3.2, b <= 16", "sparse V3.2, h_q 8 to 16"}
    families |= {
        "sparse MODEL1, b >= 64",
        "sparse MODEL1, b <= 16",
        "sparse bf16, b >= 64",
        "sparse bf16, b <= 16",
    }
    families |= {"prefill V3.2", "prefill bf16, h_q 8 to 16"}
    families |= {"prefill bf16, s_q >= 512", "prefill bf16, s_q <= 64"}
    families |= {"cache", "convert indices", "merge attn states"}
    assert set(means) == families | {"batch-invariant", "sparse, batch-invariant", "metadata"}
    assert sum(count for _, _, count in means.values()) == len(rows)
    assert all(
        mean == pytest.approx(2.0) and least == pytest.approx(2.0) for mean, least, _ in means.values()
    )
    assert against.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_share_of_the_nearer_roof() -> None:
    ceilings = report.best_ceilings(CEILINGS)
    assert ceilings == {"matmul_tflops": 720.0, "copy_gbps": 4240.0}
    assert report.roof_share({"tflops": 360.0, "gbps": 1000.0}, ceilings) == (0.5, "matmul")
    assert report.roof_share({"tflops": 36.0, "gbps": 2120.0}, ceilings) == (0.5, "copy")
    case = cases.DecodeCase(128, 1, 8192, 128, causal=False, varlen=False)
    row = made_up_row(case, 500.0)
    assert report.intensity(row) == pytest.approx(case.flops() / case.bytes_moved())


def test_tables() -> None:
    run = made_up_run()
    console = Console(width=240, record=True, quiet=True)
    stored = against.load(PEERS)
    for table in (
        report.decode_table,
        report.sparse_table,
        report.prefill_table,
        report.metadata_table,
        report.means_table,
    ):
        console.print(table(run["rows"], stored))
    assert report.cache_table(run["rows"], stored).row_count == len(cache_cases.all_cases())
    text = report.markdown_results(run["rows"])
    dense, sparse, prefill, metadata, cache = (
        part.splitlines() for part in text.split("\n\n") if part.startswith("|")
    )
    assert len(dense) == 2 + len(cases.decode_cases())
    assert len(sparse) == 2 + len(cases.sparse_cases())
    assert len(prefill) == 2 + len(cases.prefill_cases())
    assert len(metadata) == 3 and len(cache) == 2 + len(cache_cases.all_cases())
    for lines in (dense, sparse, prefill, metadata, cache):
        assert all(line.startswith("|") and line.endswith("|") for line in lines)
        assert len({line.count("|") for line in lines}) == 1
    assert any("128 + up to 1024 | 256 + 2" in line for line in sparse)
    assert sum(line.startswith("| V3.2 ") and "(gather 7.0)" in line for line in prefill) == 2
    assert sum(line.startswith("| bf16 ") and line.endswith("| - |") for line in prefill) == 14


def test_methods() -> None:
    rows = made_up_run()["rows"]
    everything = (report.METHOD, report.SPARSE_METHOD, report.PREFILL_METHOD, report.CACHE_METHOD)
    assert report.methods(rows) == " ".join(everything)
    assert report.methods([row for row in rows if row["op"] in ("dense_decode", "metadata")]) == report.METHOD


def test_roofline_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    plot.roofline({"NVRTC 0.0": made_up_run(), "NVRTC 0.1": made_up_run()}, "a device", path)
    assert path.read_bytes().startswith(b"\x89PNG")


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
    (two / "cuda_src" / "sub" / "file.txt").write_text("changed")
    assert source.source_hash(one) != source.source_hash(two)


def test_reference_agrees_with_an_independent_computation() -> None:
    assert nogpu.reference_error() < nogpu.TOLERANCE


def test_bench_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "why_no_timing", lambda: "No GPU in this test.")
    path = tmp_path / "bench.json"
    assert bench.main(["--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["timed"] is False
    assert result["good"] is True
    assert result["kernels"]
    assert all(
        row["spill_stores"] == row["spill_loads"] == row["local_bytes"] == 0 for row in result["kernels"]
    )
    assert "Nothing was timed." in capsys.readouterr().out


def test_bench_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--replays", "4"])
    assert bench.main(["--list"]) == 0
    assert "metadata-b4096" in capsys.readouterr().out


def test_timed_check_agrees_with_the_reference() -> None:
    pytest.importorskip("torch")
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
    cases.PrefillCase(2, 90, 3, 512, 90),
    cases.PrefillCase(11, 300, 6, 576, 40, "v32", 64),
)


def prefill_in_numpy(
    q: Any, kv: Any, indices: Any, sm_scale: float, *, is_fp8_kvcache: bool = False
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


@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.id)
def test_prefill_row(case: cases.PrefillCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls to time give the right result and use every set; here nothing is timed."""
    torch = pytest.importorskip("torch")
    import rawmla
    from benchlib import measure, prefill_measure
    from rawmla.testing import torch_reference
    from rawmla.testing.sparse import row_format

    called: list[int] = []

    def prefill(q: Any, kv: Any, *arguments: Any, **keywords: Any) -> tuple[Any, None, None]:
        called.append(kv.data_ptr())
        return prefill_in_numpy(q, kv, *arguments, **keywords)

    def gather(cache: Any, table: Any, lengths: Any, rows: Any, *, workspace_starts: Any) -> None:
        token = torch.arange(int(lengths[0]))
        page = table[0].long()[token // case.page_block_size]
        slots = page * case.page_block_size + token % case.page_block_size
        rows[int(workspace_starts[0]) :] = torch_reference.dequantise(cache, slots, row_format("v32", 576))

    def run_once(calls: Any, count: int, replays: int) -> measure.Timing:
        calls()
        return measure.Timing(20.0, 19.0, 21.0)

    make_inputs = prefill_measure.make_inputs
    monkeypatch.setattr(prefill_measure, "make_inputs", lambda case, sets: make_inputs(case, sets, "cpu"))
    monkeypatch.setattr(prefill_measure, "l2_bytes", lambda: 2 * case.bytes_moved())
    monkeypatch.setattr(prefill_measure, "rest", lambda: None)
    monkeypatch.setattr(prefill_measure, "time_graph", run_once)
    monkeypatch.setattr(prefill_measure, "CALLS_PER_GRAPH", 2)
    monkeypatch.setattr(rawmla, "flash_mla_sparse_fwd", prefill, raising=False)
    monkeypatch.setattr(rawmla, "gather_kv_cache", gather)
    row, inputs = prefill_measure.time_prefill(case, 5)
    assert {kv.data_ptr() for kv in inputs.kv_sets} <= set(called)
    assert len(inputs.kv_sets) == 7 and row["cold_us"] == 20.0
    assert 0 < row["rel_l2"] < 0.005
    assert row["tflops"] == pytest.approx(case.flops() / 20e6)
    assert ("gathered_us" in row) == ("gather_us" in row) == (case.layout != "bf16")
    report.add_shares([row], report.best_ceilings(CEILINGS))
    assert report.prefill_table([row], []).row_count == 1


def test_calls_per_graph() -> None:
    pytest.importorskip("torch")
    from benchlib import prefill_measure

    for case in cases.prefill_cases():
        calls = prefill_measure.calls_per_graph(case)
        assert 4 <= calls <= 10 and calls * case.flops() <= prefill_measure.GRAPH_FLOPS
        assert calls == 10 or (calls + 1) * case.flops() > prefill_measure.GRAPH_FLOPS
    assert prefill_measure.calls_per_graph(cases.PrefillCase(1 << 20, 8192, 128, 576, 2048)) == 1


def test_rotated_sets() -> None:
    pytest.importorskip("torch")
    from benchlib import measure

    l2 = 60 << 20
    small = cases.DecodeCase(1, 1, 8192, 128, causal=False, varlen=False)
    large = cases.DecodeCase(128, 1, 8192, 128, causal=False, varlen=False)
    assert measure.rotated_sets(large, l2) == 1
    assert measure.rotated_sets(small, l2) * small.bytes_moved() > measure.COLD_L2_FACTOR * l2


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" time="1.5"/>
<testcase classname="tests.test_a" name="test_two" time="0.5"><failure message="no">no</failure></testcase>
<testcase classname="tests.test_a" name="test_three" time="0"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_a" name="test_four" time="0"><error message="broken">broken</error></testcase>
</testsuite></testsuites>"""


def test_junit_counts() -> None:
    counts = gpu_check.parse_junit(JUNIT)
    failures = ["tests.test_a::test_two", "tests.test_a::test_four"]
    assert counts == {"passed": 1, "failed": 2, "skipped": 1, "seconds": 2.0, "failures": failures}


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


def test_record_merges_only_with_the_same_sources(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "record.json"
    record = gpu_check.load_record(path, "a")
    record["tests"]["tests/test_a.py"] = {"passed": 1}
    gpu_check.save_record(record, path)
    assert gpu_check.load_record(path, "a") == record
    assert gpu_check.load_record(path, "b") == {
        "source_sha256": "b",
        "tests": {},
        "sanitizer": {},
        "bench": {},
    }
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


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


def test_figures() -> None:
    assert update_figures.figures(None) == update_figures.NOTHING_YET
    text = update_figures.figures(made_up_record())
    assert "3 passed, 0 failed, 1 skipped" in text
    assert "memcheck clean" in text
    assert "NVRTC 0.0" in text
    assert text.count("a method") == 1
    page = f"before\n{update_figures.BEGIN}\nold\n{update_figures.END}\nafter\n"
    replaced = update_figures.replace_section(page, "new")
    assert replaced == page.replace("old", "new")
    with pytest.raises(ValueError, match="once each"):
        update_figures.replace_section("no markers", "new")


def test_readme_figures_come_from_the_record() -> None:
    assert update_figures.main(["--check"]) == 0
