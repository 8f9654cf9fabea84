"""What a download promises: the published bytes or one sentence, and nothing left behind that is taken for them."""

from __future__ import annotations

import gc
import gzip
import hashlib
import io
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from test_sweep_report import autoopt

from autoopt_lab.tasks import data, download
from autoopt_lab.tasks.data import DataError, read_cifar10, read_mnist
from autoopt_lab.tasks.download import Archive, contents

# requests leaves the socket of a failed answer to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

TEXT = bytes(range(256)) * 400
GOOD = gzip.compress(TEXT, mtime=0)


class Server(ThreadingHTTPServer):
    """Serves `files` under /good; the other folders are damaged in the way they are called."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"a.gz": GOOD}
        self.asked: list[str] = []
        self.stalled = threading.Event()

    def home(self, folder: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{folder}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        _, folder, name = self.path.split("/")
        self.server.asked.append(self.path)
        content = self.server.files[name]
        if folder == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if folder == "changed":
            content = content[:-1] + bytes([content[-1] ^ 1])
        elif folder == "truncated":
            content = content[: len(content) // 2]
        elif folder == "stalled":
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            self.rfile.read(1)  # until the other side is gone
            return
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002
        del format, values


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()
        gc.collect()  # here, where it may warn, and not in the tests that follow


def refused() -> str:
    """A home where nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def archive(name: str, content: bytes, *homes: str) -> Archive:
    return Archive(name, 0.1, hashlib.sha256(content).hexdigest(), homes)


def test_an_archive_is_fetched_once_and_then_taken_from_the_cache(server: Server, tmp_path: Path) -> None:
    wanted = archive("a.gz", GOOD, server.home("good"))
    for _ in range(2):
        assert contents([wanted], tmp_path / "cache") == {tmp_path / "cache" / "a.gz" / "a": TEXT}
    assert server.asked == ["/good/a.gz"]


@pytest.mark.parametrize("first", ["changed", "truncated", "missing", "refused"])
def test_the_next_home_is_tried_where_one_fails(first: str, server: Server, tmp_path: Path) -> None:
    broken = refused() if first == "refused" else server.home(first)
    assert list(contents([archive("a.gz", GOOD, broken, server.home("good"))], tmp_path).values()) == [TEXT]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("changed", "another SHA-256 than"),
        ("truncated", "ChunkedEncodingError"),
        ("missing", "HTTP 404"),
        ("refused", "ConnectionError"),
    ],
)
def test_a_failed_download_is_one_sentence_and_leaves_nothing_but_the_lock(
    damage: str, says: str, server: Server, tmp_path: Path
) -> None:
    home = refused() if damage == "refused" else server.home(damage)
    with pytest.raises(DataError, match=rf"a\.gz could not be fetched \(127\.0\.0\.1:\d+: {says}") as caught:
        contents([archive("a.gz", GOOD, home)], tmp_path)
    assert "\n" not in str(caught.value)
    assert "run it again, or name a folder that holds the data with --data or AUTOOPT_DATA" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("content", [b"", GOOD[:-9], GOOD + b"\0"])
def test_a_damaged_file_in_the_cache_is_fetched_again(content: bytes, server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    assert list(contents([archive("a.gz", GOOD, server.home("good"))], tmp_path).values()) == [TEXT]
    assert (tmp_path / "a.gz").read_bytes() == GOOD


def test_a_download_killed_on_the_way_is_done_again_and_its_rest_removed(server: Server, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from autoopt_lab.tasks.download import Archive, contents;"
        "contents([Archive('a.gz', 0.1, sys.argv[1], (sys.argv[2],))], Path(sys.argv[3]))"
    )
    digest = hashlib.sha256(GOOD).hexdigest()
    with subprocess.Popen([sys.executable, "-c", code, digest, server.home("stalled"), tmp_path]) as victim:
        assert server.stalled.wait(60)
        victim.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.glob("tmp*"))) == 1
    assert not (tmp_path / "a.gz").exists()
    assert list(contents([archive("a.gz", GOOD, server.home("good"))], tmp_path).values()) == [TEXT]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "lock"]


def test_several_at_once_fetch_once(server: Server, tmp_path: Path) -> None:
    wanted = archive("a.gz", GOOD, server.home("good"))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: contents([wanted], tmp_path), range(4)))
    assert [list(files.values()) for files in found] == [[TEXT]] * 4
    assert server.asked == ["/good/a.gz"]


def test_a_cache_that_cannot_be_written_is_one_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write to the cache .*Not a directory.*--data or AUTOOPT_DATA"):
        contents([archive("a.gz", GOOD, server.home("good"))], tmp_path / "file" / "cache")


def test_without_pooch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(
        DataError, match=r"pooch, .* is not installed: name a data folder .* pip install 'autoopt\[lab\]'"
    ):
        contents([archive("a.gz", GOOD, "http://127.0.0.1")], tmp_path)


