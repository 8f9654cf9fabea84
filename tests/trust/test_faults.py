"""Every fault, for every optimizer under every rule: it survives with the right weights, or it is refused by name."""

from __future__ import annotations

import pytest

from trust import (  # noqa: F401 - they enter the cases
    fault_batches,
    fault_copies,
    fault_gradients,
    fault_loops,
    fault_models,
    fault_options,
    fault_refusals,
)
from trust.faults import FAULTS
from trust.subjects import Make, every_subject


@every_subject
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")  # the case that asks for it
def test_fault(fault: str, make: Make) -> None:
    FAULTS[fault].check(make)


def test_the_matrix_is_large_enough() -> None:
    assert len(FAULTS) >= 60
