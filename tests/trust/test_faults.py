"""Every fault: it survives with the right weights, or it is refused by name.

Each meets four of the subjects in turn, two under either rule; `make trust` has every optimizer under every rule.
"""

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
from trust.subjects import SUBJECTS

MET = [
    (fault, list(SUBJECTS)[(number + 5 * turn) % len(SUBJECTS)])
    for number, fault in enumerate(FAULTS)
    for turn in range(4)
]


@pytest.mark.parametrize(("fault", "subject"), MET)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")  # the case that asks for it
def test_fault(fault: str, subject: str) -> None:
    FAULTS[fault].check(SUBJECTS[subject])


def test_the_matrix_is_large_enough() -> None:
    assert len(FAULTS) >= 60
