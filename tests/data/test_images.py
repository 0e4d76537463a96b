"""Images from files: written here in each of their forms, and read back."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from sfumato.data.images import Images, cifar10, mnist, qmnist, split_public, svhn
from sfumato.errors import InvalidArgument

REAL = Path(os.environ.get("SFUMATO_DATA", "nowhere"))
RNG = np.random.default_rng(0)


def made_up(rows: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (rows, *shape), dtype=np.uint8), RNG.integers(0, 10, rows, dtype=np.uint8)


def check(found: Images, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> None:
    for (images, labels), (x, y) in ((found.train, train), (found.test, test)):
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert images.is_contiguous()
        np.testing.assert_array_equal(images.numpy(), x)
        np.testing.assert_array_equal(labels.numpy(), y)


# ------------------------------------------------------------------------------------------------ CIFAR-10


class _Python2(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes bytes as the strings of Python 2, in which the official batches were pickled."""

    def save_string(self, obj: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(obj)) + obj)
        self.memoize(obj)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_string}  # type: ignore[attr-defined]  # noqa: RUF012


def pickled(content: Any) -> bytes:
    buffer = io.BytesIO()
    _Python2(buffer, protocol=2).dump(content)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def batch(x: np.ndarray, y: np.ndarray) -> bytes:
    content = {
        b"batch_label": b"a batch",
        b"labels": y.tolist(),
        b"data": x.reshape(len(x), -1),
        b"filenames": [b"a.png"],
    }
    return pickled(content)


