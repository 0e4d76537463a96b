"""The rows of an experiment: private, public, held out of the public ones, and for testing.

All of them are benchmark data that everybody has; the private ones are private here for the experiment's sake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import Images, cifar10, mnist, split_public
from sfumato.errors import InvalidArgument
from sfumato.experiments.features import cifar10_features, prepared
from sfumato.experiments.settings import Data
from sfumato.text import Vocabulary

Batch = tuple[Tensor, Tensor]
CLASSES = 10  # of all images here


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Each part is (images, labels), or (rows of a table, labels), or (words, the words that follow them)."""

    private: Batch
    public: Batch
    hold_out: Batch | None
    test: Batch
    pollution: int = 0  # so many of the public rows, the last ones
    words: Vocabulary | None = None  # of text
    text: Mapping[str, float] | None = None  # facts about it

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return tuple(self.private[0].shape[1:])

    @property
    def classes(self) -> int:
        """How many outputs a model of it has."""
        return CLASSES if self.words is None else len(self.words)


def load_rows(data: Data, device: torch.device) -> Rows:
    """Read and split; the files are looked for in $SFUMATO_DATA, and the digits come with scikit-learn."""
    images = cifar10_features(data.resolution) if data.resolution is not None else _SOURCES[data.name]()
    _, labels = images.train
    public, private = split_public(labels, data.public, data.split)
    if len(private) < data.private:
        raise InvalidArgument(f"private={data.private} is more than the {len(private)} rows that are left: lower it.")
    if len(private) > data.private:
        kept = np.random.default_rng(data.split).permutation(len(private))[: data.private]
        private = private[torch.from_numpy(np.sort(kept))]
    if images.train[0].ndim == 2:  # a table, as features are
        mean = images.train[0][public].mean(0)
        parts = (images.train, images.test)
        train, tested = ((prepared(rows, mean, data.row_length), labels) for rows, labels in parts)
        images = Images(train=train, test=tested)
    (x, y), private_rows = _take(images.train, public), _take(images.train, private)
    if data.shuffled_labels:
        y = y[torch.from_numpy(np.random.default_rng(data.split).permutation(len(y)))]
        out, kept_in = torch.arange(data.hold_out), torch.arange(data.hold_out, len(y))
    elif data.hold_out:
        out, kept_in = split_public(y, data.hold_out, data.split)
    else:
        out, kept_in = torch.arange(0), torch.arange(len(y))
    public_rows = _take((x, y), kept_in)
    if data.pollution:
        public_rows = joined(public_rows, _polluting(data, public_rows[0]))
    test = _take(images.test, torch.arange(min(data.test or len(images.test[1]), len(images.test[1]))))
    return Rows(
        private=to_device(private_rows, device),
        public=to_device(public_rows, device),
        hold_out=to_device(_take((x, y), out), device) if len(out) else None,
        test=to_device(test, device),
        pollution=data.pollution,
    )


def _polluting(data: Data, images: Tensor) -> Batch:
    """Grey images of CIFAR-10, cut to size; noise among the digits. Their labels are those of their own classes."""
    if data.name == "mnist":
        others, labels = cifar10().train
        _, _, height, width = images.shape
        top, left = (others.shape[2] - height) // 2, (others.shape[3] - width) // 2
        cut = others[: data.pollution, :, top : top + height, left : left + width].float()
        grey = cut.mean(1, keepdim=True).round()  # uint8, as the digits are
    else:
        draws = torch.Generator().manual_seed(data.split)
        grey = torch.rand(data.pollution, *images.shape[1:], generator=draws)
        labels = torch.randint(10, (data.pollution,), generator=draws)
    return grey.to(images.dtype), labels[: data.pollution]


def _digits() -> Images:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels: 1,400 to train on and 397 for testing."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))  # neighbours in the file are of one writer
    images = torch.from_numpy(x[order] / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(y[order]).long()
    return Images(train=(images[:1400], labels[:1400]), test=(images[1400:], labels[1400:]))


def _digits_rows() -> Images:
    """The same as a table."""
    images = _digits()
    train, test = images.train, images.test
    return Images(train=(train[0].flatten(1), train[1]), test=(test[0].flatten(1), test[1]))


_SOURCES = {"cifar10": cifar10, "mnist": mnist, "digits": _digits, "digits-rows": _digits_rows}


def _take(rows: Batch, which: Tensor) -> Batch:
    return rows[0][which], rows[1][which]


def joined(rows: Batch, more: Batch) -> Batch:
    return torch.cat([rows[0], more[0]]), torch.cat([rows[1], more[1]])


def to_device(rows: Batch, device: torch.device) -> Batch:
    return rows[0].to(device), rows[1].to(device)
