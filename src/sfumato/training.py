"""The ready-made loop: plan, ask, step, evaluate on public data, checkpoint, and a `Run` at the end.

It is the four-line loop of the README with progress, checkpoints and resuming around it; it adds no privacy logic.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.checkpoint import load_checkpoint, save_checkpoint
from sfumato.data.samplers import Sampler
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy import calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger_plan import Plan
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import GradientMean
from sfumato.run import Run

Params = Mapping[str, Tensor]
Method = Callable[[Params, Public | None, Callable[..., Any]], Gradient]
Metric = Callable[[nn.Module, Any], Tensor]


@runtime_checkable
class StatefulMethod(Protocol):
    """An algorithm that carries state from step to step; the state must be public and survives a resume."""

    def init(self, params: Params) -> Any: ...

    def step(
        self, state: Any, params: Params, public: Public | None, ask: Callable[..., Any]
    ) -> tuple[Gradient, Any]: ...


def accuracy(module: nn.Module, batch: Any) -> Tensor:
    """Per-example hits of a batch `(inputs, labels)`."""
    inputs, labels = batch
    hits: Tensor = module(inputs).argmax(1) == labels
    return hits.double()


def train(
    model: nn.Module,
    *,
    private: Private,
    public: Public | None = None,
    test: Public | None = None,
    method: Method | StatefulMethod = dp_sgd,
    budget: Budget | None = None,
    steps: int,
    sampler: Sampler | None = None,
    batch_size: int | None = None,
    noise: float | None = None,
    reserve: int = 0,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: float = 30.0,
    name: str = "training",
    progress: bool = True,
) -> Run:
    """Train `model` privately and return a `Run`.

    Args:
        model: the module of `private.objective`; its weights are updated in place.
        budget: what this training may cost; by default all that the ledger allows. The noise is calibrated to it,
            unless `noise` (standard deviation / clip norm) is given.
        batch_size: the expected batch of Poisson sampling; or give a `sampler`.
        reserve: steps that are reserved beyond `steps`, to do again what a crash loses. Without a reserve a crash
            shortens the training. Either way the Run says how many steps were lost.
        optimizer: makes a torch optimiser of the parameters; SGD with learning rate 0.5 by default.
        metrics: functions (module, batch) -> one value per example, measured on `public` and `test`; accuracy by
            default for classifiers.
        checkpoint: a file; if it exists the training is resumed, with its state exact and its noise fresh.
        checkpoint_every: seconds between checkpoints.
    """
    objective = private.objective
    if objective is None or objective.module is not model:
        raise InvalidArgument("model must be the module of private.objective: make both from one Objective.")
    if steps < 1:
        raise InvalidArgument(f"steps={steps} must be at least 1.")
    if reserve < 0:
        raise InvalidArgument(f"reserve={reserve} must not be negative.")
    if (sampler is None) == (batch_size is None):
        raise InvalidArgument("Give either batch_size or sampler: how many units take part in a step.")
    sampler = sampler or private.poisson(float(batch_size or 0))
    stateful: StatefulMethod = method if isinstance(method, StatefulMethod) else _Stateless(method)
    trained = [p for p in model.parameters() if p.requires_grad]
    updater = torch.optim.SGD(trained, lr=0.5) if optimizer is None else optimizer(trained)
    measures = metrics if metrics is not None else ({"accuracy": accuracy} if objective.loss is cross_entropy else {})

    path = None if checkpoint is None else Path(checkpoint)
    saved = None if path is None else load_checkpoint(path)
    state: Any = stateful.init(objective.parameters())
    history: list[dict[str, float]] = []
    done, seconds = 0, 0.0
    if saved is not None:
        model.load_state_dict(saved["model"])
        updater.load_state_dict(saved["optimizer"])
        state, done, history, seconds = saved["state"], saved["step"], saved["history"], saved["seconds"]
        if public is not None and saved["public"] is not None:
            public.random_state = saved["public"]
    plan = _plan_or_resume(private, sampler, steps + reserve, budget, noise, name, path, done)
    lost = (plan.lost or 0) if plan is not None else 0
    target = min(steps, done + (plan.remaining() if plan is not None else 0))

    def keep(step: int) -> None:
        if path is not None:
            save_checkpoint(
                path,
                {
                    "model": model.state_dict(),
                    "optimizer": updater.state_dict(),
                    "state": state,
                    "step": step,
                    "history": history,
                    "seconds": seconds + time.perf_counter() - start,
                    "public": None if public is None else public.random_state,
                },
            )

    evaluate_every = evaluate_every or max(1, steps // 10)
    start = last_saved = time.perf_counter()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"),
        disable=not progress,
    )
    with bar, plan or nullcontext():
        task = bar.add_task(name, total=target, completed=done, facts="")
        for step in range(done + 1, target + 1):
            assert plan is not None
            update, state = stateful.step(state, objective.parameters(), public, private.ask)
            update.write_to(model)
            updater.step()
            if step % evaluate_every == 0 or step == target:
                measured = _measure(objective, public, test, measures)
                history.append({"step": step, "epsilon": plan.epsilon_after(step + lost), **measured})
            if progress:
                rate = (step - done) / (time.perf_counter() - start)
                bar.update(task, completed=step, facts=_facts(history, plan.epsilon_after(step + lost), rate))
            if time.perf_counter() - last_saved >= checkpoint_every:
                keep(step)
                last_saved = time.perf_counter()
        keep(target)
    statement = private.statement()
    used = statement.to_json()["mechanisms"][-1] if plan is None else plan.mechanisms[0].to_json()
    return Run(
        weights={n: t.detach().clone() for n, t in model.state_dict().items()},
        config={
            "name": name,
            "steps": steps,
            "reserve": reserve,
            "noise_multiplier": used["noise"]["scale"],
            "sampler": used["sampler"],
            "method": _name_of(method),
        },
        history=history,
        statement=statement.to_json(),
        statement_text=statement.to_text(),
        steps_taken=target,
        steps_lost=lost,
        steps_short=steps - target,
        seconds=seconds + time.perf_counter() - start,
    )


class _Stateless:
    """A plain function as an algorithm without state."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def init(self, params: Params) -> None:
        return None

    def step(self, state: Any, params: Params, public: Public | None, ask: Callable[..., Any]) -> tuple[Gradient, Any]:
        return self._method(params, public, ask), state


