"""Test set-up: everything under tests/gpu is marked `gpu` and skipped where there is no Hopper GPU."""

from pathlib import Path

import pytest

from rawmla.testing.gpu import missing_hopper_reason

GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if GPU_FOLDER in item.path.parents]
    reason = missing_hopper_reason() if gpu_items else None
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
