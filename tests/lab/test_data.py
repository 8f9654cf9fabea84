"""Data files are checked before they are used, and what is wrong with them is said in one sentence."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from autoopt_lab.tasks import data
from autoopt_lab.tasks.data import DataError, normalised, read_cifar10, read_mnist


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small MNIST whose digests are the expected ones."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    digests = {}
    for prefix, count in (("train", 5), ("t10k", 3)):
        pixels = np.arange(count * 784, dtype=np.uint8).tobytes()
        labels = np.arange(count, dtype=np.uint8).tobytes()
        files = {
            f"{prefix}-images-idx3-ubyte": struct.pack(">IIII", 0x803, count, 28, 28) + pixels,
            f"{prefix}-labels-idx1-ubyte": struct.pack(">II", 0x801, count) + labels,
        }
        for name, content in files.items():
            (raw / name).write_bytes(content)
            digests[name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(data, "MNIST_SHA256", digests)
    return tmp_path


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    digests = {}
    for index, name in enumerate(data.CIFAR10_SHA256):
        pixels = np.full((4, 3072), index, np.uint8)
        labels = [index, 1, 2, 9]
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels, b"batch_label": name.encode()}))
        digests[name] = hashlib.sha256(pixels.tobytes() + bytes(labels)).hexdigest()
    monkeypatch.setattr(data, "CIFAR10_SHA256", digests)
    return tmp_path


def test_mnist_is_read_in_the_order_of_its_files(mnist: Path) -> None:
    pictures = read_mnist(mnist)
    assert pictures.train_pixels.shape == (5, 1, 28, 28)
    assert pictures.test_pixels.shape == (3, 1, 28, 28)
    assert pictures.train_pixels[0, 0, 1, 2] == 30
    assert pictures.train_labels.tolist() == [0, 1, 2, 3, 4]


def test_cifar10_joins_its_five_training_batches(cifar10: Path) -> None:
    pictures = read_cifar10(cifar10)
    assert pictures.train_pixels.shape == (20, 3, 32, 32)
    assert pictures.train_labels[::4].tolist() == [0, 1, 2, 3, 4]
    assert pictures.test_labels.tolist() == [5, 1, 2, 9]


def test_the_folder_comes_from_the_environment_unless_given(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOOPT_DATA", str(mnist))
    assert len(read_mnist().train_labels) == 5
    with pytest.raises(DataError, match="the data folder elsewhere does not exist"):
        read_mnist("elsewhere")


def test_pixels_are_normalised_per_channel(cifar10: Path) -> None:
    found = normalised(read_cifar10(cifar10), mean=(0.5, 0.0, 0.0), deviation=(0.5, 1.0, 2.0))
    assert found.test_inputs[0, :, 7, 7].tolist() == pytest.approx([(5 / 255 - 0.5) / 0.5, 5 / 255, 5 / 510])
    assert found.test_inputs.dtype == torch.float32
    assert found.test_targets.dtype == torch.int64


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_damaged_mnist_file_is_named(mnist: Path, name: str, damage: str) -> None:
    path = mnist / "MNIST" / "raw" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "changed":
        path.write_bytes(content[:-1] + b"\xff")
    with pytest.raises(DataError, match=rf"{name} is (missing|damaged)") as caught:
        read_mnist(mnist)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed", "other", "labels"])
def test_a_damaged_cifar10_file_is_named(cifar10: Path, damage: str) -> None:
    path = cifar10 / "cifar-10-batches-py" / "data_batch_3"
    content = path.read_bytes()
    batch = pickle.loads(content)
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        batch[b"data"][0, 0] ^= 1
        path.write_bytes(pickle.dumps(batch))
    elif damage == "other":
        path.write_bytes(pickle.dumps([1, 2, 3]))
    elif damage == "labels":
        path.write_bytes(pickle.dumps(batch | {b"labels": ["a", "b", "c", "d"]}))
    with pytest.raises(DataError, match=r"data_batch_3 is (missing|damaged|no CIFAR-10 batch)") as caught:
        read_cifar10(cifar10)
    assert "\n" not in str(caught.value)


class Harmful:
    """Unpickling it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_calls_something_is_refused_before_the_call(cifar10: Path) -> None:
    target = cifar10 / "made"
    path = cifar10 / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Harmful(target), b"labels": []}))
    with pytest.raises(DataError, match=r"it names \w+\.mkdir, which no data file needs"):
        read_cifar10(cifar10)
    assert not target.exists()


def as_python_2_wrote_it(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch opcode by opcode as the published files have it: byte strings, numpy 1's names, numbers for booleans."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value  # SHORT_BINSTRING

    count = b"K" + bytes([len(pixels)])
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    content = b"T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes()
    array = empty + b"(K\x01" + count + b"M\x00\x0c\x86" + dtype + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    label = text(b"batch_label") + text(b"training batch 1 of 5")
    return b"\x80\x02}(" + label + text(b"labels") + numbers + text(b"data") + array + b"u."


def test_a_batch_as_python_2_wrote_it_is_read_without_a_warning(cifar10: Path) -> None:
    path = cifar10 / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(as_python_2_wrote_it(np.full((4, 3072), 1, np.uint8), [1, 1, 2, 9]))
    pictures = read_cifar10(cifar10)
    assert pictures.train_pixels[4:8].tolist() == np.full((4, 3, 32, 32), 1).tolist()
    assert pictures.train_labels[4:8].tolist() == [1, 1, 2, 9]
