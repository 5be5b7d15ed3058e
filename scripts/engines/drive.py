"""Runs waves of jobs, each in a process of its own, under a time limit.

    python scripts/engines run WAVE,WAVE --folder F --seconds S

Jobs that are compared run side by side; jobs that are timed run alone and in turns. F/results.jsonl gets a
line for each job as soon as it ends, and a second run leaves out the jobs that are in it and did not fail. F
also gets the models, logs and traces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from . import ROOT, models, record, waves
from .jobs import Job

ENTRY = Path(__file__).parent
SHORTEST = 25
"""Seconds: with less time left no job is started."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
OFFLINE |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
PLAIN = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "RAWMLA_LOG": "1", "PYTHONUNBUFFERED": "1"}
PLAIN |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
COMPUTED = r"rawmla \[\d+\]: (\S+) is computed by rawmla"
"""What `RAWMLA_LOG` says of a function's first call."""


def plug_in(folder: Path) -> Path:
    """A folder for PYTHONPATH through which engines find this checkout's entry points, as if installed."""
    text = (ROOT / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."([\w.]+)"\]\n(.+)$', text, re.MULTILINE)
    entries = "".join(f"[{group}]\n{entry.replace(chr(34), '')}\n\n" for group, entry in groups)
    version = re.findall(r'^__version__ = "(.+)"', (ROOT / "rawmla/__init__.py").read_text(), re.MULTILINE)[0]
    info = folder / "plug-in" / f"rawmla-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rawmla\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    return info.parent


def environment(folder: Path, job: Job) -> dict[str, str]:
    """Variables of a job's process."""
    path = [str(folder / "plug-in"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": ":".join(filter(None, path)), "VLLM_CACHE_ROOT": str(folder / "vllm")}
    mode = {} if job.mode == "none" else {f"RAWMLA_{job.engine.upper()}": job.mode}
    left = {name: text for name, text in os.environ.items() if name not in ("RAWMLA_VLLM", "RAWMLA_SGLANG")}
    return {**left, **OFFLINE, **PLAIN, **own, **mode, **job.variables}


def _end_all_of(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which hold memory of the GPU; it leads their session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Driver:
    """Runs jobs until the time is over."""

    def __init__(
        self, folder: Path, seconds: float, command: Sequence[str] = (), results: Path | None = None
    ) -> None:
        self.folder = folder
        self.begin = time.monotonic()
        self.seconds = seconds
        self.command = list(command) or [sys.executable, str(ENTRY)]
        self.results = results or folder / "results.jsonl"
        for name in ("logs", "jobs", "traces", "models"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        plug_in(folder)

    def left(self) -> float:
        """Seconds until the limit."""
        return self.seconds - (time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f}] {text}", flush=True)

    def run(self, jobs: Sequence[Job], width: int) -> None:
        """Run the jobs that have no result yet, and have the oracle score what they chose."""
        done = {row["name"] for row in record.jobs(record.read(self.results))}
        todo = [job for job in jobs if job.name not in done]
        self.say(f"{len(todo)} of {len(jobs)} jobs to run")
        self.make_models({job.model for job in todo})
        for alone, some in groupby(todo, lambda job: job.alone):
            with ThreadPoolExecutor(1 if alone else width) as pool:
                list(pool.map(self.job, some))
        self.score()

    def job(self, job: Job) -> None:
        """Run one job and add its line to the results."""
        limit = min(job.seconds, self.left())
        if limit < SHORTEST:
            self.say(f"{job.name}: no time")
            return
        given, result = self.folder / "jobs" / f"{job.name}.json", self.folder / "jobs" / f"{job.name}.result"
        given.write_text(job.text())
        result.unlink(missing_ok=True)
        command = [*self.command, "serve", str(given), str(result), "--folder", str(self.folder)]
        begin = time.monotonic()
        log, why = self.folder / "logs" / f"{job.name}.log", "no result"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(self.folder, job),
                start_new_session=True,
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                why = f"stopped after {limit:.0f} s"
            finally:
                _end_all_of(process)
        text = re.sub(r".*it/s\]", "", log.read_text(errors="replace"))  # bars of progress
        lines = [line[:300] for line in text.splitlines() if line.strip()]
        row: dict[str, Any] = {"error": ": ".join((why, *lines[-1:]))}
        if result.exists():
            row = json.loads(result.read_text())
            if job.engine == "sglang":  # whose kernels run in another process than its tasks
                row["kernels"] = sorted(set(re.findall(COMPUTED, text)))
        if "error" in row:
            row["log"] = lines[-25:]
        about = ("name", "engine", "model", "backend", "mode", "case", "group", "round")
        row = {**{name: getattr(job, name) for name in about}, **row}
        record.append(self.results, [row])
        self.say(f"{job.name}: {row.get('error', 'done')}, {time.monotonic() - begin:.0f} s")

    def make_models(self, names: set[str]) -> None:
        """Have the missing models written."""
        missing = [name for name in sorted(names) if not models.is_made(self.folder / "models", name)]
        if missing:
            self.tool("models", str(self.folder / "models"), *missing)
            self.say(f"models: {', '.join(missing)}")

    def score(self) -> None:
        """Score the models one after another; each line is kept as soon as it is there."""
        rows = record.unscored(record.read(self.results))
        for model in sorted({row["model"] for row in rows}):
            if self.left() < SHORTEST:
                self.say(f"oracle of {model}: no time")
                continue
            lines = self.tool("oracle", str(self.results), model, "--folder", str(self.folder)).splitlines()
            found = [json.loads(line) for line in lines if line.startswith("{")]
            record.append(self.results, found)
            self.say(f"oracle of {model}: {len(found)} results")

    def tool(self, name: str, *arguments: str) -> str:
        """Run another of these scripts; returns what it printed."""
        with (self.folder / "logs" / f"{name}.log").open("a") as log:
            try:
                answer = subprocess.run(
                    [*self.command, name, *arguments],
                    stdout=subprocess.PIPE, stderr=log, text=True, timeout=max(self.left(), 1),
                    env={**os.environ, **OFFLINE},
                )  # fmt: skip
            except subprocess.TimeoutExpired as stopped:
                return (stopped.stdout or b"").decode()
        return answer.stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engines run", description=__doc__)
    known = ", ".join([*waves.WAVES, *waves.SETS])
    parser.add_argument("waves", help=f"with commas between: {known}")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--results", type=Path, help="where the results are kept; F/results.jsonl")
    parser.add_argument("--only", default="", metavar="REGEX", help="jobs whose names match")
    parser.add_argument("--width", type=int, default=8, help="engines side by side where nothing is timed")
    options = parser.parse_args(arguments)
    jobs = [job for job in waves.jobs(options.waves.split(",")) if re.search(options.only, job.name)]
    driver = Driver(options.folder.resolve(), options.seconds, results=options.results)
    driver.run(jobs, options.width)
    return 0
