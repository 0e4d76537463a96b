"""How good synthetic data is: FID, precision and recall, inception score, classification accuracy score.

All of it looks at public data only. The papers measure against the whole private training set, which nobody paid for;
the reference here is public rows that the generator was not trained on, where there are any to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.errors import InvalidArgument
from sfumato.nn.modes import in_mode
from sfumato.objective import Objective
from sfumato.public import Public
from sfumato.synthesis.features import Features, public_rows

_BLOCK = 1 << 24  # distances in memory at a time


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A number, what it was taken by, and of how many rows.

    >>> print(Measured(measure="FID", value=7.8, by="pixels", synthetic=1000, reference=500))
    FID 7.8 by pixels (1,000 synthetic rows, 500 public ones)
    """

    measure: str
    value: float
    by: str  # the name of the features, or the model's
    synthetic: int
    reference: int = 0
    spread: float | None = None  # the standard deviation over splits

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.4g}"
        against = f", {self.reference:,} public ones" if self.reference else ""
        return f"{self.measure} {self.value:.6g}{spread} by {self.by} ({self.synthetic:,} synthetic rows{against})"


# ------------------------------------------------------------------------------------------------ Fréchet distance


def fid(synthetic: Any, reference: Any, *, features: Features) -> Measured:
    """The Fréchet distance between Gaussians fitted to the features of both (Heusel et al. 2017, equation 6).

    It is biased upwards by few rows, on either side: compare only numbers that were taken of equally many.

    >>> from sfumato.synthesis.features import pixel_features
    >>> rows = torch.tensor([[-1.0], [1.0]])
    >>> round(fid(rows + 3, rows, features=pixel_features()).value, 6)
    9.0
    """
    a, b = _both(synthetic, reference, features, at_least=2)
    return Measured(
        measure="FID", value=float(frechet_distance(a, b)), by=features.name, synthetic=len(a), reference=len(b)
    )


