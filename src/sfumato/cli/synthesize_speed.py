"""How fast a generator is trained here, from short trials with a copy of its network."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from typing import Any

from sfumato.synthesis import train_generator
from sfumato.synthesis.unet import UNet

_PROBE, _MOST_TRIED = 5.0, 100_000  # seconds and steps at the most


def images_in(seconds: float, public: Any, network: UNet, settings: Mapping[str, Any]) -> int:
    """How many images a training of about so long sees; the network stays as it is."""
    batch_size = int(settings["batch_size"])
    speed = speed_of(min(_PROBE, seconds / 10), public, network, settings)
    return batch_size * max(1, math.floor(speed * seconds / batch_size))


def speed_of(limit: float, public: Any, network: UNet, settings: Mapping[str, Any]) -> float:
    """Images per second of a training with these settings, from trials of `limit` seconds and less."""
    batch_size = int(settings["batch_size"])

    def trial(limit: float) -> tuple[int, float]:
        start = time.perf_counter()
        tried = copy.deepcopy(network)
        found = train_generator(public, network=tried, images=batch_size * _MOST_TRIED, seconds=limit, **settings)
        return int(found.provenance["images_seen"]), time.perf_counter() - start

    trial(limit / 4)  # compiles and tries out what is to be
    return images_per_second(trial(limit / 4), trial(limit))


def images_per_second(short: tuple[int, float], long: tuple[int, float]) -> float:
    """From (images, seconds) of two trials, without what both take before their first step.

    >>> images_per_second((100, 3.0), (500, 5.0))
    200.0
    """
    images, seconds = long[0] - short[0], long[1] - short[1]
    return images / seconds if images > 0 and seconds > 0 else long[0] / long[1]
