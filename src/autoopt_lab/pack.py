"""A run folder in a few files, to carry its results from one machine to another."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from autoopt_lab.record import Folder, Manifest, Part, RecordError, read_manifest

LARGEST = 15 * 2**20  # bytes of one file
PADDING = 1024, 2 * tarfile.RECORDSIZE  # what tar adds, at most: to a member, to the file


def pack(folder: Folder, into: Path) -> list[Path]:
    """Tar files that each hold the manifest, some parts, and a list of them all with their SHA-256."""
    manifest = (folder.path / "manifest.json").read_bytes()
    room = LARGEST - len(manifest) - sum(PADDING)
    bundles: list[list[tuple[str, bytes]]] = [[]]
    for path in sorted(folder.parts_path.glob("*.npz")):
        content = path.read_bytes()
        if bundles[-1] and sum(len(c) + 2 * PADDING[0] for _, c in [*bundles[-1], ("", content)]) > room:
            bundles.append([])
        bundles[-1].append((path.name, content))
    written = []
    with folder.os_errors():
        into.mkdir(parents=True, exist_ok=True)
    for number, bundle in enumerate(bundles):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            members = [("manifest.json", manifest), *bundle]
            contents = json.dumps({name: _digest(content) for name, content in members}).encode()
            for name, content in [("contents.json", contents), *members]:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        written.append(into / f"results-{number}.tar")
        Folder(into).write_file(written[-1], file.getvalue())
    return written


def unpack(file: Path, folder: Folder) -> int:
    """Add the parts of a packed file to a folder; the number of runs in them."""
    manifest, parts = _content(file)
    if any(part.made["conditions"] != manifest.to_json()["conditions"] for part in parts):
        raise RecordError(f"{file} holds runs under other conditions than its manifest says: pack it again")
    with folder.writing(manifest, parts[0].made if parts else {}):
        for part in parts:
            folder.add(part)
    return sum(len(part.jobs()) for part in parts)


def _content(file: Path) -> tuple[Manifest, list[Part]]:
    try:
        with tarfile.open(file, "r:") as tar:
            members = {entry.name: tar.extractfile(entry) for entry in tar if entry.isfile()}
            contents = {name: member.read() for name, member in members.items() if member is not None}
        listed = json.loads(contents["contents.json"])
        if bad := [name for name, digest in listed.items() if _digest(contents[name]) != digest]:
            raise ValueError(f"{', '.join(bad)} is not what was packed")
        manifest = read_manifest(contents["manifest.json"], file)
        return manifest, [Part.from_bytes(contents[name]) for name in listed if name != "manifest.json"]
    except FileNotFoundError:
        raise RecordError(f"{file} does not exist: name a file of packed results") from None
    except (OSError, tarfile.TarError, KeyError, ValueError, AttributeError) as error:
        raise RecordError(f"{file} is no file of packed results, or is damaged ({error}): pack it again") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
