"""The run folder: what is to be run, and every result that was ever finished.

    manifest.json   the conditions and the runs that are wanted, and by what the folder was begun
    parts/*.npz     one file per finished chunk of runs: whole or not there, and trusted only if its digest holds
    lock            held while somebody writes

A run is a pure function of its job and the conditions, so a part needs to know of no other: what is still to do is what
is wanted and in no part. Needs numpy alone, so that a folder can be written wherever torch runs; `results` makes one
Parquet file of the parts.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import fcntl
except ImportError:  # not a POSIX system: the folder is not protected from a second sweep
    fcntl = None  # type: ignore[assignment]

FORMAT = 2  # of 1, auto-* was the paper's rule
IDENTITY = ("task", "optimizer", "batch", "seed")
MEASURED = ("test_error", "train_error", "average_test_error", "test_loss", "train_loss")

Columns = dict[str, np.ndarray]


class RecordError(Exception):
    """A run folder that cannot be used; the message is one sentence with the remedy."""


class Job(NamedTuple):
    """One run, by all that tells it from the others of its folder."""

    task: str
    optimizer: str
    batch: int
    options: tuple[tuple[str, float], ...]  # by name
    seed: int


@dataclass(frozen=True)
class Group:
    """A grid: every batch size with every one of the settings and every seed."""

    task: str
    optimizer: str
    batches: tuple[int, ...]
    settings: tuple[Mapping[str, float], ...]
    seeds: tuple[int, ...]

    def jobs(self) -> Iterator[Job]:
        for batch in self.batches:
            for seed in self.seeds:
                for options in self.settings:
                    yield Job(self.task, self.optimizer, batch, tuple(sorted(options.items())), seed)


@dataclass(frozen=True)
class Conditions:
    """What all runs of a folder have in common."""

    epochs: int = 10
    precision: str = "tf32x3"  # of the engine's products on a GPU
    compile_update: bool = False  # the engine's update by torch.compile: faster there, with other last bits
    average: float | None = None  # weight of the newest parameters in their running average
    train_samples: int | None = None  # only the first ones; None: all
    test_samples: int | None = None


@dataclass(frozen=True)
class Manifest:
    name: str
    conditions: Conditions
    groups: tuple[Group, ...]

    def jobs(self) -> list[Job]:
        """Each once, though groups may overlap."""
        return list(dict.fromkeys(job for group in self.groups for job in group.jobs()))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        groups = tuple(
            Group(g["task"], g["optimizer"], tuple(g["batches"]), tuple(g["settings"]), tuple(g["seeds"]))
            for g in content["groups"]
        )
        return cls(content["name"], Conditions(**content["conditions"]), groups)


@dataclass(frozen=True)
class Part:
    """A finished chunk: a row per run. `trace` is empty, or holds step (P), tensor (L), value (rows, P, 3, L)."""

    columns: Columns
    trace: Columns
    made: Mapping[str, Any]  # when, where and by what

    def jobs(self) -> list[Job]:
        return jobs_of(self.columns)

    @property
    def name(self) -> str:
        first, digest = self.jobs()[0], hashlib.sha256(repr(self.jobs()).encode()).hexdigest()
        return f"{Path(first.task).stem}-{first.optimizer}-{first.batch}-{digest[:12]}.npz"

    def to_bytes(self) -> bytes:
        arrays = {f"column.{k}": v for k, v in self.columns.items()} | {f"trace.{k}": v for k, v in self.trace.items()}
        header = {"format": FORMAT, "rows": len(self.columns["seed"]), "digest": _digest(arrays), "made": self.made}
        file = io.BytesIO()
        np.savez_compressed(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Part:
        """ValueError, with the reason, for anything but the very bytes that `to_bytes` gave."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            header = json.loads(arrays.pop("header").tobytes())
            columns, trace = (
                {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(kind)}
                for kind in ("column.", "trace.")
            )
            rows = header["rows"]
        except Exception as error:  # a damaged file can fail in any way
            raise ValueError(str(error) or type(error).__name__) from None
        if header.get("format") != FORMAT:
            raise ValueError(f"format {header.get('format')}, not {FORMAT}")
        if header["digest"] != _digest(arrays) or any(len(column) != rows for column in columns.values()):
            raise ValueError("its content does not match its digest")
        return cls(columns, trace, header["made"])


