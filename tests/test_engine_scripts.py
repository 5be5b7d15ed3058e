"""scripts/engines without an engine: the driver, the tasks with a made-up engine, and the tables."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from engines import bits, drive, host, models, oracle, record, report, serve, traces, waves  # noqa: E402
from engines.jobs import Job  # noqa: E402
from engines.prompts import prompts  # noqa: E402

FAKE = """
import json, sys, time
command, given = sys.argv[1:3]
if command == "serve":
    job = json.load(open(given))
    print("starts", job["name"], flush=True)
    if job["mode"] == "patch" and job["engine"] == "sglang":
        print("rawmla [7]: sglang.attend is computed by rawmla: called as of SGLang, shapes []", flush=True)
    time.sleep(60 if job["name"] == "slow" else 0)
    if job["name"] != "breaks":
        open(sys.argv[3], "w").write(json.dumps({"ids": [[1]], "logprobs": [[-1.0]]}))
elif command == "oracle":
    print("a warning")
    print(json.dumps({"oracle": "one", "model": sys.argv[3]}))
"""


def test_the_driver_keeps_results_goes_on_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(drive, "SHORTEST", 0.5)
    command = [sys.executable, str(tmp_path / "fake.py")]
    jobs = [Job("one", "llama", "FLASH_ATTN"), Job("breaks", "llama", "FLASH_ATTN", "patch")]
    jobs += [Job("slow", "llama", "FLASH_ATTN", alone=True, seconds=1)]
    drive.Driver(tmp_path, 60, command).run(jobs, 2)
    rows = record.read(tmp_path / "results.jsonl")
    assert [row["name"] for row in record.jobs(rows)] == ["one"]
    errors = {row["name"]: row["error"] for row in rows if "error" in row}
    assert errors == {"breaks": "no result: starts breaks", "slow": "stopped after 1 s: starts slow"}
    assert next(row["log"] for row in rows if row.get("name") == "breaks") == ["starts breaks"]
    assert record.scores(rows) == {"one": {"oracle": "one", "model": "llama"}}
    capsys.readouterr()
    drive.Driver(tmp_path, 0, command).run(jobs, 2)
    assert "2 of 3 jobs to run" in capsys.readouterr().out
    assert record.read(tmp_path / "results.jsonl") == rows


def test_engines_find_the_plug_in(tmp_path: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(drive.plug_in(tmp_path))])
    groups = {entry.group: entry.value for entry in found.entry_points}
    assert groups["vllm.general_plugins"] == "rawmla.engines.vllm:register"
    job = Job("name", "llama", "FLASH_ATTN", "patch", variables={"A": "1"})
    assert drive.environment(tmp_path, job).items() >= {"RAWMLA_VLLM": "patch", "A": "1"}.items()
    sglang = drive.environment(tmp_path, replace(job, engine="sglang"))
    assert sglang["RAWMLA_SGLANG"] == "patch" and "RAWMLA_VLLM" not in sglang


@pytest.mark.parametrize(("mode", "kernels"), [("patch", ["sglang.attend"]), ("none", [])])
def test_what_rawmla_computes_in_another_process(tmp_path: Path, mode: str, kernels: list[str]) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    job = Job("one", "llama", "fa3", mode, engine="sglang")
    drive.Driver(tmp_path, 60, [sys.executable, str(tmp_path / "fake.py")]).run([job], 1)
    (row,) = record.jobs(record.read(tmp_path / "results.jsonl"))
    assert (row["engine"], row["kernels"]) == ("sglang", kernels)


def test_jobs_of_waves_are_distinct_and_complete() -> None:
    jobs = waves.jobs([*waves.WAVES])
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        assert job.model in models.MODELS and Job.of(job.text()) == job
        assert set(job.tasks) <= {*serve.TASKS, "kernel"}
    assert {job.name for job in waves.jobs(["correct"])} < {job.name for job in jobs}
    speculating = next(job for job in jobs if job.name == "dense16-speculating-FLASHMLA-backend-graphs")
    sizes = speculating.engine_options("models")["compilation_config"]["cudagraph_capture_sizes"]
    assert max(sizes) == 4 * 64


class FakeModel(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A token's successor is one more; with many rows the second module rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Identity(), torch.nn.Identity()
        self.second.register_forward_hook(lambda _, given, output: output + 1e-3 * (len(output) > 200))

    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.second(self.first(input_ids[:, None].float()))


class FakeLLM:
    """The parts of vLLM's LLM and of its engine that the tasks use."""

    def __init__(self, **options: Any) -> None:
        config = types.SimpleNamespace(hf_config=types.SimpleNamespace(num_hidden_layers=2))
        self.model, self.llm_engine, self.model_config = FakeModel(), self, config
        self.requests: dict[str, list[int]] = {}

    def apply_model(self, function: Any) -> None:
        function(self.model)

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.requests[name] = [0, params.max_tokens]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        for counts in self.requests.values():
            counts[0] += 1
        outputs = [
            types.SimpleNamespace(request_id=name, outputs=[self.output([1])]) for name in self.requests
        ]
        self.requests = {name: counts for name, counts in self.requests.items() if counts[0] < counts[1]}
        return outputs

    def output(self, ids: list[int]) -> Any:
        logprobs = [{one: types.SimpleNamespace(logprob=-0.5)} for one in ids]
        return types.SimpleNamespace(token_ids=ids, logprobs=logprobs)

    def generate(self, given: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        texts = [one["prompt_token_ids"] for one in given]
        ids = torch.tensor([token for text in texts for token in text])
        positions = torch.tensor([place for text in texts for place in range(len(text))])
        self.model(input_ids=ids, positions=positions)
        self.llm_engine.step()
        chosen = [[(text[-1] + more) % 2000 for more in range(params.max_tokens)] for text in texts]
        return [types.SimpleNamespace(outputs=[self.output(ids)]) for ids in chosen]


class FakeSGLang:
    """The parts of SGLang's Engine that the tasks use."""

    def __init__(self, **options: Any) -> None:
        assert options["attention_backend"] == "fa3" and options["port"] != options["nccl_port"]

    def generate(self, input_ids: Any, sampling_params: Any, return_logprob: bool) -> list[dict[str, Any]]:
        chosen = [(-0.5, place, None) for place in range(sampling_params["max_new_tokens"])]
        return [{"meta_info": {"output_token_logprobs": chosen}} for _ in input_ids]


@pytest.fixture
def made_up_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = FakeLLM, types.SimpleNamespace  # type: ignore[attr-defined]
    vllm._custom_ops = types.SimpleNamespace(fused_add_rms_norm=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[name].Engine = FakeSGLang  # type: ignore[attr-defined]
    monkeypatch.setattr(serve, "machine", lambda engine: {engine: "0"})
    monkeypatch.setattr(traces, "traced", lambda *args: {"attention_us": 5.0, "busy_us": 50.0, "ours": []})
    monkeypatch.setattr(host, "TIMED", ((__name__, "FakeLLM.step"),))
    yield


@pytest.mark.parametrize(
    "tasks",
    [
        {"generate": {"kind": "short", "tokens": 4}},
        {"invariance": {"kind": "plain", "tokens": 4, "pinned": True}},
        {"speed": {"batches": [1, 3], "context": 5, "steps": 2}},
        {"host": {"batch": 2, "context": 5, "steps": 3}},
    ],
    ids=lambda tasks: next(iter(tasks)),
)
def test_tasks_with_a_made_up_engine(tmp_path: Path, made_up_engine: None, tasks: dict[str, Any]) -> None:
    job, given, path = Job("name", "llama", "FLASH_ATTN", tasks=tasks), tmp_path / "job", tmp_path / "result"
    given.write_text(job.text())
    assert serve.main([str(given), str(path), "--folder", str(tmp_path)]) == 0
    result = json.loads(path.read_text())
    if "generate" in tasks:
        assert result["again"] == [None] * len(prompts("short")) and result["steps"] == 1
        scored = [{**result, "name": "name"}]
        (score,) = oracle.compare(
            scored, lambda prompt, chosen: ([-0.75] * len(chosen), [-0.5] * len(chosen))
        )
        assert (score["mean"], score["not_best"], score["worst_loss"]) == (0.25, score["tokens"], 0.25)
    elif "invariance" in tasks:
        short = [one["origin"] for one in result["invariance"] if one["length"] <= 200]
        assert {origin["module"] for origin in short} == {"second"}
        assert [one["origin"] for one in result["invariance"] if one["length"] > 200].count(None) > 8
    elif "speed" in tasks:
        assert [(one["batch"], len(one["windows"])) for one in result["speed"]] == [(1, 4), (3, 4)]
        assert all("gpu" in one for one in result["speed"]) and result["kernels"] == []
    else:
        (timed,) = result["host"]["functions"]
        assert timed["calls"] == 1 and result["host"]["profile"]


def test_sglang_as_a_made_up_engine(tmp_path: Path, made_up_engine: None) -> None:
    tasks = {"generate": {"kind": "short", "tokens": 4}}
    job, given, path = (
        Job("name", "llama", "fa3", tasks=tasks, engine="sglang"),
        tmp_path / "job",
        tmp_path / "r",
    )
    given.write_text(job.text())
    assert serve.main([str(given), str(path), "--folder", str(tmp_path)]) == 0
    result = json.loads(path.read_text())
    assert result["ids"] == [[0, 1, 2, 3]] * len(prompts("short")) and result["machine"] == {"sglang": "0"}
    assert result["logprobs"][0] == [-0.5] * 4 and set(result["again"]) == {None}


def test_checksums_depend_on_every_bit() -> None:
    values = torch.zeros(64, 16, dtype=torch.bfloat16)
    values.view(torch.int16).fill_diagonal_(1)
    assert len(set(bits.checksums(values[:16]).tolist())) == 16


def event(name: str, begin: float, time: float, kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": begin, "dur": time, "args": {"grid": [1, 2, 3]}}


def test_gpu_time_of_a_trace() -> None:
    events = [event("mla_combine", 20, 10), event("mla_dense_decode", 10, 15), event("gemm", 40, 5)]
    events += [event("void concat_and_cache_mla<>", 0, 2), event("cpu_op", 0, 99, "cpu_op")]
    found = traces.summary([*events, *({**one, "ts": one["ts"] + 100} for one in events)], layers=1)
    assert (found["steps"], found["attention_us"], found["busy_us"]) == (2, 20, 27)
    assert found["ours"] == ["mla_combine", "mla_dense_decode"]
    assert found["kernels"][0] == {"name": "mla_dense_decode", "per_step": 1, "us": 15, "grid": [1, 2, 3]}


def row(name: str, backend: str, mode: str, **more: Any) -> dict[str, Any]:
    about = {"name": name, "model": "dense16", "backend": backend, "mode": mode, "case": "eager"}
    return {**about, "group": "dense16", "round": 0, "layers": 4, "kernels": ["mla_dense_decode"], **more}


def test_tables() -> None:
    chosen = {"logprobs": [[-1.0] * 3] * 2, "again": [None, 1], "steps": 3}
    others = chosen | {"logprobs": [[-1.0] * 3, [-2.0] * 3]}
    rows = [row("a", "FLASHMLA", "none", ids=[[1, 2, 3], [4, 5, 6]], **chosen)]
    rows += [row("b", "FLASHMLA", "backend", ids=[[1, 2, 3], [4, 9, 6]], **others)]
    rows += [row("h", "FLASHMLA", "patch", ids=[[1, 2, 3], [4, 9, 6]], **others) | {"case": "graphs"}]
    rows += [{"oracle": "b", "mean": 0.02, "max": 0.5, "tokens": 6, "not_best": 3, "worst_loss": 0.1}]
    for number, slowness in enumerate((1.0, 2.0)):
        functions = [
            {"function": host.SAME, "us": 100 * slowness, "calls": 1.0},
            {"function": "f", "us": 24.0 * slowness + 4 * number, "calls": 4.0},
        ]
        times = {"host": {"step_us": [90.0 * slowness], "functions": functions}}
        rows += [row(f"c{number}", "FLASHMLA", "patch", **times)]
    origin = {"module": "layers.0.norm", "rows": 1, "compared": 5, "position": 0}
    differs = {"length": 193, "token": None, "logprob": 2, "origin": origin}
    rows += [
        row("d", "FLASHMLA", "backend", invariance=[differs, {**differs, "logprob": None, "origin": None}])
    ]
    windows = [{"tokens_per_s": 1000.0 + more, "step_us": 64.0} for more in range(3)]
    kernels = [{"name": "gemm", "us": 400.0}, {"name": "mla_combine", "grid": [2, 1, 66], "us": 300.04}]
    gpu = {"busy_us": 50.0, "attention_us": 5.0, "kernels": kernels}
    decoding = [{"batch": 64, "windows": windows, "gpu": gpu}]
    rows += [row("e", "FLASHMLA", "none", speed=decoding), row("f", "FLASHMLA", "none", error="no memory")]
    kernel = [{"condition": "causal", "loop_us": 6.25, **gpu}]
    rows += [row("g", "flash_mla", "none", kernel=kernel) | {"group": "kernel"}]
    assert report.way(row("h", "FLASH_ATTN", "patch", kernels=[])) == "FlashAttention-3 in spite of patch"
    text = report.page(rows)
    for line in (
        "| dense16 | rawmla, backend and patch | eager, graphs | 1 of 2 | 66.7% | 0.0200 | 0.500 | 50.0% "
        "| 1 of 2 | 2.0 |",
        "| dense16 | rawmla, backend | 1 of 2 | 193 (token 2) | `layers.0.norm` (1) |",
        "| a step, as measured | 135 (90 to 180) |",
        "| slowness of the CPU | 1.50 (1.00 to 2.00) |",
        "| `f` | 6.2 (6.0 to 6.5) |",
        "| causal | FlashMLA | 5.0 | 6.2 | 300.0 | [2, 1, 66] |",
        "| 64 | FlashMLA | 1,001 | 64 | 50 | 5.0 |",
        "- `f`: no memory",
    ):
        assert line in text.splitlines()
    table = report.readme_cells(report.of_speed(record.jobs(rows)))
    assert table == [["requests", "FlashMLA"], ["64", "1,001"]]


def test_each_engine_has_its_part_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    parts = [f"{report.BEGIN.format(title)}\nold {title}\n{report.END}\n" for title in report.TITLES.values()]
    (tmp_path / "docs" / "engines.md").write_text("".join(parts))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    about = row("a", "fa3", "patch", engine="sglang", logprobs=[[-1.0]], again=[None], ids=[[1]])
    record.append(tmp_path / "results.jsonl", [about | {"machine": {"sglang": "0.5.17"}, "kernels": ["f"]}])
    assert report.main([str(tmp_path / "results.jsonl"), "--write"]) == 0
    text = (tmp_path / "docs" / "engines.md").read_text()
    assert "old vLLM" in text and "old SGLang" not in text
    assert "Machine: SGLang, torch, transformers and GPU 0.5.17." in text
    assert "| dense16 | rawmla, patch | eager | - | - | - | - | - | 1 of 1 | - |" in text
