"""What all linear estimators share: scikit-learn's conventions outside, the door inside.

An estimator is a dataclass of its parameters, and one method: `_learn` for those that ask private rows, `_minimise`
for those that do not (see `plain`). Everything a method sees of the private rows comes through the `Private` it is
given; public rows come as tensors.
"""

from __future__ import annotations

import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils import Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from sfumato.erm.coordinates import moved
from sfumato.erm.losses import Logistic, Loss, Needs, Square
from sfumato.erm.parameters import check_types
from sfumato.erm.rows import Array, Rows, check_apart, column, features, numbers, signs, tensor, unit_rows
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.mechanisms import Adjacency
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Private

_FAR = 3.0  # half ranges from the middle, where public targets are told of


class Learned(NamedTuple):
    """What a method hands back: weights over unit rows (the constant column last), and what they cost."""

    w: Tensor
    n_iter: int
    epsilon: float


@dataclass(kw_only=True, eq=False, repr=False)
class LinearModel(BaseEstimator):  # type: ignore[misc]
    """Common ground. Rows longer than 1 are shortened to norm 1, when fitting and when predicting."""

    loss: Loss | None = None
    l2: float = 0.0
    fit_intercept: bool = True

    _default_loss: ClassVar[Loss]
    _needs: ClassVar[Needs] = Needs()
    _poor_score: ClassVar[bool] = True
    """Whether a few rows without help teach it too little for scikit-learn's own checks of its score."""

    def _loss(self) -> Loss:
        """The loss, or a refusal that names what it lacks."""
        loss = self._default_loss if self.loss is None else self.loss
        if not isinstance(loss, Loss):
            raise InvalidArgument(f"loss={loss!r} must be a loss, such as {self._default_loss}.")
        self._check_kind(loss)
        self._needs.check(loss, type(self).__name__, radius=getattr(self, "radius", None))
        return loss

    def _check_parameters(self) -> None:
        """Raise for parameters of a wrong type or out of range; methods add theirs."""
        check_types(self)
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise InvalidArgument(f"l2={self.l2} must be at least 0: it is the weight of |w|^2 / 2.")

    @abstractmethod
    def _check_kind(self, loss: Loss) -> None: ...

    @abstractmethod
    def _learn_targets(self, y: Array, y_public: Array | None) -> None:
        """Fix what must be known of the targets before any row is looked at: the classes."""

    @abstractmethod
    def _targets(self, y: Array, what: str) -> Array: ...

    @abstractmethod
    def _store(self, weights: Array, intercept: float) -> None:
        """Keep the weights in the shape that scikit-learn gives them."""

    def _rows(self, X: Any, y: Any, X_public: Any, y_public: Any) -> tuple[Rows, Rows | None]:
        """Both tables as tensors; of the private one only the schema is checked."""
        own, targets = features(X, "X"), column(y, "y", self)
        if len(own) != len(targets):
            raise InvalidArgument("X and y have different numbers of rows: give one target per row.")
        validate_data(self, X, reset=True, skip_check_array=True)
        others, public_targets = self._public(X_public, y_public)
        if others is not None:
            check_apart(X, X_public)
        self._learn_targets(targets, public_targets)
        private = self._as_rows(own, self._targets(targets, "y"))
        if others is None or public_targets is None:
            return private, None
        return private, self._as_rows(others, self._targets(public_targets, "y_public"))

    def _public(self, X: Any, y: Any) -> tuple[Array | None, Array | None]:
        if X is None and y is None:
            return None, None
        if X is None or y is None:
            raise InvalidArgument("X_public and y_public go together: give both, or neither.")
        rows: Array = check_array(X, accept_sparse="csr", dtype=np.float64, input_name="X_public")
        if rows.shape[1] != self.n_features_in_:
            raise InvalidArgument(
                f"X_public has {rows.shape[1]} columns and X has {self.n_features_in_}: give the same ones."
            )
        validate_data(self, X, reset=False, skip_check_array=True)
        targets = column(y, "y_public", self)
        if len(targets) != rows.shape[0]:
            raise InvalidArgument("X_public and y_public have different numbers of rows: give one target per row.")
        return features(rows, "X_public"), targets

    def _as_rows(self, X: Array, y: Array) -> Rows:
        return Rows(unit_rows(X, constant=self.fit_intercept), tensor(y))

    def _keep(self, learned: Learned) -> None:
        w = learned.w.detach().cpu().numpy()
        if self.fit_intercept:  # the constant column was (x, 1) / sqrt(2)
            self._store(w[:-1] * math.sqrt(0.5), float(w[-1]) * math.sqrt(0.5))
        else:
            self._store(w.copy(), 0.0)
        self.n_iter_ = learned.n_iter
        self.epsilon_ = learned.epsilon

    def _score(self, X: Any) -> Array:
        check_is_fitted(self, "coef_")  # which a fit that failed has not
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        rows = unit_rows(features(X, "X"), constant=False).numpy()
        scores: Array = rows @ np.ravel(self.coef_) + np.ravel(self.intercept_)[0]
        return scores

    def __sklearn_clone__(self) -> Self:
        # A ledger is where things are written down: copies of an estimator share it.
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        same: dict[str, Any] = {k: v if isinstance(v, Ledger) else clone(v, safe=False) for k, v in values}
        return type(self)(**same)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinear(LinearModel):
    """A linear model of private rows.

    Args:
        epsilon, delta: what this fit may cost. A new ledger account gets them as its budget.
        loss: a loss of `sfumato.erm.losses`; None is logistic for classifiers and square for regressors.
        l2: weight of |w|^2 / 2, which is added after the noise.
        fit_intercept: adds a constant column, inside the bound on rows: rows become (x, 1) / sqrt(2).
        adjacency: "replace-one", where the number of rows is public, or "add-remove", which needs `size`.
        size: the declared number of rows; under add-remove it may be approximate.
        ledger: a path, a database URL or a `Ledger` that further fits on the same rows are charged to; None forgets.
        name: the declared name of the private table in that ledger.
        not_private_seed: makes noise and sampling repeatable, and the statement say NOT PRIVATE: for tests only.

    A private row that is not finite, or whose label is not one of the classes, contributes nothing, and nobody is told.
    """

    epsilon: float = 1.0
    delta: float = 1e-6
    adjacency: str = "replace-one"
    size: int | None = None
    ledger: Ledger | str | os.PathLike[str] | None = None
    name: str = "table"
    not_private_seed: int | None = None

    _merges_public: ClassVar[bool] = False
    """Whether public rows are put behind the door together with the private ones, as paper 001's baselines do."""

    def fit(self, X: Any, y: Any, X_public: Any = None, y_public: Any = None) -> Self:
        """Learn from private rows (X, y), with the help of public ones where there are any.

        Sets `coef_`, `intercept_`, `n_iter_`, `epsilon_` (what this fit costs) and `ledger_`, the privacy statement of
        the account, which counts earlier fits, too.
        """
        self._check_parameters()
        loss = self._loss()
        rows, public = self._rows(X, y, X_public, y_public)
        if not len(rows.y) and Adjacency(self.adjacency) is Adjacency.REPLACE_ONE:
            raise InvalidArgument("X has 0 sample(s), and there is nothing to learn from: give some rows.")
        if self._merges_public and public is not None:
            rows = Rows(torch.cat([rows.X, public.X]), torch.cat([rows.y, public.y]))
        M = None if public is None else self._coordinates(public)
        if M is not None and public is not None:  # row by row, by a public map: free of charge
            rows, public = Rows(moved(rows.X, M), rows.y), Rows(moved(public.X, M), public.y)
        with self._door(rows, public) as private:
            try:
                learned = self._learn(private, public, loss, rows.X.shape[1])
            except BudgetExceeded as reason:
                raise BudgetExceeded(
                    f"The account {self.name!r} has no room for a fit at epsilon={self.epsilon}, delta={self.delta}: "
                    "lower epsilon, or make the account with a larger budget before its first fit, "
                    f"Ledger(...).account({self.name!r}, unit='example', adjacency={self.adjacency!r}, budget=...)."
                ) from reason
            self.ledger_ = private.statement()
        self._keep(learned if M is None else learned._replace(w=M.T @ learned.w))
        return self

    def _coordinates(self, public: Rows) -> Tensor | None:
        """A matrix, made of public rows, by which all rows are multiplied before the method sees any; None for none."""
        return None

    @abstractmethod
    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        """The method: weights of `width` entries, from answers of `private` and from public rows."""

    def _filter(self, size: int, public: Rows | None) -> Filter | None:
        """The filter of a new account over `size` rows; None for the ledger's own choice."""
        return None

    def _check_parameters(self) -> None:
        super()._check_parameters()
        Budget(self.epsilon, self.delta)
        if self.adjacency not in tuple(Adjacency):
            raise InvalidArgument(f"adjacency={self.adjacency!r} must be 'add-remove' or 'replace-one'.")

    @contextmanager
    def _door(self, rows: Rows, public: Rows | None) -> Iterator[Private]:
        """The rows behind the door, under the declared name."""
        ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
        merged = 0 if public is None or not self._merges_public else len(public.y)
        size = None if self.size is None else self.size + merged
        try:
            known = self.name in ledger.account_names()
            private = Private(
                tuple(rows),
                name=self.name,
                size=size,
                ledger=ledger,
                budget=None if known else Budget(self.epsilon, self.delta),
                filter=None if known else self._filter(size or len(rows.y), public),
                adjacency=self.adjacency,
                seed=None if self.not_private_seed is None else NotPrivateSeed(self.not_private_seed),
            )
            if text := self._read_off_private_rows():
                private.account.stamp("schema", text)
            yield private
        finally:
            if ledger is not self.ledger:
                ledger.close()

    def _read_off_private_rows(self) -> str | None:
        """What was taken to be public although it was read off private rows, for the statement."""
        return None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class Classifier(ClassifierMixin, LinearModel):  # type: ignore[misc]
    """Two classes. `classes` declares the labels.

    With classes=None they are those of y_public where it has two, else they are read off y: then the set of labels
    counts as public, and the statement says so.
    """

    classes: Any = None
    _default_loss = Logistic()

    def _check_kind(self, loss: Loss) -> None:
        if not loss.classification:
            raise InvalidArgument(f"loss={loss} is for regression: use Logistic, Hinge, HuberisedHinge or Square.")

    def _learn_targets(self, y: Array, y_public: Array | None) -> None:
        self._labels_from = "classes"
        labels = None if self.classes is None else np.unique(np.asarray(self.classes))
        if labels is None and y_public is not None:
            labels, self._labels_from = _labels(y_public), "y_public"
        if labels is None or (len(labels) < 2 and self.classes is None):
            labels, self._labels_from = _labels(y), "y"
        if len(labels) > 2:
            raise InvalidArgument(
                "Only binary classification is supported. The type of the target is multiclass: wrap the estimator in "
                "sklearn.multiclass.OneVsRestClassifier, whose K fits, one per class, are each charged, and give the "
                "ledger's account a budget of K * epsilon."
            )
        if len(labels) < 2:
            raise InvalidArgument(
                f"{self._labels_from} has only one class, and a classifier needs two: declare them, classes=(0, 1)."
            )
        words = _are_words(labels, any)
        # Of all labels, not of one: a single strange label is nobody's, and is not announced.
        if words != _are_words(y, any if words else all):
            # Not the types themselves: that of words says how long the longest is.
            one, other = ("numbers", "words") if words else ("words", "numbers")
            raise InvalidArgument(f"y has {one} as labels and {self._labels_from} has {other}: use one type.")
        if y_public is not None and len(strange := np.unique(y_public[~np.isin(y_public, labels)])):
            raise InvalidArgument(
                f"y_public has the label {strange.tolist()[0]!r}, which is not in classes={labels.tolist()}: correct "
                "the one or the other."
            )
        self.classes_ = labels

    def _targets(self, y: Array, what: str) -> Array:
        return signs(y, self.classes_)

    def _read_off_private_rows(self) -> str | None:
        if self._labels_from == "y":
            return "The two labels were read off the private rows: they count as public."
        return None

    def _store(self, weights: Array, intercept: float) -> None:
        self.coef_, self.intercept_ = weights[None, :], np.array([intercept])

    def decision_function(self, X: Any) -> Array:
        """The score of each row, positive for the second class."""
        return self._score(X)

    def predict(self, X: Any) -> Array:
        """The class of each row."""
        second = self._score(X) > 0
        predicted: Array = self.classes_[second.astype(int)]
        return predicted

    @available_if(lambda self: isinstance(self._default_loss if self.loss is None else self.loss, Logistic))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """The probability of each class; for the logistic loss only."""
        positive = 1 / (1 + np.exp(-self._score(X)))
        return np.column_stack([1 - positive, positive])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.classifier_tags.poor_score = self._poor_score
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class Regressor(RegressorMixin, LinearModel):  # type: ignore[misc]
    """One number per row. `target_range`, the declared (least, largest) target, is mapped to [-1, 1] for the method.

    Without it targets are taken as they are, and should lie in [-1, 1] or so: what a row contributes is bounded.
    """

    target_range: tuple[float, float] | None = None
    _default_loss = Square()

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._middle_and_half()

    def _middle_and_half(self) -> tuple[float, float]:
        low, high = (-1.0, 1.0) if self.target_range is None else self.target_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InvalidArgument(
                f"target_range={self.target_range} must be the least and the largest target, (0, 100)."
            )
        return (low + high) / 2, (high - low) / 2

    def _check_kind(self, loss: Loss) -> None:
        if not loss.regression:
            raise InvalidArgument(f"loss={loss} is for classification: use Square or Huber.")

    def _learn_targets(self, y: Array, y_public: Array | None) -> None:
        if y_public is None:
            return
        middle, half = self._middle_and_half()
        largest = float(np.abs(numbers(y_public, "y_public") - middle).max()) / half
        if largest > _FAR:
            warnings.warn(
                f"y_public lies up to {largest:.3g} times too far out: declare target_range=(least, largest).",
                UserWarning,
                stacklevel=4,
            )

    def _targets(self, y: Array, what: str) -> Array:
        middle, half = self._middle_and_half()
        with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell of a private target
            return (numbers(y, what) - middle) / half

    def _store(self, weights: Array, intercept: float) -> None:
        middle, half = self._middle_and_half()
        self.coef_, self.intercept_ = weights * half, intercept * half + middle

    def predict(self, X: Any) -> Array:
        """The score of each row."""
        return self._score(X)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = self._poor_score
        return tags


def _are_words(labels: Array, of: Callable[[Iterable[bool]], bool]) -> bool:
    """Whether any or all of them are."""
    if labels.dtype.kind != "O":
        return labels.dtype.kind in "US"
    return of(isinstance(label, str | bytes) for label in labels)


def _labels(y: Array) -> Array:
    if y.dtype.kind == "O":  # of a list; what the labels are is public here, and numpy may find one type for them
        y = np.asarray([label for label in y if label == label])  # without NaN
    known = y[np.isfinite(y)] if y.dtype.kind == "f" else y
    if len(known):
        check_classification_targets(known)
    labels: Array = np.unique(known)
    return labels
