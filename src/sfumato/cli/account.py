"""`sfumato account`: what a training costs, the noise that a budget needs, or the steps that it allows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sfumato.cli.facts import tell
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from sfumato.data.samplers import Sampler

Sampling = Literal["poisson", "fixed", "full"]
AdjacencyName = Literal["add-remove", "replace-one"]


def account(
    dataset_size: Annotated[int, typer.Option(min=1, help="The declared number of privacy units.")],
    delta: Annotated[float, typer.Option(help="The delta of the guarantee, below 1 / dataset size.")],
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="The expected (poisson) or exact (fixed) batch; not for full.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The number of training steps.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget: find the least noise that keeps it.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Standard deviation / clip norm of the noise on the sum: find epsilon.")
    ] = None,
    sampling: Annotated[Sampling, typer.Option(help="How the units of a step are drawn.")] = "poisson",
    adjacency: Annotated[AdjacencyName, typer.Option(help="Which datasets are neighbours.")] = "add-remove",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Convert between epsilon, noise and steps, without any data.

    Give --epsilon for the noise, --noise-multiplier for epsilon, or both without --steps for the most steps.
    """
    _check(steps, delta, epsilon, noise_multiplier)
    if delta >= 1 / dataset_size:
        typer.echo(
            f"Warning: delta={delta:g} is not below 1/{dataset_size}: it would allow publishing someone's row.",
            err=True,
        )
    sampler = make_sampler(sampling, dataset_size, batch_size)
    try:
        facts = _account(sampler, steps, delta, epsilon, noise_multiplier, adjacency) | {"sampling": sampling}
    except (ArithmeticError, MemoryError):
        raise InvalidArgument(
            f"--noise-multiplier={noise_multiplier}, --epsilon={epsilon} and --steps={steps} are too extreme to be "
            "computed with: choose a noise multiplier between 0.01 and 10000 and fewer steps."
        ) from None
    tell({key: facts[key] for key in _KEYS}, as_json=as_json)


_KEYS = ("epsilon", "delta", "noise_multiplier", "steps", "sampling", "adjacency", "accountant")


def make_sampler(sampling: str, size: int, batch_size: int | None) -> Sampler:
    """The sampler of that name, or one sentence about what is missing."""
    from sfumato.data.samplers import FixedSize, FullBatch, Poisson

    if sampling == "full":
        if batch_size not in (None, size):
            raise InvalidArgument(f"batch_size={batch_size} contradicts full sampling of {size} units: leave it out.")
        return FullBatch(size=size)
    if batch_size is None:
        raise InvalidArgument(f"batch_size is missing: {sampling} sampling needs it (only full sampling does not).")
    return (Poisson if sampling == "poisson" else FixedSize)(size=size, batch_size=batch_size)


def _check(steps: int | None, delta: float, epsilon: float | None, noise: float | None) -> None:
    if epsilon is None and noise is None:
        raise InvalidArgument("Give --epsilon (to find the noise) or --noise-multiplier (to find epsilon).")
    if epsilon is not None and noise is not None and steps is not None:
        raise InvalidArgument("--epsilon, --noise-multiplier and --steps determine each other: leave one of them out.")
    if (epsilon is None or noise is None) and steps is None:
        raise InvalidArgument("--steps is missing: only --epsilon and --noise-multiplier together determine it.")
    if not 0 < delta < 1:
        raise InvalidArgument(f"--delta={delta} must lie strictly between 0 and 1: choose less than 1 / dataset size.")
    for name, value in (("--epsilon", epsilon), ("--noise-multiplier", noise)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidArgument(f"{name}={value} must be a positive, finite number.")


def _account(
    sampler: Sampler, steps: int | None, delta: float, epsilon: float | None, noise: float | None, adjacency: str
) -> dict[str, Any]:
    from sfumato.privacy import accounting, calibration
    from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

    relation = Adjacency(adjacency)
    if noise is None:
        assert epsilon is not None
        assert steps is not None
        noise = calibration.noise_multiplier(
            epsilon=epsilon, delta=delta, sampler=sampler, steps=steps, adjacency=relation
        )
    elif steps is None:
        assert epsilon is not None
        steps = calibration.steps(
            epsilon=epsilon, delta=delta, noise_multiplier=noise, sampler=sampler, adjacency=relation
        )
    training = Mechanism(question="gradients", noise=Gaussian(noise), sampler=sampler, times=steps)
    cost = accounting.epsilon([training], delta=delta, adjacency=relation)
    if not math.isfinite(cost.epsilon):
        raise InvalidArgument(f"--noise-multiplier={noise} is so small that epsilon is infinite: raise it.")
    return {
        "epsilon": cost.epsilon,
        "delta": delta,
        "noise_multiplier": noise,
        "steps": steps,
        "adjacency": adjacency,
        "accountant": cost.accountant,
    }
