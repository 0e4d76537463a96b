"""The small networks of two papers, without normalisation; no layer here mixes examples.

003 is Amid et al. 2022, "Public Data-Assisted Mirror Descent for Private Model Training" (PDA-DPMD), 000 is Nasr et al.
2023, "Effectively Using Public Data in Privacy Preserving Machine Learning" (DOPE-SGD). Neither names an activation: it
is tanh here, as in the source that 003 gives for its networks (Papernot et al. 2020, arXiv 2007.14191), whose bounded
values suit clipping. Images are uint8 or floats in 0..1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from sfumato.errors import InvalidArgument
from sfumato.models.basic import mlp
from sfumato.nn import Pixels


def cifar_convnet(outputs: int = 10) -> nn.Module:
    """Paper 003, table 2a, for images (N, 3, 32, 32): three pairs of convolutions, and a layer of 128 units.

    >>> sum(p.numel() for p in cifar_convnet().parameters())
    550570
    """
    # Our choice: a border of one pixel, so that convolutions keep the size; the table names no padding.
    layers = [Pixels(), *_convolutions((3, 32, 32)), nn.MaxPool2d(2)]
    layers += [*_convolutions((32, 64, 64)), nn.MaxPool2d(2), *_convolutions((64, 128, 128)), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.Tanh(), nn.Linear(128, _some(outputs)))


def emnist_cnn(outputs: int = 47) -> nn.Module:
    """Paper 003, table 2b, for images (N, 1, 28, 28): two convolutions and a layer of 32 units.

    The 47 classes are those of the ByMerge split.

    >>> sum(p.numel() for p in emnist_cnn().parameters())
    47711
    """
    # The table has no pooling, unlike the network of Papernot et al. for MNIST (`basic.cnn`). Our choice, theirs there:
    # the first convolution has a border, of 3, and the second has none.
    return nn.Sequential(
        Pixels(),
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 6 * 6, 32),
        nn.Tanh(),
        nn.Linear(32, _some(outputs)),
    )


def convnet3(outputs: int = 10) -> nn.Module:
    """Paper 000, appendix B, for images (N, 3, 32, 32): "a ConvNet network with three layers".

    >>> sum(p.numel() for p in convnet3().parameters())
    113738
    """
    # The paper says no more than that. Our choice: three convolutions of 3 x 3 with 32, 64 and 128 channels, each
    # halved by max-pooling, and a linear layer to the classes.
    layers: list[nn.Module] = [Pixels()]
    for before, after in pairwise((3, 32, 64, 128)):
        layers += [*_convolutions((before, after)), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, _some(outputs)))


def purchase_mlp(inputs: int = 600, outputs: int = 10) -> nn.Module:
    """Paper 000, appendix B, for rows of 600 binary features: four fully connected layers.

    >>> sum(p.numel() for p in purchase_mlp().parameters())
    1274122
    """
    # The paper gives the number of layers alone; widths of 1024, 512 and 256 are our choice, usual for this data set.
    return mlp(_some(inputs, "inputs"), _some(outputs), (1024, 512, 256))


def _convolutions(channels: Sequence[int]) -> list[nn.Module]:
    """3 x 3 with tanh, from each number of channels to the next; the size is kept."""
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
    return layers


def _some(number: int, name: str = "outputs") -> int:
    if number < 1:
        raise InvalidArgument(f"{name} is {number}: give a positive number.")
    return number