def jobs_of(columns: Columns) -> list[Job]:
    options = sorted(set(columns) - set(IDENTITY) - set(MEASURED))
    rows = zip(*(columns[name].tolist() for name in (*IDENTITY, *options)), strict=True)
    return [
        Job(task, optimizer, batch, tuple((n, v) for n, v in zip(options, values, strict=True) if v == v), seed)
        for task, optimizer, batch, seed, *values in rows
    ]


def read_manifest(content: bytes, source: Path) -> Manifest:
    """RecordError where it is damaged or of another format."""
    try:
        values = json.loads(content)
        if values["format"] == FORMAT:
            return Manifest.from_json(values)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"the manifest.json of {source} is damaged ({type(error).__name__}): choose another"
        ) from None
    raise RecordError(
        f"{source} holds runs of format {values['format']}, and this version knows format {FORMAT}: choose another, or "
        "use the version of autoopt that made it"
    )


def three_digits(values: np.ndarray) -> np.ndarray:
    """As float32 with 11 bits after the point: enough for a curve, and the zeros that follow pack well."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x800)) & np.uint32(0xFFFFF000)).view(np.float32)


def _digest(arrays: Columns) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


class Folder:
    """A run folder on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts_path = path / "parts"

    @contextmanager
    def writing(self, manifest: Manifest, made: Mapping[str, Any]) -> Iterator[None]:
        """Begin the folder or go on with it, alone; its manifest then holds all that was ever asked of it."""
        with self.os_errors():
            self.parts_path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        with lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    sentence = f"another sweep is writing to {self.path}: wait for it, or choose another folder"
                    raise RecordError(sentence) from None
            with self.os_errors():
                for leftover in self.parts_path.glob("*.tmp"):  # of a process that was killed
                    leftover.unlink()
            content = self._joined(manifest).to_json() | {"made": self._begun() or dict(made)}
            self.write_file(self.path / "manifest.json", json.dumps(content, indent=1).encode())
            yield

    def manifest(self) -> Manifest:
        try:
            return read_manifest((self.path / "manifest.json").read_bytes(), self.path)
        except FileNotFoundError:
            raise RecordError(f"{self.path} is no run folder (it has no manifest.json): choose another") from None

    def parts(self) -> tuple[list[Part], dict[Path, str]]:
        """All parts that can be trusted, and what is wrong with each of the others."""
        good, bad = [], {}
        for path in sorted(self.parts_path.glob("*.npz")):
            try:
                good.append(Part.from_bytes(path.read_bytes()))
            except (OSError, ValueError) as error:
                bad[path] = f"{path} is damaged ({error}): its runs do not count and will be done again"
        return good, bad

    def add(self, part: Part) -> None:
        self.write_file(self.parts_path / part.name, part.to_bytes())

    def write_file(self, path: Path, content: bytes) -> None:
        """Whole or not at all, and on the disk when this returns."""
        temporary = path.with_name(path.name + ".tmp")
        with self.os_errors():
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            self._sync_names(path.parent)

    @contextmanager
    def os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "choose a folder that you may write to and that has room"
            raise RecordError(f"cannot write to {self.path} ({error.strerror}): {remedy}") from None

    @staticmethod
    def _sync_names(folder: Path) -> None:
        if os.name == "posix":
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _joined(self, new: Manifest) -> Manifest:
        if (self.path / "results.parquet").exists() and not any(self.parts_path.glob("*.npz")):
            # A later `compact` would put what is new in the place of what is there.
            raise RecordError(f"{self.path} holds a finished table without its parts: choose another folder")
        if not (self.path / "manifest.json").exists():
            if any(self.parts_path.glob("*.npz")):
                raise RecordError(f"{self.path} holds results but no manifest.json: choose another folder")
            return new
        old = self.manifest()
        differing = [
            f"{name} {value!r} where {getattr(new.conditions, name)!r} is asked for"
            for name, value in asdict(old.conditions).items()
            if value != getattr(new.conditions, name)
        ]
        if differing and not any(self.parts_path.glob("*.npz")):
            return new  # what began here came to nothing
        if differing:
            raise RecordError(
                f"{self.path} holds runs under other conditions ({differing[0]}): choose another folder with --out"
            )
        return replace(old, groups=(*old.groups, *(group for group in new.groups if group not in old.groups)))

    def _begun(self) -> dict[str, Any] | None:
        try:
            made: dict[str, Any] = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))["made"]
        except (OSError, ValueError, KeyError):
            return None
        return made
