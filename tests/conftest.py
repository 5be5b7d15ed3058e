"""Test set-up: everything under tests/gpu is marked `gpu` and skipped where there is no Hopper GPU. For tests
that run kernels without one there is an emulated device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from emulator import Emulator

from rawmla.testing.gpu import missing_hopper_reason

GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if GPU_FOLDER in item.path.parents]
    reason = missing_hopper_reason() if gpu_items else None
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def emulator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled for the emulated device: one folder for all processes of a session."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulator"


@pytest.fixture
def emulator(emulator_folder: Path) -> Iterator[Emulator]:
    """An emulated device on which rawmla runs for the length of the test."""
    from emulator import Emulator, missing_reason

    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    pytest.importorskip("torch")
    from emulator.cases import running_on

    with running_on(Emulator(emulator_folder)) as device:
        yield device
