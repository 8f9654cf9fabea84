"""requirements.lock: what pip resolves for the project, pinned by version and by the SHA-256 of each archive.

    python tools/lock.py --extras lab,dev            # writes it
    python tools/lock.py --extras lab,dev --check    # fails where it would change

torch is not in it: which build of it is right depends on the machine (CPU, CUDA), and each has another hash. It is
installed first, by its pin, as the Makefile does; the hash of the archive that was found here is given in a comment.
Where pip looks for archives is its own affair and is written nowhere.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
CONSTRAINTS = ROOT / "constraints.txt"
OWN = "autoopt"


def torch_pin() -> str:
    """torch==X, from constraints.txt."""
    (pin,) = re.findall(r"^torch==\S+$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    return str(pin)


def resolve(extras: str) -> list[dict[str, Any]]:
    """What a fresh environment would get, by pip's own report."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if unknown := set(filter(None, extras.split(","))) - set(known):  # pip itself would only warn
        raise RuntimeError(f"pyproject.toml has no extra {', '.join(sorted(unknown))}; it has {', '.join(known)}.")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        wanted = [torch_pin(), f"{ROOT}[{extras}]" if extras else str(ROOT)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        command += ["--ignore-installed", "--constraint", str(CONSTRAINTS), "--report", str(report), *wanted]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError("pip cannot resolve it: " + re.sub(r"\b\w+://\S+", "(address)", done.stderr)[-2000:])
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found


def name(item: dict[str, Any]) -> str:
    """The name of a distribution, as indexes write it."""
    return re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()


def lock(extras: str) -> str:
    """The text of the file."""
    items = {name(item): item for item in resolve(extras)}
    items.pop(OWN)
    torch = items.pop("torch")
    system = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    lines = [
        f"# Written by tools/lock.py --extras {extras} for {system}, {platform.system()} {platform.machine()}.",
        "# Install torch first, then:  pip install --no-deps --require-hashes --requirement requirements.lock",
        f"# {torch_pin()}: not locked, since each build of it has its own archive. Here it was {digest(torch)}",
        f"# (version {torch['metadata']['version']}).",
    ]
    lines += [f"{key}=={item['metadata']['version']} --hash={digest(item)}" for key, item in sorted(items.items())]
    return "\n".join([*lines, ""])


def digest(item: dict[str, Any]) -> str:
    return f"sha256:{item['download_info']['archive_info']['hashes']['sha256']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write or check requirements.lock.")
    parser.add_argument("--extras", default="", help="of pyproject.toml, with commas between them")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the file would change")
    arguments = parser.parse_args()
    try:
        text = lock(arguments.extras)
    except RuntimeError as error:
        sys.exit(str(error))
    if not arguments.check:
        LOCK.write_text(text, encoding="utf-8")
    elif not LOCK.exists() or LOCK.read_text(encoding="utf-8") != text:
        sys.exit("requirements.lock is not what pip resolves now: run tools/lock.py without --check.")


if __name__ == "__main__":
    main()
