"""A run folder in a few files, to carry its results from one machine to another."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from autoopt_lab.record import Folder, Manifest, Part, RecordError, read_manifest

LARGEST = 15 * 2**20  # bytes of one file
PADDING = 1024, 2 * tarfile.RECORDSIZE  # what tar adds, at most: to a member, to the file


def pack(folder: Folder, into: Path) -> list[Path]:
    """Tar files that each hold the manifest, a list of what else is in them, and some parts."""
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
            names = json.dumps([name for name, _ in bundle]).encode()
            for name, content in [("manifest.json", manifest), ("contents.json", names), *bundle]:
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
        manifest = read_manifest(contents.pop("manifest.json"), file)
        return manifest, [Part.from_bytes(contents[name]) for name in json.loads(contents["contents.json"])]
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise RecordError(f"{file} is no file of packed results, or is damaged ({error}): pack it again") from None
