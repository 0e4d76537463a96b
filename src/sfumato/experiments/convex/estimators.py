"""The estimator that settings name: any of `sfumato.erm`, with any of its parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sfumato import erm
from sfumato.erm.losses import Loss
from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.settings import Settings
from sfumato.experiments.reading import suggestion


def make_estimator(settings: Settings, *, classification: bool, size: int) -> Any:
    """Not fitted yet; refused, in one sentence, where a name or a parameter does not exist.

    `size` is the number of private rows, which batches are a share of, and which is declared where the adjacency hides
    it.

    >>> from sfumato.experiments.convex.spec import find_convex
    >>> make_estimator(find_convex("001-table2").cells[0].settings, classification=True, size=9).epsilon
    0.1
    """
    kind = "Classifier" if classification else "Regressor"
    cls = _named(f"{settings.estimator}{kind}", kind, "estimator")
    given: dict[str, Any] = {"loss": make_loss(settings), **settings.options}
    if settings.private:
        given |= {"epsilon": settings.epsilon, "delta": settings.delta}
    if settings.batch is not None:
        given["batch_size"] = max(1, round(settings.batch * size))
    if given.get("adjacency") == "add-remove":
        given.setdefault("size", size)
    if classification:
        given["classes"] = (-1, 1)
    known = [field.name for field in fields(cls)]
    for name in given:
        if name not in known:
            raise InvalidArgument(f"options: {cls.__name__} has no parameter {name!r}{suggestion(name, known)}")
    return cls(**given)


def make_loss(settings: Settings) -> Loss:
    cls = _named(settings.loss, "", "loss")
    if not issubclass(cls, Loss):
        raise InvalidArgument(f"loss={settings.loss!r} is no loss of sfumato.erm, such as Hinge.")
    known = [field.name for field in fields(cls)]
    for name in settings.loss_options:
        if name not in known:
            raise InvalidArgument(f"loss_options: {settings.loss} has no parameter {name!r}: it has {known}.")
    return cls(**settings.loss_options)


def _named(name: str, kind: str, what: str) -> type[Any]:
    known = [each for each in erm.__all__ if each.endswith(kind)]
    if name not in known:
        shown = [each.removesuffix(kind) for each in known]
        raise InvalidArgument(
            f"{what}={name.removesuffix(kind)!r} is not one of sfumato.erm for this task"
            f"{suggestion(name.removesuffix(kind), shown)}"
        )
    found: type[Any] = getattr(erm, name)
    return found


def parameters(estimator: Any) -> dict[str, Any]:
    """All of them, also those left at their defaults, as plain text and numbers."""
    found = {field.name: getattr(estimator, field.name) for field in fields(estimator)}
    plain = {name: v if isinstance(v, str | int | float | None) else str(v) for name, v in found.items()}
    return {"kind": type(estimator).__name__, **plain}