# -- the data sets -------------------------------------------------------------------------------------------------


@pytest.fixture
def published(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Small data sets in the published formats; call it with the folder of the server that they shall come from."""
    monkeypatch.delenv("AUTOOPT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    idx: dict[str, bytes] = {}
    for split, count in (("train", 5), ("t10k", 3)):
        images = np.arange(count * 784, dtype=np.uint8).tobytes()
        idx[f"{split}-images-idx3-ubyte"] = struct.pack(">IIII", 0x803, count, 28, 28) + images
        idx[f"{split}-labels-idx1-ubyte"] = struct.pack(">II", 0x801, count) + bytes(range(count))
    batches, tar_file = {}, io.BytesIO()
    with tarfile.open(fileobj=tar_file, mode="w:gz") as tar:
        tar.addfile(_entry("cifar-10-batches-py", None))
        for index, name in enumerate([*data.CIFAR10_SHA256, "batches.meta"]):
            pixels, labels = np.full((4, 3072), index, np.uint8), [index, 1, 2, 9]
            content = pickle.dumps({b"data": pixels, b"labels": labels})
            tar.addfile(_entry(f"cifar-10-batches-py/{name}", len(content)), io.BytesIO(content))
            batches[name] = hashlib.sha256(pixels.tobytes() + bytes(labels)).hexdigest()
    del batches["batches.meta"]
    server.files = {f"{name}.gz": gzip.compress(content) for name, content in idx.items()}
    server.files["cifar-10-python.tar.gz"] = tar_file.getvalue()
    monkeypatch.setattr(
        data, "MNIST_SHA256", {name: hashlib.sha256(idx[name]).hexdigest() for name in data.MNIST_SHA256}
    )
    monkeypatch.setattr(data, "CIFAR10_SHA256", batches)

    def from_folder(folder: str) -> None:
        for name in ("MNIST", "CIFAR10"):
            here = [archive(a.name, server.files[a.name], server.home(folder)) for a in getattr(download, name)]
            monkeypatch.setattr(download, name, here)

    return from_folder


def _entry(name: str, size: int | None) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = (tarfile.DIRTYPE, 0) if size is None else (tarfile.REGTYPE, size)
    return entry


def test_data_sets_come_from_the_archives_where_no_folder_is_named(
    published: Callable[[str], None], tmp_path: Path
) -> None:
    published("good")
    pictures = read_mnist()
    assert pictures.train_pixels.shape == (5, 1, 28, 28)
    assert pictures.test_labels.tolist() == [0, 1, 2]
    pictures = read_cifar10()
    assert pictures.train_labels[::4].tolist() == [0, 1, 2, 3, 4]
    assert pictures.test_labels.tolist() == [5, 1, 2, 9]
    names = {path.name for path in (tmp_path / "caches" / "autoopt").iterdir()}
    assert names == {"lock", *(a.name for a in (*download.MNIST, *download.CIFAR10))}


def test_a_named_folder_is_never_replaced_by_a_download(
    published: Callable[[str], None], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published("good")
    with pytest.raises(DataError, match="is missing"):
        read_mnist(tmp_path)
    monkeypatch.setenv("AUTOOPT_DATA", str(tmp_path))
    with pytest.raises(DataError, match="is missing"):
        read_cifar10()
    assert server.asked == []


def test_an_archive_with_another_content_is_not_unpickled(
    published: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published("changed")
    monkeypatch.setattr(data, "_ArrayUnpickler", None)  # calling it would be a TypeError
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz could not be fetched .* another SHA-256"):
        read_cifar10()
    assert [path.name for path in (tmp_path / "caches" / "autoopt").iterdir()] == ["lock"]


def test_the_command_line_says_it_in_one_sentence_with_exit_code_2(
    published: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    published("truncated")
    assert autoopt(monkeypatch, "train", "--task", "mnist", "--out", tmp_path / "run") == 2
    out, err = capsys.readouterr()
    fetching, sentence = err.splitlines()
    assert out == ""
    assert fetching.startswith("Fetching train-images-idx3-ubyte.gz (0.1 MB) from 127.0.0.1:")
    assert sentence.startswith("autoopt: train-images-idx3-ubyte.gz could not be fetched (127.0.0.1:")
    assert not (tmp_path / "run").exists()


def test_the_archives_are_the_published_ones() -> None:
    names = [f"{name}.gz" for name in data.MNIST_SHA256]
    assert [a.name for a in download.MNIST] == names
    for wanted in (*download.MNIST, *download.CIFAR10):
        assert len(wanted.homes) == 3
        assert all(home.startswith("https://") for home in wanted.homes)
        assert len(bytes.fromhex(wanted.sha256)) == 32
