"""Everything that determines one cell of a convex experiment: two cells with equal settings share their repeats."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.experiments.reading import read, suggestion

TABLES = ("adult-a", "ipums-br", "ipums-us", "magic04", "mini-boo-ne", "skin", "cadata", "stability")
SYNTHETIC = ("gaussian-classes", "two-densities")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which rows there are, and how they are scaled. Repeat r has the same rows for all methods."""

    name: str
    # Of a table: shares of its rows, and how columns become [lower_end, 1] before rows get norm 1.
    train: float = 0.8
    public: float = 0.001  # of the training rows
    ranges: str = "declared"  # or "public": those of the public rows, widened by `margin` on both sides
    margin: float = 0.0
    lower_end: float = -1.0  # 0 leaves the zeros of 0/1 columns where they are
    # Of a synthetic problem: numbers of rows, and columns.
    private_rows: int | None = None
    public_rows: int | None = None
    test_rows: int | None = None
    dimension: int | None = None
    separation: float | None = None  # of gaussian-classes: the length of half the difference of the two means


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One method on one problem; `read_settings` of its `to_json()` gives an equal one."""

    data: Data
    estimator: str  # "PPSGD" is sfumato.erm.PPSGDClassifier or PPSGDRegressor, whichever the data needs
    loss: str  # a loss of sfumato.erm, by its name
    loss_options: dict = field(default_factory=dict)  # type: ignore[type-arg]
    private: bool = True  # False: the estimator has no epsilon and no delta
    epsilon: float | None = None
    delta: float | None = None
    batch: float | None = None  # the estimator's batch_size, as a share of the private rows
    options: dict = field(default_factory=dict)  # type: ignore[type-arg]  # all other parameters of the estimator

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def read_settings(raw: Mapping[str, Any], where: str) -> Settings:
    """Strictly, and without what plays no part: the budget of a method that has none."""
    if raw.get("private") is False:
        raw = {key: value for key, value in raw.items() if key not in ("epsilon", "delta")}
    settings: Settings = read(Settings, {k: v for k, v in raw.items() if v is not None}, where)
    data = settings.data
    if data.name not in (*TABLES, *SYNTHETIC):
        raise InvalidArgument(
            f"{where}, data, name={data.name!r} is not known{suggestion(data.name, TABLES + SYNTHETIC)}"
        )
    if data.ranges not in ("declared", "public"):
        raise InvalidArgument(f"{where}, data, ranges={data.ranges!r} must be 'declared' or 'public'.")
    for name in ("train", "public"):
        if not 0 < getattr(data, name) < 1:
            raise InvalidArgument(f"{where}, data, {name}={getattr(data, name)} must be a share between 0 and 1.")
    if not -1 <= data.lower_end < 1:
        raise InvalidArgument(f"{where}, data, lower_end={data.lower_end} must be at least -1 and below 1.")
    if data.name in SYNTHETIC:
        for name in ("private_rows", "public_rows", "test_rows", "dimension"):
            if not (getattr(data, name) or 0) >= 1:
                raise InvalidArgument(f"{where}, data, {name}={getattr(data, name)} must be at least 1.")
    if settings.batch is not None and not 0 < settings.batch <= 1:
        raise InvalidArgument(f"{where}, batch={settings.batch} must be a share of the rows, above 0 and at most 1.")
    if settings.private:
        for name in ("epsilon", "delta"):
            value = getattr(settings, name)
            if value is None or not (math.isfinite(value) and value > 0):
                raise InvalidArgument(f"{where}, {name}={value} must be positive: give it, or say private = false.")
    return settings
