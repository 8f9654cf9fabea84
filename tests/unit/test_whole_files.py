"""Files of kernel tests that are skipped as a whole where there is no GPU run in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreter import elsewhere, run_interpreted

pytest.importorskip("triton", reason="the kernels are written in Triton")
TESTS = Path(__file__).parents[1]


@elsewhere
@pytest.mark.parametrize("file", ["unit/moments/test_triton.py", "lab/test_engine_kernels.py"])
def test_in_the_interpreter(file: str) -> None:
    run_interpreted(str(TESTS / file))
