"""More rows of a public table: a Gaussian copula for each class.

A copula keeps how every column is distributed and, between columns, the rank correlations; what is beyond (an exclusive
or of two columns, say) it does not see. Discrete columns take part exactly: the latent correlation of two columns is
the one under which their ranks, ties and all, correlate as they do in the table ("normal to anything", Cario & Nelson
1997, solved by the Hermite series of both columns).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import special, stats
from sklearn.covariance import ledoit_wolf_shrinkage
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.objective import Batch, Objective
from sfumato.public import Public
from sfumato.synthesis.features import public_rows
from sfumato.synthesis.synthetic import Synthetic

Floats = npt.NDArray[np.float64]

_TERMS = 63  # of the Hermite series; the last one stands for all that follow
_SAMPLES = "Rows drawn from copulas that were fitted to public rows only: no private data was touched to make them."
_HALVINGS = 40  # of the interval that holds a latent correlation


class Kind(StrEnum):
    """How the values of a column are drawn."""

    NUMERIC = "numeric"  # between those that were seen
    INTEGER = "integer"  # the same, rounded
    CATEGORICAL = "categorical"  # only those that were seen


@dataclass(frozen=True, kw_only=True, eq=False)
class TableGenerator:
    """Draws rows like those it was fitted to; made by `fit_table`."""

    provenance: Mapping[str, Any]
    variables: tuple[_Variable, ...]
    copulas: Mapping[float, _Copula]  # by class, or one for all
    counts: Mapping[float, int]  # rows of each class
    target: Kind | None  # what the labels are: classes, a number, or nothing
    dtypes: tuple[torch.dtype, ...]  # of rows and labels

    def sample(self, n: int | None = None, *, labels: Any = None, seed: int | None = None) -> Any:
        """So many rows in random order, as tensors of the table's types: (rows, labels), or rows if it had no labels.

        `labels` asks for one row of each of these classes; without it classes have their share of the table.
        """
        rng = np.random.default_rng(seed)
        classes = self._classes(n, labels, rng)
        width = 1 + max(column for variable in self.variables for column in variable.columns)
        rows = np.empty((len(classes), width))
        for value, copula in self.copulas.items():
            at = np.flatnonzero(classes == value)
            for variable, drawn in zip(self.variables, copula.sample(len(at), rng), strict=True):
                rows[np.ix_(at, np.array(variable.columns))] = variable.decoded(drawn)
        if self.target is None:
            return torch.from_numpy(rows).to(self.dtypes[0])
        found = classes if self.target is Kind.CATEGORICAL else rows[:, -1]
        features = rows if self.target is Kind.CATEGORICAL else rows[:, :-1]
        return torch.from_numpy(features).to(self.dtypes[0]), torch.from_numpy(found).to(self.dtypes[1])

    def public(
        self,
        n: int | None = None,
        *,
        labels: Any = None,
        seed: int | None = None,
        objective: Objective | None = None,
        augment: Callable[[Batch], Batch] | None = None,
    ) -> Synthetic:
        """Drawn rows as public data, which say where they come from; `objective` and `augment` as for any `Public`."""
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        data = self.sample(n, labels=labels, seed=seed)
        provenance = {
            "statement": _SAMPLES,
            "rows": len(data if self.target is None else data[0]),
            "labels": "as in the table" if labels is None else "given",
            "seed": seed,
            "generator": dict(self.provenance),
        }
        return Synthetic(data, provenance=provenance, objective=objective, seed=seed, augment=augment)

    def _classes(self, n: int | None, labels: Any, rng: np.random.Generator) -> Floats:
        if labels is not None:
            if self.target is not Kind.CATEGORICAL:
                raise InvalidArgument("labels can be asked for only of a table that was fitted with classes.")
            wanted = np.asarray(labels, dtype=np.float64).reshape(-1)
            if strange := sorted(set(wanted) - set(self.copulas)):
                raise InvalidArgument(f"labels has {strange[0]:g}: the table has the classes {_listed(self.copulas)}.")
            if n not in (None, len(wanted)) or not len(wanted):
                raise InvalidArgument(f"n={n} and {len(wanted)} labels: give one of the two, or as many as there are.")
            return wanted
        if n is None or n < 1:
            raise InvalidArgument(f"n={n} must be at least 1, or labels given.")
        values = np.array(list(self.counts))
        exact = n * np.array(list(self.counts.values())) / sum(self.counts.values())
        shares = np.floor(exact).astype(int)
        shares[np.argsort(shares - exact, kind="stable")[: n - shares.sum()]] += 1
        classes: Floats = rng.permutation(np.repeat(values, shares))
        return classes


def fit_table(
    public: Public,
    *,
    categorical: Sequence[int | Sequence[int]] = (),
    classes: bool = True,
    shrinkage: float | None = None,
) -> TableGenerator:
    """Fit a copula per class to a public table: rows (N, d), alone or with labels.

    Columns of two values are binary and columns of whole numbers integer; all others are numeric.

    Args:
        categorical: columns whose numbers are codes. A tuple of columns is one variable that takes only combinations
            that were seen: a one-hot coded one, say.
        classes: whether labels are classes; otherwise they are numbers, and one more column.
        shrinkage: from 0 to 1, how far latent correlations are drawn towards 0, which few rows need; None lets the rows
            tell (Ledoit & Wolf 2004).

    >>> age = torch.tensor([20.0, 30.0, 40.0, 50.0]).repeat(25)
    >>> generator = fit_table(Public((torch.stack([age, age > 30], 1), torch.zeros(100))))
    >>> rows, labels = generator.sample(1000, seed=0)
    >>> sorted(set(rows[:, 1].tolist())), bool((rows[rows[:, 1] == 1, 0] >= 30).all())
    ([0.0, 1.0], True)
    """
    if not isinstance(public, Public):
        raise InvalidArgument(
            f"public={type(public).__name__} must be a Public: rows drawn from a generator that saw private ones are "
            "not public."
        )
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise InvalidArgument(f"shrinkage={shrinkage} must be from 0 to 1, or None.")
    X, y = public_rows(public, "public")
    if X.ndim != 2 or (y is not None and y.ndim != 1):
        shapes = [tuple(t.shape) for t in (X, y) if t is not None]
        raise InvalidArgument(f"public holds arrays of the shapes {shapes}: give a table (N, d) and labels (N,).")
    rows, target = X.cpu().numpy().astype(np.float64), None
    groups = np.zeros(len(rows))
    if y is not None:
        values = y.cpu().numpy().astype(np.float64)
        target = Kind.CATEGORICAL if classes else Kind.NUMERIC
        if classes:
            groups = values
        else:
            rows = np.column_stack([rows, values])
    variables = _variables(rows, categorical, features=X.shape[1])
    encoded = np.column_stack([variable.encoded(rows) for variable in variables])
    kinds = [variable.kind for variable in variables]
    seen, counts = np.unique(groups, return_counts=True)
    if len(seen) > 1 and 2 * len(seen) > len(rows):
        raise InvalidArgument(
            f"classes=True, but {len(rows)} rows have {len(seen)} different labels: set classes=False for numbers."
        )
    return TableGenerator(
        provenance=_provenance(X, y, kinds, seen if target is Kind.CATEGORICAL else (), shrinkage),
        variables=variables,
        copulas={float(value): _Copula.fitted(encoded[groups == value], kinds, shrinkage) for value in seen},
        counts={float(value): int(count) for value, count in zip(seen, counts, strict=True)},
        target=target,
        dtypes=tuple(t.dtype for t in (X, y) if t is not None),
    )


# ------------------------------------------------------------------------------------------------ columns


@dataclass(frozen=True, kw_only=True, eq=False)
class _Variable:
    """One column, or several that are one categorical variable, as one number per row."""

    columns: tuple[int, ...]
    kind: Kind
    patterns: Floats  # (P, columns): what a categorical variable's codes stand for

    def encoded(self, rows: Floats) -> Floats:
        values = rows[:, self.columns]
        if self.kind is not Kind.CATEGORICAL:
            return values[:, 0]
        codes = np.unique(np.concatenate([self.patterns, values]), axis=0, return_inverse=True)[1]
        found: Floats = codes.reshape(-1)[len(self.patterns) :].astype(np.float64)
        return found

    def decoded(self, values: Floats) -> Floats:
        if self.kind is Kind.CATEGORICAL:
            found: Floats = self.patterns[values.astype(int)]
        else:
            found = (np.rint(values) if self.kind is Kind.INTEGER else values)[:, None]
        return found


def _variables(rows: Floats, categorical: Sequence[int | Sequence[int]], *, features: int) -> tuple[_Variable, ...]:
    declared = [(group,) if isinstance(group, int) else tuple(group) for group in categorical]
    named = [column for group in declared for column in group]
    if len(set(named)) != len(named) or not all(0 <= column < features for column in named):
        raise InvalidArgument(
            f"categorical={list(categorical)} must name columns from 0 to {features - 1}, each at most once."
        )
    found = [_Variable(columns=g, kind=Kind.CATEGORICAL, patterns=np.unique(rows[:, g], axis=0)) for g in declared if g]
    for column in sorted(set(range(rows.shape[1])) - set(named)):
        values = rows[:, column]
        distinct = np.unique(values)
        whole = bool((values == np.rint(values)).all())
        kind = Kind.CATEGORICAL if len(distinct) <= 2 else Kind.INTEGER if whole else Kind.NUMERIC
        found.append(_Variable(columns=(column,), kind=kind, patterns=distinct[:, None]))
    return tuple(found)


# ------------------------------------------------------------------------------------------------ the copula


@dataclass(frozen=True, kw_only=True, eq=False)
class _Copula:
    """Columns made of latent normals: value = quantile(Phi(z)), z = L e with standard normal e."""

    margins: tuple[Floats, ...]  # the sorted values of each variable; of a categorical one, places in its order
    orders: tuple[npt.NDArray[np.int64] | None, ...]  # of a categorical variable: the code at each place
    root: Floats  # L, with rows of norm 1

    @staticmethod
    def fitted(values: Floats, kinds: Sequence[Kind], shrinkage: float | None) -> _Copula:
        orders = [_ordered(values, kinds, i) if kind is Kind.CATEGORICAL else None for i, kind in enumerate(kinds)]
        places = values.copy()
        for i, order in enumerate(orders):
            if order is not None:
                places[:, i] = np.argsort(order)[values[:, i].astype(int)]
        latent = _latent_correlations(places)
        if shrinkage is None:
            scores = special.ndtri(_ranks(places))
            shrinkage = float(ledoit_wolf_shrinkage(scores)) if len(scores) > 1 and np.ptp(scores) > 0 else 1.0
        latent = (1 - shrinkage) * latent + shrinkage * np.eye(len(latent))
        # Correlations that were found pair by pair need not fit together: the nearest that do.
        spread, axes = np.linalg.eigh(latent)
        root = axes * np.sqrt(np.maximum(spread, 0))
        root /= np.linalg.norm(root, axis=1, keepdims=True)
        return _Copula(margins=tuple(np.sort(places, axis=0).T), orders=tuple(orders), root=root)

    def sample(self, n: int, rng: np.random.Generator) -> list[Floats]:
        shares = special.ndtr(rng.standard_normal((n, len(self.root))) @ self.root.T)
        found = []
        for share, margin, order in zip(shares.T, self.margins, self.orders, strict=True):
            place = share * len(margin)
            if order is None:
                found.append(np.interp(place - 0.5, np.arange(len(margin)), margin))
            else:
                chosen = margin[np.minimum(place.astype(int), len(margin) - 1)]
                found.append(order[chosen.astype(int)].astype(np.float64))
        return found


def _ordered(values: Floats, kinds: Sequence[Kind], variable: int) -> npt.NDArray[np.int64]:
    """An order of a variable's codes, since a latent normal needs one: along what most moves the other columns.

    That is their first principal component; without ordered columns, or with two codes, it is the codes' own order.
    """
    codes = values[:, variable].astype(int)
    count = int(codes.max()) + 1
    others = [
        i for i, kind in enumerate(kinds) if i != variable and (kind is not Kind.CATEGORICAL or _binary(values, i))
    ]
    if count <= 2 or not others:
        return np.arange(count)
    scores = special.ndtri(_ranks(values[:, others]))
    scores -= scores.mean(0)
    along = scores @ np.linalg.eigh(scores.T @ scores)[1][:, -1]
    seen = np.bincount(codes, minlength=count)
    means = np.bincount(codes, weights=along, minlength=count) / np.maximum(seen, 1)
    return np.argsort(means, kind="stable")


def _binary(values: Floats, variable: int) -> bool:
    return bool(values[:, variable].max() <= 1)


def _ranks(values: Floats) -> Floats:
    """Between 0 and 1; equal values share the mean of theirs."""
    ranks: Floats = (stats.rankdata(values, axis=0) - 0.5) / len(values)
    return ranks


def _latent_correlations(values: Floats) -> Floats:
    """The correlations of normals under which the ranks of the columns correlate as they do here.

    With g(z) = sum_k c_k h_k(z), h_k the normalised Hermite polynomials, E[g_i(z_i) g_j(z_j)] = sum_k c_ik c_jk rho^k,
    which grows with rho since ranks do with z: it is solved by halving, for all pairs at once.
    """
    ranks = _ranks(values)
    spread = ranks.std(0)
    varies = spread > 0
    unit = np.divide(ranks - ranks.mean(0), spread, out=np.zeros_like(ranks), where=varies)
    wanted = unit.T @ unit / len(ranks)
    series = np.stack([_hermite(column) for column in ranks.T])  # (variables, terms)
    series = np.divide(series, spread[:, None], out=np.zeros_like(series), where=varies[:, None])
    low, high = np.full_like(wanted, -1.0), np.full_like(wanted, 1.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = np.zeros_like(middle)
        for k in range(series.shape[1] - 1, -1, -1):  # Horner; the term of rho^(k + 1)
            reached = (reached + np.outer(series[:, k], series[:, k])) * middle
        less = reached < wanted
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    latent = np.where(np.outer(varies, varies), (low + high) / 2, 0.0)
    np.fill_diagonal(latent, 1.0)
    return latent


def _hermite(ranks: Floats) -> Floats:
    """c_1, c_2, ... of the staircase that a column's ranks are as a function of its latent normal.

    A step at z contributes its height times the integral of h_k phi above z, which is h_{k-1}(z) phi(z) / sqrt(k). The
    last coefficient holds what is left of the variance, so that a column and its copy get the correlation 1.
    """
    levels, counts = np.unique(ranks, return_counts=True)
    z = special.ndtri(np.cumsum(counts)[:-1] / len(ranks))
    heights = np.diff(levels) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    before, polynomial = np.zeros_like(z), np.ones_like(z)  # h_{k-2}, h_{k-1}
    found = []
    for k in range(1, _TERMS):
        found.append(heights @ polynomial / np.sqrt(k))
        before, polynomial = polynomial, (z * polynomial - np.sqrt(k - 1) * before) / np.sqrt(k)
    rest = max(0.0, float(ranks.var() - np.square(found).sum()))
    return np.array([*found, np.sqrt(rest)])


# ------------------------------------------------------------------------------------------------ provenance


def _provenance(
    X: Tensor, y: Tensor | None, kinds: Sequence[Kind], classes: Sequence[float] | Floats, shrinkage: float | None
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for array in (X, y):
        if array is not None:
            digest.update(f"{array.dtype} {tuple(array.shape)}".encode())
            digest.update(array.cpu().contiguous().numpy().tobytes())
    return {
        "statement": "Fitted to public rows only: no private data was touched.",
        "kind": "Gaussian copula per class" if len(classes) else "Gaussian copula",
        "rows": len(X),
        "sha256": digest.hexdigest(),
        "settings": {
            "columns": [str(kind) for kind in kinds],
            "classes": [float(c) for c in classes],
            "shrinkage": shrinkage,
        },
        "versions": {name: version(name) for name in ("sfumato", "numpy", "scipy", "scikit-learn", "torch")},
    }


def _listed(values: Mapping[float, Any]) -> str:
    return ", ".join(f"{value:g}" for value in values)
