"""The release checks: they let nothing pass that they did not see."""

import json
import re
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import release as module

    monkeypatch.setattr(module, "DIST", tmp_path)
    return module


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_lock_and_constraints_agree() -> None:
    locked, constrained = pins(LOCK), pins(CONSTRAINTS)
    assert {name: constrained.get(name, version) for name, version in locked.items()} == locked


def test_every_locked_archive_has_its_hash_and_no_address() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert "://" not in LOCK


def wheel(folder: Path, *names: str) -> None:
    with zipfile.ZipFile(folder / "autoopt-0-py3-none-any.whl", "w") as archive:
        for name in ("autoopt/__init__.py", "autoopt-0.dist-info/METADATA", *names):
            archive.writestr(name, "")


def test_a_clean_wheel(release: ModuleType, tmp_path: Path) -> None:
    wheel(tmp_path)
    assert "no tests" in release.contents()


@pytest.mark.parametrize(
    "stranger", ["tests/test_x.py", "autoopt/test_x.py", "autoopt/digits.csv", "autoopt_lab/a.npz"]
)
def test_a_wheel_with_tests_or_data(release: ModuleType, tmp_path: Path, stranger: str) -> None:
    wheel(tmp_path, stranger)
    with pytest.raises(release.CheckError, match=re.escape(stranger)):
        release.contents()


def answer(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, output, "")

    monkeypatch.setattr(subprocess, "run", run)


def test_a_package_that_the_database_does_not_know_is_not_audited(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip-audit ends with 0 and "no known vulnerabilities" there."""
    packages = [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}]
    answer(monkeypatch, json.dumps({"dependencies": packages}))
    with pytest.raises(release.UnavailableError, match="1 of 2"):
        release.audited()


def test_no_answer_is_no_audit(release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "")
    with pytest.raises(release.UnavailableError, match="no answer"):
        release.audited()


def test_a_vulnerability(release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [{"name": "a", "version": "1", "vulns": [{"id": "X-1"}]}]
    answer(monkeypatch, json.dumps({"dependencies": packages}))
    with pytest.raises(release.CheckError, match="a X-1"):
        release.audited()


def test_addresses_are_not_shown(release: ModuleType) -> None:
    with pytest.raises(release.CheckError) as caught:
        release.call(["python3", "-c", "import sys; sys.exit('see https://user:secret@example.test/simple')"])
    assert "example.test" not in str(caught.value)
