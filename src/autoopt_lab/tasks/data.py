"""Reads MNIST and CIFAR-10 in torchvision's layout, and trusts no byte before its SHA-256 is known.

    FOLDER/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte
    FOLDER/cifar-10-batches-py/{data_batch_1..5,test_batch}

MNIST's files are checked as they are. CIFAR-10's are pickles, and the same arrays can be pickled in several ways, so
the arrays' content is checked; the unpickler before it can build a numpy array and nothing else. Where no folder is
named, the published archives are fetched (`download`); what is in them is checked in the same way.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoopt_lab.tasks import Data

VARIABLE = "AUTOOPT_DATA"

MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

# Of the pixels' bytes followed by the labels' bytes, one per image. The same bytes, label before pixels, have the MD5
# sums that are known of the files of cifar-10-binary.tar.gz.
CIFAR10_SHA256 = {
    "data_batch_1": "ba52cb2d72c412975d7556bb26bd094956f1c002d1937053f6f1252f2ac17114",
    "data_batch_2": "350ff9000489d02f2568c0dcf4912ffdbae9e50932147905fb1b8159ad54f0ac",
    "data_batch_3": "a2b8653fc457df407af6c38b7e0d1a12530f3b5f81fce9f81516efd065daf722",
    "data_batch_4": "133e6292c377755074c305db8a684d48d5397372cb0aba34f52b4335eab35d97",
    "data_batch_5": "eb08cdc11fd1267ef871cf4790f193684b3f556d13317be68f4eb374a078ea87",
    "test_batch": "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
}


class DataError(Exception):
    """Data that is missing or is not what it should be; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Pictures:
    """A data set as published: pixels are uint8, (samples, channels, height, width)."""

    train_pixels: np.ndarray
    train_labels: np.ndarray
    test_pixels: np.ndarray
    test_labels: np.ndarray


def read_mnist(folder: Path | str | None = None) -> Pictures:
    files = {}
    for path, content, digest in _files(folder, "MNIST/raw", MNIST_SHA256):
        _check(path, content, digest)
        files[path.name] = _idx(content)
    return Pictures(
        files["train-images-idx3-ubyte"][:, None],
        files["train-labels-idx1-ubyte"],
        files["t10k-images-idx3-ubyte"][:, None],
        files["t10k-labels-idx1-ubyte"],
    )


def read_cifar10(folder: Path | str | None = None) -> Pictures:
    *parts, (test_pixels, test_labels) = [
        _cifar10_batch(*file) for file in _files(folder, "cifar-10-batches-py", CIFAR10_SHA256)
    ]
    pixels, labels = zip(*parts, strict=True)
    return Pictures(np.concatenate(pixels), np.concatenate(labels), test_pixels, test_labels)


def normalised(pictures: Pictures, mean: Sequence[float], deviation: Sequence[float]) -> Data:
    """Pixels between 0 and 1, less `mean`, over `deviation`, per channel."""

    def inputs(pixels: np.ndarray) -> torch.Tensor:
        shift, scale = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, deviation))
        return torch.from_numpy(pixels.copy()).float().div_(255).sub_(shift).div_(scale)

    def targets(labels: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(labels.astype(np.int64))

    return Data(
        inputs(pictures.train_pixels),
        targets(pictures.train_labels),
        inputs(pictures.test_pixels),
        targets(pictures.test_labels),
    )


def _files(folder: Path | str | None, inside: str, digests: Mapping[str, str]) -> Iterator[tuple[Path, bytes, str]]:
    """Path, content and digest of each file: in the folder given, else the environment's, else the archives."""
    if chosen := folder or os.environ.get(VARIABLE):
        if not Path(chosen).is_dir():
            raise DataError(f"the data folder {chosen} does not exist: name another with --data or {VARIABLE}")
        for name, digest in digests.items():
            path = Path(chosen, inside, name)
            yield path, _content(path), digest
        return
    from autoopt_lab.tasks import download  # it needs more than torch and numpy

    fetched = download.contents(download.MNIST if inside == "MNIST/raw" else download.CIFAR10)
    found = {path.name: (path, content) for path, content in fetched.items()}
    for name, digest in digests.items():
        yield *found[name], digest


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the data folder must hold {'/'.join(path.parts[-3:-1])}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the file and its permissions") from None


def _check(path: Path, content: bytes, digest: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise DataError(
            f"{path} is damaged or is another file ({len(content):,} bytes, SHA-256 {found[:12]}… where {digest[:12]}… "
            "is expected): fetch it again"
        )


def _idx(content: bytes) -> np.ndarray:
    """MNIST's own format: two zero bytes, the type (8: uint8), the number of axes, each axis as a 32-bit integer."""
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, offset=4).astype(int)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _cifar10_batch(path: Path, content: bytes, digest: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"], np.asarray(batch[b"labels"])
    except Exception as error:  # a damaged pickle can fail in any way; none of them is worth a traceback
        raise DataError(f"{path} is no CIFAR-10 batch ({error or type(error).__name__}): fetch it again") from None
    count = len(labels) if labels.ndim == 1 else 0
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (count, 3072)):
        raise DataError(f"{path} is no CIFAR-10 batch (it does not hold images of 3 x 32 x 32 bytes): fetch it again")
    if labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < 10)).all():
        raise DataError(f"{path} is no CIFAR-10 batch (its labels are not 0 to 9): fetch it again")
    labels = labels.astype(np.uint8)
    _check(path, pixels.tobytes() + labels.tobytes(), digest)
    return pixels.reshape(-1, 3, 32, 32), labels


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays and Python's own containers; any other name in the pickle is refused unseen."""

    def find_class(self, module: str, name: str) -> Any:
        rebuild: Callable[..., Any] = np.empty(0).__reduce__()[0]  # type: ignore[assignment]
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): rebuild,  # numpy 1, and the published files
            ("numpy._core.multiarray", "_reconstruct"): rebuild,  # numpy 2
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data file needs")
        return allowed[module, name]
