"""Every test starts from the same seed, and each xdist worker keeps to one core."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take minutes come first, so that no worker is left with them at the end."""
    items.sort(key=lambda item: not item.name.startswith("test_in_the_interpreter"))
