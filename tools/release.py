"""Builds the release into dist/ and checks it: `make release`. Prints one line for each check; fails if one fails.

    python tools/release.py --extras lab,dev

Nothing is uploaded and nothing in the repository changes but dist/, which git ignores.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import lock

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PACKAGES = ("autoopt", "autoopt_lab")
PYTHON = Path("Scripts/python.exe" if os.name == "nt" else "bin/python")
SUFFIXES = (".py", ".j2", "py.typed")  # what a package may hold: code and the templates of its reports, no data


class CheckError(Exception):
    """A check that failed, with what there is to do."""


class UnavailableError(Exception):
    """A check that this machine cannot do, with the reason."""


def call(command: Sequence[str | Path], *, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command; its output. A failure shows the end of it, less the places that pip looks at."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        tail = re.sub(r"\b\w+://\S+", "(address)", done.stdout + done.stderr)[-2000:]
        raise CheckError(f"{Path(command[0]).name} {command[1]} ... ended with {done.returncode}:\n{tail}")
    return done.stdout


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# The checks, in order.


def committed() -> str:
    changes = call(["git", "status", "--porcelain"]).splitlines()
    if changes:
        raise CheckError(f"{len(changes)} files are changed or new: commit them first, a release is a commit.")
    return call(["git", "rev-parse", "--short", "HEAD"]).strip()


def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/autoopt/__init__.py").read_text(), re.MULTILINE)
    if re.fullmatch(r"[\d.]+", found) and f"## [{found}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise CheckError(f"CHANGELOG.md has no section [{found}].")
    return str(found)


def locked(extras: str) -> str:
    try:
        text = lock.lock(extras)
    except RuntimeError as error:
        raise CheckError(str(error)) from None
    if not lock.LOCK.exists() or lock.LOCK.read_text(encoding="utf-8") != text:
        raise CheckError("requirements.lock is not what pip resolves now: run `make lock`.")
    return f"{lock.LOCK.read_text().count('--hash=')} archives, torch by its pin alone"


def built(work: Path) -> str:
    """Build twice, in two places, from a copy of what git knows; equal bit for bit or it is no release."""
    first, second = work / "first" / "tree", work / "somewhere" / "else" / "tree"
    for file in call(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).split("\0"):
        if (ROOT / file).is_file():  # deleted ones are listed too
            (first / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, first / file)
    shutil.copytree(first, second)
    epoch = call(["git", "log", "-1", "--format=%ct"]).strip()
    sums = []
    for tree in (first, second):
        command = [sys.executable, "-m", "build", "--outdir", str(tree.parent / "out"), str(tree)]
        call(command, cwd=work, SOURCE_DATE_EPOCH=epoch, PIP_CONSTRAINT=str(lock.CONSTRAINTS))
        sums.append({file.name: sha256(file) for file in sorted((tree.parent / "out").iterdir())})
    if sums[0] != sums[1]:
        raise CheckError(f"two builds differ: {sums[0]} and {sums[1]}.")
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.copytree(work / "first" / "out", DIST)
    lines = [f"{value}  {file}" for file, value in sums[0].items()]
    (DIST / "SHA256SUMS").write_text("\n".join([*lines, ""]))
    return "\n".join(["twice, equal bit for bit", *lines])


def contents() -> str:
    with zipfile.ZipFile(wheel()) as archive:
        names = [entry.filename for entry in archive.infolist()]
        size = sum(entry.file_size for entry in archive.infolist())
    strangers = [
        name
        for name in names
        if ".dist-info/" not in name
        and not (name.split("/")[0] in PACKAGES and name.endswith(SUFFIXES) and "test" not in name.lower())
    ]
    if strangers:
        raise CheckError(f"the wheel holds what it should not: {', '.join(strangers[:10])}")
    return f"{len(names)} files, {size / 1024:.0f} KiB, no tests, no data"


def wheel() -> Path:
    (found,) = DIST.glob("*.whl")
    return found


def installs(work: Path) -> str:
    """The wheel in an environment of its own, torch first and by its pin, then the five-minute start."""
    place = work / "clean"
    venv.create(place, with_pip=True)
    python = place / PYTHON
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call([*pip, lock.torch_pin()])
    call([*pip, "--constraint", str(lock.CONSTRAINTS), str(wheel())])
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    call([python, "-I", ROOT / "tests/docs/pages.py", ROOT / "docs/start.md"], cwd=elsewhere)
    where = "import autoopt, torch; print(autoopt.__file__); print(torch.__version__)"
    file, torch = call([python, "-I", "-c", where], cwd=elsewhere).split()
    if not Path(file).is_relative_to(place):
        raise CheckError(f"what ran was {file}, not the wheel.")
    return f"docs/start.md ran in a clean environment with torch {torch}"


def audited() -> str:
    """pip-audit asks a public database, which a machine without network cannot reach: then nothing was audited."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json", "--requirement"]
    done = subprocess.run([*command, lock.LOCK], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError):
        raise UnavailableError("pip-audit gave no answer: is it installed, and its database reachable?") from None
    bad = [f"{package['name']} {entry['id']}" for package in packages for entry in package.get("vulns", [])]
    if bad:
        raise CheckError(f"known vulnerabilities: {', '.join(bad)}")
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if skipped:  # pip-audit itself calls this clean
        raise UnavailableError(f"the database answered for {len(packages) - len(skipped)} of {len(packages)} packages")
    return f"no known vulnerability in {len(packages)} packages (torch not among them)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the release into dist/ and check it.")
    parser.add_argument("--extras", default="", help="those that requirements.lock was written for")
    extras = parser.parse_args().extras
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        checks: dict[str, Callable[[], str]] = {
            "committed": committed,
            "version": version,
            "lock": lambda: locked(extras),
            "build": lambda: built(work),
            "wheel": contents,
            "clean install": lambda: installs(work),
            "pip-audit": audited,
        }
        for name, check in checks.items():
            try:
                state, text = "ok", check()
            except UnavailableError as reason:
                state, text = "NOT RUN", str(reason)
            except CheckError as reason:
                state, text = "FAILED", str(reason)
                failures += 1
            first, *rest = text.splitlines()
            print(f"{name:14} {state:8} {first}", *(f"{'':24}{line}" for line in rest), sep="\n", flush=True)
            if name == "build" and state == "FAILED":
                break  # what follows would speak of an older dist/
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