def batches() -> tuple[dict[str, bytes], tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    parts = [made_up(4, 3, 32, 32) for _ in range(6)]
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files = {name: batch(*part) for name, part in zip(names, parts, strict=True)}
    x, y = zip(*parts[:5], strict=True)
    return files, (np.concatenate(x), np.concatenate(y)), parts[5]


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_pickles_are_like_the_official_ones() -> None:
    """As the documentation of CIFAR-10 reads them, for Python 3."""
    x, y = made_up(2, 3, 32, 32)
    content = batch(x, y)
    assert b"cnumpy.core.multiarray\n_reconstruct" in content
    assert b"_codecs" not in content  # as Python 3 writes bytes
    read = pickle.loads(content.replace(b"cnumpy.core.", b"cnumpy._core."), encoding="bytes")
    np.testing.assert_array_equal(read[b"data"].reshape(x.shape), x)


def test_cifar_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, train, test = batches()
    write(tmp_path / "cifar-10-batches-py", files)
    check(cifar10(tmp_path), train, test)
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    check(cifar10(), train, test)


def test_cifar_archive(tmp_path: Path) -> None:
    files, train, test = batches()
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    check(cifar10(tmp_path), train, test)


def mosaic(path: Path, x: np.ndarray) -> None:
    """Image by image: number i lies in row i // 100, column i % 100."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    canvas = np.zeros((32 * (len(x) // 100), 3200, 3), np.uint8)
    for i, picture in enumerate(x):
        top, left = 32 * (i // 100), 32 * (i % 100)
        canvas[top : top + 32, left : left + 32] = picture.transpose(1, 2, 0)
    image.fromarray(canvas).save(path, lossless=True, method=0)


def test_cifar_mosaics(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "cifar10"
    folder.mkdir(parents=True)
    parts = [made_up(200 if i == 1 else 100, 3, 32, 32) for i in range(6)]
    for i, (x, _) in enumerate(parts):
        mosaic(folder / (f"train_{i}.webp" if i else "test.webp"), x)
    x, y = (np.concatenate(arrays) for arrays in zip(*parts[1:], strict=True))
    np.savez(folder / "labels.npz", y_train=y, y_test=parts[0][1])
    check(cifar10(tmp_path), (x, y), parts[0])


def test_mosaics_need_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "images" / "cifar10"
    folder.mkdir(parents=True)
    np.savez(folder / "labels.npz", y_train=np.zeros(500), y_test=np.zeros(100))
    monkeypatch.setitem(sys.modules, "PIL", None)  # as where it is not installed
    with pytest.raises(InvalidArgument, match="needs Pillow"):
        cifar10(tmp_path)


def test_pickles_run_no_code(tmp_path: Path) -> None:
    files, _, _ = batches()
    evil = tmp_path / "evil"
    files["data_batch_3"] = b"cos\nsystem\n(S'touch " + str(evil).encode() + b"'\ntR."
    write(tmp_path / "cifar-10-batches-py", files)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        cifar10(tmp_path)
    assert not evil.exists()


# ------------------------------------------------------------------------------------------------ MNIST


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx(train[0][:, 0]),
        "train-labels-idx1-ubyte": idx(train[1]),
        "t10k-images-idx3-ubyte": idx(test[0][:, 0]),
        "t10k-labels-idx1-ubyte": idx(test[1]),
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
def test_mnist_idx(tmp_path: Path, place: str, packed: bool) -> None:
    train, test = made_up(5, 1, 28, 28), made_up(3, 1, 28, 28)
    files = idx_files(train, test)
    if packed:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    write(tmp_path / "data" / place, files)
    check(mnist(tmp_path / "data"), train, test)


def test_mnist_compact(tmp_path: Path) -> None:
    train, test = made_up(5, 1, 28, 28), made_up(3, 1, 28, 28)
    buffer = io.BytesIO()
    np.savez(buffer, x_train=train[0][:, 0], y_train=train[1], x_test=test[0][:, 0], y_test=test[1])
    write(tmp_path / "images", {"mnist.npz.xz": lzma.compress(buffer.getvalue())})
    check(mnist(str(tmp_path)), train, test)


# ------------------------------------------------------------------------------------------------ what goes wrong


def int_idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 12, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.astype(">i4").tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_qmnist(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "qmnist"
    folder.mkdir()
    parts = {"train": made_up(5, 1, 28, 28), "test": made_up(4, 1, 28, 28)}
    for part, (x, y) in parts.items():
        facts = RNG.integers(0, 100_000, (len(y), 8))
        facts[:, 0] = y
        for name, content in (("images-idx3-ubyte", idx(x[:, 0])), ("labels-idx2-int", int_idx(facts))):
            path = folder / f"qmnist-{part}-{name}{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    check(qmnist(tmp_path), parts["train"], parts["test"])
    (folder / f"qmnist-test-labels-idx2-int{'.gz' if packed else ''}").write_bytes(b"no idx")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        qmnist(tmp_path)


def test_svhn(tmp_path: Path) -> None:
    folder = tmp_path / "svhn"
    folder.mkdir()
    parts = {name: made_up(rows, 3, 32, 32) for name, rows in (("train", 6), ("test", 5), ("extra", 7))}
    for name, (x, y) in parts.items():
        ten = np.where(y == 0, 10, y)[:, None]  # as the files have it
        savemat(folder / f"{name}_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": ten})
    check(svhn(tmp_path), parts["train"], parts["test"])
    check(svhn(tmp_path, extra=True), parts["extra"], parts["test"])
    (folder / "test_32x32.mat").write_bytes(b"MATLAB")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        svhn(tmp_path)
    with pytest.raises(InvalidArgument, match=r"train_32x32\.mat, svhn/train_32x32\.mat and SVHN/train_32x32\.mat"):
        svhn(tmp_path / "svhn" / "empty")
    with pytest.raises(InvalidArgument, match="does not hold QMNIST"):
        qmnist(tmp_path)


def test_nothing_found_says_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cifar-10-batches-py/", "cifar-10-python.tar.gz", "images/cifar10/"):
        with pytest.raises(InvalidArgument, match=name):
            cifar10(tmp_path)
    for name in ("train-images-idx3-ubyte", "MNIST/raw/", "images/mnist.npz.xz"):
        with pytest.raises(InvalidArgument, match=name):
            mnist(tmp_path)
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    for load in (cifar10, mnist):
        with pytest.raises(InvalidArgument, match="SFUMATO_DATA is not set"):
            load()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    files, _, _ = batches()
    del files["data_batch_2"]
    write(tmp_path / "cifar-10-batches-py", files)
    with pytest.raises(InvalidArgument, match="data_batch_2' is missing"):
        cifar10(tmp_path)
    digits = idx_files(made_up(2, 1, 28, 28), made_up(2, 1, 28, 28))
    del digits["t10k-labels-idx1-ubyte"]
    write(tmp_path / "mnist", digits)
    with pytest.raises(InvalidArgument, match="t10k-labels-idx1-ubyte' is missing"):
        mnist(tmp_path)


@pytest.mark.parametrize("damage", ["short", "kind", "count"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    files = idx_files(made_up(5, 1, 28, 28), made_up(3, 1, 28, 28))
    name = "train-images-idx3-ubyte"
    if damage == "short":
        files[name] = files[name][:-1]
    elif damage == "kind":
        files[name] = b"\0\0\x0d\3" + files[name][4:]
    else:
        files["train-labels-idx1-ubyte"] = idx(np.zeros(4, np.uint8))
    write(tmp_path / "mnist", files)
    with pytest.raises(InvalidArgument, match="one label each" if damage == "count" else "cannot be read"):
        mnist(tmp_path)


# ------------------------------------------------------------------------------------------------ public rows


def test_split_is_class_uniform_and_fixed_by_the_seed() -> None:
    labels = torch.from_numpy(RNG.permutation(np.repeat(np.arange(10), 30)))
    public, private = split_public(labels, 50, seed=3)
    assert torch.bincount(labels[public]).tolist() == [5] * 10
    assert torch.equal(torch.cat([public, private]).sort().values, torch.arange(300))
    again, _ = split_public(labels, 50, seed=3)
    other, _ = split_public(labels, 50, seed=4)
    assert torch.equal(public, again)
    assert not torch.equal(public, other)


def test_split_draws_every_row_alike() -> None:
    """2,000 seeds: each row is public with probability 1/3, within six standard deviations."""
    labels = torch.arange(24) % 4
    counts = torch.zeros(24)
    for seed in range(2000):
        counts[split_public(labels, 8, seed)[0]] += 1
    assert float((counts - 2000 / 3).abs().max()) < 6 * (2000 * 2 / 9) ** 0.5


def test_wrong_counts_are_refused() -> None:
    labels = torch.arange(10).repeat(3)
    for count in (0, -10, 15):
        with pytest.raises(InvalidArgument, match=f"count={count} must be a positive multiple"):
            split_public(labels, count, 0)
    with pytest.raises(InvalidArgument, match="count=40 needs 4 rows of each class, and one has only 3"):
        split_public(labels, 40, 0)


# ------------------------------------------------------------------------------------------------ the real ones


@pytest.mark.skipif(not (REAL / "images/mnist.npz.xz").is_file(), reason="needs $SFUMATO_DATA/images/mnist.npz.xz")
def test_real_mnist() -> None:
    data = mnist()
    assert data.train[0].shape == (60_000, 1, 28, 28)
    assert data.test[0].shape == (10_000, 1, 28, 28)
    assert data.train[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # the famous first ten
    assert float(data.train[0].double().mean() / 255) == pytest.approx(0.1307, abs=5e-5)  # as in everyone's code


@pytest.mark.skipif(not (REAL / "images/cifar10").is_dir(), reason="needs $SFUMATO_DATA/images/cifar10")
def test_real_cifar10() -> None:
    data = cifar10()
    assert data.train[0].shape == (50_000, 3, 32, 32)
    assert data.test[0].shape == (10_000, 3, 32, 32)
    assert data.train[1][:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.bincount(data.train[1]).tolist() == [5000] * 10
    means = (data.train[0].double().mean((0, 2, 3)) / 255).tolist()
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)  # R, G, B, as in everyone's code
    public, private = split_public(data.train[1], 2000, seed=0)
    assert torch.bincount(data.train[1][public]).tolist() == [200] * 10
    assert len(private) == 48_000