def frechet_distance(a: Tensor, b: Tensor) -> Tensor:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), of rows (N, d).

    With C = L Lᵀ on both sides, the eigenvalues of C_a C_b are the squared singular values of L_aᵀ L_b. So there is no
    root of an asymmetric matrix, whose rounding errors are complex numbers where the rows are few.
    """
    gap = (a.mean(0) - b.mean(0)).square().sum()
    root_a, root_b = _root_of_covariance(a), _root_of_covariance(b)
    traces = root_a.square().sum() + root_b.square().sum()
    shared: Tensor = torch.linalg.svdvals(root_a.T @ root_b).sum()
    return torch.clamp_min(gap + traces - 2 * shared, 0)


def _root_of_covariance(rows: Tensor) -> Tensor:
    """L (d, r) with L Lᵀ the sample covariance; r is the smaller one of rows and dimensions."""
    centred: Tensor = (rows - rows.mean(0)) / math.sqrt(len(rows) - 1)
    if len(rows) <= rows.shape[1]:
        return centred.T
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    root: Tensor = vectors * values.clamp_min(0).sqrt()
    return root


# ------------------------------------------------------------------------------------------------ precision, recall


def precision(synthetic: Any, reference: Any, *, features: Features, k: int = 3) -> Measured:
    """The share of synthetic rows that lie where public ones do (Kynkäänniemi et al. 2019, equations 1 to 3).

    Where public rows lie is a union of balls, each around one of them and as wide as its k-th nearest neighbour is far.
    """
    a, b = _both(synthetic, reference, features, at_least=k + 1)
    inside = _covered(a, b, neighbours_within(b, k)[0][:, -1])
    return _share("precision", inside, features, len(a), len(b))


def recall(synthetic: Any, reference: Any, *, features: Features, k: int = 3) -> Measured:
    """The share of public rows that lie where synthetic ones do: low if whole kinds of rows are never made.

    >>> from sfumato.synthesis.features import pixel_features
    >>> two_kinds = torch.cat([torch.rand(50, 2), torch.rand(50, 2) + 9])
    >>> recall(two_kinds[:50], two_kinds, features=pixel_features()).value
    0.5
    """
    a, b = _both(synthetic, reference, features, at_least=k + 1)
    inside = _covered(b, a, neighbours_within(a, k)[0][:, -1])
    return _share("recall", inside, features, len(a), len(b))


def nearest(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """How far the nearest row is from each query, and which it is."""
    found = [part.min(1) for part in _distances(queries, rows)]
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def neighbours_within(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """How far the k nearest other rows are from each, and which they are, (N, k), the nearest first."""
    found, start = [], 0
    for part in _distances(rows, rows):
        part.diagonal(start).fill_(torch.inf)  # a row is not its own neighbour
        found.append(part.topk(k, dim=1, largest=False))
        start += len(part)
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def _covered(queries: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    return torch.cat([(part <= radii).any(1) for part in _distances(queries, centres)])


def _distances(queries: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Euclidean distances to all rows, for some queries at a time."""
    middle = rows.mean(0)  # products of centred rows lose fewer digits
    for part in torch.split(queries - middle, max(1, _BLOCK // len(rows))):
        yield torch.cdist(part, rows - middle)


def _share(measure: str, inside: Tensor, features: Features, synthetic: int, reference: int) -> Measured:
    value = float(inside.double().mean())
    return Measured(measure=measure, value=value, by=features.name, synthetic=synthetic, reference=reference)


# ------------------------------------------------------------------------------------------------ inception score


def inception_score(synthetic: Any, *, classifier: Features, splits: int = 1) -> Measured:
    """exp(mean_x KL(p(y|x) | p(y))), from 1 to the number of classes (Salimans et al. 2016).

    `classifier` gives logits. With several `splits` of the rows, in their order, the value is the mean over them; many
    papers take ten, of 5,000 rows each.

    >>> certain = Features("the rows themselves", lambda rows: 100 * rows)
    >>> round(inception_score(torch.eye(4), classifier=certain).value, 6)
    4.0
    """
    rows, _ = public_rows(synthetic, "synthetic")
    if not 1 <= splits <= len(rows):
        raise InvalidArgument(f"splits={splits} must be from 1 to the number of rows, {len(rows)}.")
    logs = torch.log_softmax(classifier(rows), 1)
    parts = [part for part in torch.tensor_split(logs, splits) if len(part)]
    scores = torch.stack([_score(part) for part in parts])
    spread = None if splits == 1 else float(scores.std(correction=0))
    name = "inception score"
    return Measured(measure=name, value=float(scores.mean()), by=classifier.name, synthetic=len(rows), spread=spread)


def _score(logs: Tensor) -> Tensor:
    of_all = torch.logsumexp(logs, 0) - torch.log(torch.tensor(len(logs), dtype=logs.dtype, device=logs.device))
    shares = logs.exp()
    # Where a share is zero its product with an infinite logarithm is zero too.
    return torch.where(shares > 0, shares * (logs - of_all), 0).sum(1).mean().exp()


# ------------------------------------------------------------------------------------------------ accuracy score


def cas(
    objective: Objective, synthetic: Public, held_out: Public, *, train: Callable[[Objective, Public], Any]
) -> Measured:
    """Classification accuracy score (Ravuri & Vinyals 2019): train on synthetic rows alone, score on real ones.

    `objective` holds a fresh classifier, which is trained in place; `train` is how, usually `warm_up` with its options.
    `held_out` are public (rows, labels) that the generator did not see.

    >>> from functools import partial
    >>> from sfumato.objective import cross_entropy
    >>> from sfumato.warmup import warm_up
    >>> rows = torch.linspace(-1, 1, 40).repeat(2, 1).T
    >>> public = Public((rows, (rows[:, 0] > 0).long()), seed=0)
    >>> objective = Objective(torch.nn.Linear(2, 2), cross_entropy)
    >>> cas(objective, public, public, train=partial(warm_up, steps=100, batch_size=10)).value > 0.9
    True
    """
    given: dict[str, Any] = {"synthetic": synthetic, "held_out": held_out}
    for name, data in given.items():
        if not isinstance(data, Public):
            public_rows(data, name)  # says what to do with private data
            raise InvalidArgument(f"{name}={type(data).__name__} must be a Public of (rows, labels).")
        _labelled(next(data.batches(1)), name)
    train(objective, synthetic)
    value = _accuracy(objective, held_out)
    by = type(objective.module).__name__
    return Measured(measure="CAS", value=value, by=by, synthetic=len(synthetic), reference=len(held_out))


@torch.no_grad()
def _accuracy(objective: Objective, public: Public) -> float:
    module, kind = objective.module, objective.autocast
    device = next(module.parameters()).device
    right = torch.zeros((), dtype=torch.int64, device=device)
    with in_mode(module, training=False):
        for batch in public.batches(1024):
            rows, labels = tree_map(lambda t: t.to(device), _labelled(batch, "held_out"))
            with torch.autocast(device.type, kind, enabled=kind is not None):
                right += (module(rows).argmax(1) == labels).sum()
    return int(right) / len(public)


def _labelled(batch: Any, name: str) -> tuple[Tensor, Tensor]:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise InvalidArgument(f"{name} holds {type(batch).__name__}: a Public of (rows, labels) is needed for classes.")
    return batch[0], batch[1]


def _both(synthetic: Any, reference: Any, features: Features, *, at_least: int) -> tuple[Tensor, Tensor]:
    if at_least < 2:
        raise InvalidArgument(f"k={at_least - 1} must be at least 1: it counts neighbours.")
    named = {"synthetic": public_rows(synthetic, "synthetic")[0], "reference": public_rows(reference, "reference")[0]}
    for name, rows in named.items():
        if len(rows) < at_least:
            raise InvalidArgument(f"{name} has {len(rows)} rows: at least {at_least} are needed for this measure.")
    a, b = (features(rows) for rows in named.values())
    if a.shape[1] != b.shape[1]:
        raise InvalidArgument(
            f"synthetic rows have {a.shape[1]} features and reference rows {b.shape[1]}: give images of the same size."
        )
    return a, b.to(a.device)
