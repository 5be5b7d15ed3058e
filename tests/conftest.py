"""Test set-up: which tests run, and an emulated device for tests that run kernels without a GPU.

Without a Hopper GPU tests/gpu is left out. Files of it that the command names are collected, and skipped.
Cases marked `full` run with --full alone: they are further variants of other cases (docs/checks.md).
With `TEST_PART` 2/5 the second of five parts runs: scripts/gpu_check.py shares out tests so.
A run ends with lines that count what did not run.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from emulator import Emulator

from kit.gpu import missing_hopper_reason

GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collecting the GPU's tests takes as long as the rest, in each process."""
    is_left_out = collection_path == GPU_FOLDER and not config.getoption("collectonly")
    return True if is_left_out and missing_hopper_reason() is not None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if GPU_FOLDER in item.path.parents]
    reason = missing_hopper_reason() if gpu_items else None
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the cases marked `full` too")


class Selection:
    """Takes out the cases that only --full runs and says how many they were, then the cases of other parts.

    Both happen after pytest's -m and -k.
    """

    left_out = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        full = config.getoption("full")
        some = [item for item in items if full or item.get_closest_marker("full") is None]
        self.left_out = len(items) - len(some)
        part, parts = map(int, os.environ.get("TEST_PART", "1/1").split("/"))
        chosen = some[part - 1 :: parts]
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist, whose summary nobody sees
            session.config.workeroutput["left_out"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every process collects the same cases; one that crashed has no output."""
        self.left_out = getattr(node, "workeroutput", {}).get("left_out", self.left_out)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            terminalreporter.line(f"{self.left_out} cases left out: --full runs them too (docs/checks.md)")


class Failures:
    """Names a failed test at once: a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reporter = self.config.pluginmanager.getplugin("terminalreporter")
            reporter.write(f"\nfailed: {report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Selection())
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist reports to the one that prints
        config.pluginmanager.register(Failures(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was left out or skipped, a line for each reason: a file without torch is else one letter."""
    above = any(Path(argument.partition("::")[0]).resolve() in GPU_FOLDER.parents for argument in config.args)
    files = len(list(GPU_FOLDER.glob("test_*.py")))
    if files and above and (reason := missing_hopper_reason()) is not None:
        terminalreporter.write_line(f"left out the {files} files of tests/gpu: {reason}")
    counts = Counter(
        ("file" if isinstance(report, pytest.CollectReport) else "test", str(report.longrepr[2]))
        for report in terminalreporter.getreports("skipped")
    )
    for (kind, reason), count in counts.most_common():
        several = f"{count} {kind}{'s' * (count > 1)}"
        terminalreporter.write_line(f"skipped {several}: {reason.removeprefix('Skipped: ')}")


def pytest_collection_finish() -> None:
    """What was collected stays: garbage collections need not go through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def emulator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled for the emulated device: one folder for all processes of a session."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulator"


@pytest.fixture
def emulator(emulator_folder: Path) -> Iterator[Emulator]:
    """An emulated device on which rawmla runs for the length of the test."""
    from emulator import Emulator, missing_reason

    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
    pytest.importorskip("torch")
    with Emulator(emulator_folder).installed() as device:
        yield device
