"""Public images from files of all kinds: folders as people have them, and arrays by their names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.data.arrays import read_arrays
from sfumato.data.image_files import image_files, read_images
from sfumato.errors import InvalidArgument

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    Image.fromarray(GREY).save(tmp_path / "b" / "grey.png")
    Image.fromarray(COLOUR).save(tmp_path / "colour.PNG")
    Image.fromarray(COLOUR[::-1].copy()).save(tmp_path / "again.bmp")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "a.png").mkdir()  # a folder by that name
    return tmp_path


def test_files_come_by_name_and_folders_below_if_wanted(folder: Path) -> None:
    assert [path.name for path in image_files(folder)] == ["again.bmp", "colour.PNG"]
    found = [str(path.relative_to(folder)) for path in image_files(folder, below=True)]
    assert found == ["again.bmp", "b/grey.png", "colour.PNG"]


def test_pixels_are_those_of_the_file(folder: Path) -> None:
    found = read_images(image_files(folder), "images")
    assert (found.dtype, found.shape) == (np.uint8, (2, 3, 3, 4))
    assert np.array_equal(found[1], COLOUR.transpose(2, 0, 1))
    assert np.array_equal(found[0], COLOUR[::-1].transpose(2, 0, 1))


def test_grey_ones_have_one_channel_if_all_are_grey(folder: Path) -> None:
    grey, colour = folder / "b" / "grey.png", folder / "colour.PNG"
    assert np.array_equal(read_images([grey, grey], "images"), np.stack([GREY, GREY])[:, None])
    for order in ([grey, colour], [colour, grey]):
        found = read_images(order, "images")[order.index(grey)]
        assert np.array_equal(found, np.stack([GREY] * 3))
    assert read_images([grey], "images", channels=3).shape == (1, 3, 3, 4)
    assert np.array_equal(read_images([colour, grey], "images", channels=1)[1, 0], GREY)
    Image.fromarray(GREY > 100).save(folder / "two.png")  # one bit per pixel
    assert np.array_equal(read_images([folder / "two.png"], "images")[0, 0], 255 * (GREY > 100))


def test_a_file_that_is_no_image_or_of_another_size_is_named(folder: Path) -> None:
    (folder / "torn.png").write_bytes((folder / "b" / "grey.png").read_bytes()[:40])
    Image.fromarray(GREY.T.copy()).save(folder / "turned.png")
    for name, said in (("torn.png", "cannot be read as an image"), ("turned.png", "has 3 x 4 pixels and others 4 x 3")):
        with pytest.raises(InvalidArgument, match=f"images: '.*{name}' {said}"):
            read_images([folder / "colour.PNG", folder / name], "[pool] images")


def test_arrays_are_found_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X_public=GREY, y=COLOUR, other=GREY[:1])
    choices = [("x", "y"), ("x_public", "y_public")]
    x, y = read_arrays(tmp_path / "a.npz", "[data] public", choices)
    assert x is not None
    assert np.array_equal(x, GREY)
    assert y is None, "the y of another choice is not taken"
    with pytest.raises(InvalidArgument, match=re.escape("X_public, y, other: they are to be called images.")):
        read_arrays(tmp_path / "a.npz", "[pool] images", [("images",)])


def test_what_is_no_npz_file_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", GREY)
    np.savez(tmp_path / "whole.npz", x=GREY)
    contents = {
        "text.npz": b"no arrays",
        "one.npz": (tmp_path / "one.npy").read_bytes(),
        "cut.npz": (tmp_path / "whole.npz").read_bytes()[:-30],
        "empty.npz": b"",
    }
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "objects.npz"):
        with pytest.raises(InvalidArgument, match=f"x='.*{name}' cannot be read as an NPZ file"):
            read_arrays(tmp_path / name, "x", [("x",)])
