"""The objects that settings name: network, augmentation and algorithm."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.exact_mirror import ExactMirror
from sfumato.algorithms.extended import Extended, shares
from sfumato.algorithms.method import Method, StatefulMethod
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.algorithms.weight_multiplicity import weight_multiplicity
from sfumato.augment import CIFAR10, TRIVIAL, Augmentation, AutoAugment, Chain, CutMix
from sfumato.experiments.data import CLASSES
from sfumato.experiments.settings import WITHOUT_STATE, Crops, Model, Settings, Training
from sfumato.generators import own_generators
from sfumato.models.basic import cnn, linear, mlp
from sfumato.models.bert import WordBERT
from sfumato.models.convnets import cifar_convnet, convnet3
from sfumato.models.lstm import WordLSTM
from sfumato.models.wide_resnet import wide_resnet
from sfumato.nn import Pixels


def make_model(model: Model, shape: tuple[int, ...], seed: int, classes: int = CLASSES) -> nn.Module:
    """With first weights drawn by the seed."""
    with own_generators(seed):
        if model.name == "lstm":
            return WordLSTM(classes, model.width or 120, model.depth or 2)
        if model.name == "bert":
            return WordBERT(classes, width=model.width or 128, blocks=model.depth or 2, length=shape[0])
        if model.name == "wide-resnet":
            first = bool(model.activation_first)
            return wide_resnet(model.depth or 16, model.width or 4, CLASSES, channels=shape[0], activation_first=first)
        if model.name == "cifar-convnet":
            return cifar_convnet(CLASSES)
        if model.name == "convnet3":
            return convnet3(CLASSES)
        if model.name == "cnn":
            network = nn.Sequential(Pixels(), cnn(shape[0], CLASSES))
            network(torch.zeros(1, *shape))  # a layer takes its size from the first image
            return network
        if model.name == "linear":
            return linear(math.prod(shape), CLASSES)
        layers = mlp(math.prod(shape), CLASSES, model.hidden or (64,))
        return nn.Sequential(Pixels(mean=0.0, std=1.0), layers) if model.name == "pixel-mlp" else layers


def make_augment(crops: Crops) -> Augmentation | Chain | None:
    policies = [AutoAugment(policy) for used, policy in ((crops.trivial, TRIVIAL), (crops.auto, CIFAR10)) if used]
    last = [CutMix(classes=CLASSES)] if crops.cutmix else []
    if policies:
        first = Augmentation(pad=crops.pad, flip=crops.flip)
        return Chain(first, *policies, Augmentation(pad=0, flip=False, cutout=crops.cutout), *last)
    if crops == Crops():
        return None
    plain = Augmentation(pad=crops.pad, flip=crops.flip, cutout=crops.cutout)
    return Chain(plain, *last) if last else plain


def private_batch(settings: Settings) -> int:
    """The expected number of private rows in a step: public rows that join the batch take the place of some."""
    return _batches(settings)[0]


def make_method(settings: Settings) -> Method | StatefulMethod:
    """The algorithms on top of each other, DP-SGD at the bottom."""
    training = settings.training
    made: Any = partial(dp_sgd, clip=training.clip, views=training.views, augment=make_augment(training.augment))
    names = list(reversed(training.method))
    for name in (n for n in names if n in WITHOUT_STATE):
        made = _on_top(name, training, made)
    if training.setting.endswith("extended"):
        private, public = _batches(settings)
        longest = training.extended_clip
        made = Extended(private_batch=private, public_batch=public, public_clip=longest, method=made)
    for name in (n for n in names if n not in WITHOUT_STATE):
        made = _on_top(name, training, made)
    method: Method | StatefulMethod = made
    return method


def _batches(settings: Settings) -> tuple[int, int]:
    training = settings.training
    if not training.setting.endswith("extended"):
        return training.batch_size, 0
    return shares(training.batch_size, settings.data.private, settings.public_rows)


def _on_top(name: str, training: Training, below: Any) -> Any:
    rate = training.learning_rate / (1 - training.momentum)  # of plain descent, in the long run
    if name == "dope-sgd" and training.dope is not None:
        dope = training.dope
        return partial(
            dope_sgd,
            clip=training.clip,
            origin_clip=dope.origin_clip if dope.bounded else math.inf,
            public_batch=dope.public_batch,
            step_size=rate if dope.line_search else None,
            method=below,
        )
    if name == "weight-multiplicity" and training.multiplicity is not None:
        options = training.multiplicity
        return partial(
            weight_multiplicity,
            views=training.views,
            radius=options.radius,
            public_batch=options.public_batch,
            method=below,
        )
    if name == "mirror-descent" and training.mirror is not None:
        return MirrorDescent(
            decay_steps=training.mirror.decay_steps,
            alpha_min=training.mirror.alpha_min,
            public_batch=training.mirror.public_batch,
            public_clip=training.mirror.public_clip,
            answer_clip=training.mirror.answer_clip,
            step_size=rate if training.mirror.line_search else None,
            method=below,
        )
    if name == "exact-mirror" and training.exact is not None:
        return ExactMirror(step_size=training.learning_rate, strength=training.exact.strength, method=below)
    if name == "ada-dps" and training.ada is not None:
        ada = training.ada
        return AdaDPS(damping=ada.damping, memory=ada.memory, public_batch=ada.public_batch, method=below)
    if name == "shrunk-origin" and training.shrunk is not None:
        shrunk = training.shrunk
        return ShrunkOrigin(
            origin_clip=training.clip if shrunk.origin_clip is None else shrunk.origin_clip,
            public_batch=shrunk.public_batch,
            memory=shrunk.memory,
            step_size=rate if shrunk.line_search else None,
            method=below,
        )
    return below