def _name_of(method: Any) -> str:
    function = getattr(method, "func", method)  # of a functools.partial
    return str(getattr(function, "__name__", type(method).__name__))


def _plan_or_resume(
    private: Private,
    sampler: Sampler,
    times: int,
    budget: Budget | None,
    noise: float | None,
    name: str,
    path: Path | None,
    done: int,
) -> Plan | None:
    """Resume the plan of an interrupted training, or make it; None if it has already ended."""
    key = None if path is None else f"{name}:{path.resolve()}"
    open_ = None if key is None else private.account.is_open(key)
    if key is not None and open_:
        return private.resume(key, seen=done)
    if open_ is False:
        return None
    if done:
        raise InvalidArgument(
            f"checkpoint={str(path)!r} is {done} steps into a training that this ledger does not know: use the ledger "
            "it began with, or move the checkpoint away."
        )
    if noise is None:
        budget = budget or private.account.budget
        noise = calibration.noise_multiplier(
            epsilon=budget.epsilon,
            delta=budget.delta,
            sampler=sampler,
            steps=times,
            adjacency=private.adjacency,
        )
    return private.plan(Planned(GradientMean, noise, sampler, times), resume_key=key)


@torch.no_grad()
def _measure(
    objective: Objective, public: Public | None, test: Public | None, measures: Mapping[str, Metric]
) -> dict[str, float]:
    """Loss and metrics on public and test data only; private rows are never measured here."""
    result: dict[str, float] = {}
    params = objective.parameters()
    was_training = objective.module.training
    objective.module.eval()
    for prefix, data in (("public", public), ("test", test)):
        if data is None:
            continue
        for label, measure in {"loss": objective.loss, **measures}.items():
            values = data.losses(params, objective=Objective(objective.module, measure))
            result[f"{prefix}_{label}"] = float(values.mean())
    objective.module.train(was_training)
    return result


def _facts(history: list[dict[str, float]], epsilon: float, rate: float) -> str:
    last = history[-1] if history else {}
    shown = [f"{k.replace('_', ' ')} {v:.3f}" for k, v in last.items() if k not in ("step", "epsilon")]
    return " · ".join([f"ε {epsilon:.2f}", f"{rate:.1f} steps/s", *shown])
