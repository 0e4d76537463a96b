"""The ready-made loop: plan, ask, step, evaluate on public data, checkpoint, and a `Run` at the end.

It is the four-line loop of the README with progress, checkpoints and resuming around it; it adds no privacy logic.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.averages import Ema
from sfumato.checkpoint import check_checkpoint, held_checkpoint, load_checkpoint, save_checkpoint
from sfumato.data.samplers import Sampler
from sfumato.errors import InvalidArgument, LedgerError, SfumatoError
from sfumato.gradients import Gradient
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy import calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.statement import Asked
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
    ema: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: float = 30.0,
    name: str = "training",
    progress: bool = True,
) -> Run:
    """Train `model` privately and return a `Run`.

    Args:
        model: the module of `private.objective`; its weights are updated in place.
        budget: what this training may cost; by default all that the ledger allows. The noise is calibrated to it,
            unless `noise` (standard deviation / clip norm) is given instead.
        batch_size: the expected batch of Poisson sampling; or give a `sampler`.
        reserve: steps that are reserved beyond `steps`, to do again what a crash loses. Without a reserve a crash
            shortens the training. Either way the Run says how many steps were lost.
        optimizer: makes a torch optimiser of the parameters; SGD with learning rate 0.5 by default.
        metrics: functions (module, batch) -> one value per example, measured on `public` and `test`; accuracy by
            default for classifiers.
        ema: also keep an exponential moving average of the weights, measured beside them and returned as `Run.ema`;
            it costs no privacy and smooths the noise of the last steps.
        checkpoint: a file; if it exists the training is resumed, with its state exact and its noise fresh. Ctrl-C and
            errors leave it at the last whole step, so that nothing that was paid for is lost.
        checkpoint_every: seconds between checkpoints.
    """
    objective = private.objective
    if objective is None or objective.module is not model:
        raise InvalidArgument("model must be the module of private.objective: make both from one Objective.")
    if not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(f"steps={steps} must be a whole number of at least 1.")
    if not isinstance(reserve, int) or reserve < 0:
        raise InvalidArgument(f"reserve={reserve} must be a whole number, and not negative.")
    if (sampler is None) == (batch_size is None):
        raise InvalidArgument("Give either batch_size or sampler: how many units take part in a step.")
    if budget is not None and noise is not None:
        raise InvalidArgument("Give either budget or noise: the noise is what the budget is turned into.")
    if budget is not None and budget.delta != private.account.budget.delta:
        raise InvalidArgument(
            f"budget has delta={budget.delta:g} and the ledger's account has delta={private.account.budget.delta:g}: "
            "give the same, since one dataset has one delta."
        )
    sampler = sampler or private.poisson(float(batch_size or 0))
    stateful: StatefulMethod = method if isinstance(method, StatefulMethod) else _Stateless(method)
    trained = [p for p in model.parameters() if p.requires_grad]
    updater = torch.optim.SGD(trained, lr=0.5) if optimizer is None else optimizer(trained)
    measures = metrics if metrics is not None else ({"accuracy": accuracy} if objective.loss is cross_entropy else {})

    now = _Standing(
        model=model,
        optimizer=updater,
        public=public,
        state=stateful.init(objective.parameters()),
        answers=0,
        average=Ema(objective.parameters()) if ema else None,
    )
    path = None if checkpoint is None else Path(checkpoint)
    key = None if path is None else _resume_key(name, path)
    with held_checkpoint(path):
        known = None if key is None else _known_plan(private, key)
        if path is not None:
            saved = load_checkpoint(path)
            _check_continues(path, saved, known, sampler, noise)
            check_checkpoint(path, now.state)
            if saved is not None:
                now.restore(path, saved)

        plan: Plan | None = None
        if known is None:
            _measure(objective, public, test, measures)  # what fails here would fail later, after answers were paid for
            noise = _calibrated(private, sampler, steps + reserve, budget) if noise is None else noise
            plan = private.plan(Planned(GradientMean, noise, sampler, steps + reserve), resume_key=key)
        elif known.open and key is not None:
            plan = private.resume(key, seen=now.answers)
        counted = plan.taken if plan is not None else known.answers if known is not None else 0
        lost = counted - now.answers
        target = now.step if plan is None else min(steps, now.step + plan.remaining())

        evaluate_every = evaluate_every or max(1, steps // 10)
        begun, start = now.step, time.perf_counter()
        seconds, last_saved = now.seconds, start

        def keep() -> None:
            now.seconds = seconds + time.perf_counter() - start
            if path is not None:
                save_checkpoint(path, now.to_save())

        def evaluate(epsilon: float) -> None:
            measured = _measure(objective, public, test, measures)
            if now.average is not None:
                measured |= _measure(objective, public, test, measures, now.average.weights, "ema_")
            now.history.append({"step": now.step, "epsilon": epsilon, **measured})

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            disable=not progress,
        )
        if plan is not None:
            with _Patience() as patience, bar, plan:
                task = bar.add_task(name, total=target, completed=now.step, facts="")
                try:
                    while now.step < target:
                        update, state = stateful.step(now.state, objective.parameters(), public, private.ask)
                        now.advance(update, state, answers=plan.taken - lost)
                        if patience.ended:
                            raise KeyboardInterrupt
                        if now.step % evaluate_every == 0 or now.step == target:
                            evaluate(plan.epsilon_after(plan.taken))
                        if progress:
                            rate = (now.step - begun) / (time.perf_counter() - start)
                            facts = _facts(now.history, plan.epsilon_after(plan.taken), rate)
                            bar.update(task, completed=now.step, facts=facts)
                        first = now.step == begun + 1  # else a kill in the first seconds would lose everything
                        if first or time.perf_counter() - last_saved >= checkpoint_every:
                            keep()
                            last_saved = time.perf_counter()
                    if not now.history or now.history[-1]["step"] != target:
                        evaluate(plan.epsilon_after(plan.taken))  # a resumed training that had nothing left to do
                    keep()
                except LedgerError:
                    raise  # another process may have taken the plan over: then the checkpoint is that one's to write
                except BaseException as error:
                    if plan.taken == 0 and key is None:
                        plan.close()  # nothing was answered and nobody can resume it: give everything back
                    # The last whole step is kept before the plan pauses, so that nothing that was paid for is lost.
                    if now.whole and now.step > begun:
                        try:
                            keep()
                        except SfumatoError as also:
                            error.add_note(str(also))
                    raise
    statement = private.statement()
    mechanism = plan.mechanisms[0] if plan is not None else known.mechanism if known is not None else None
    assert mechanism is not None
    used = mechanism.to_json()
    return Run(
        weights={n: t.detach().clone() for n, t in model.state_dict().items()},
        config={
            "name": name,
            "steps": steps,
            "reserve": reserve,
            "noise_multiplier": used["noise"]["scale"],
            "sampler": used["sampler"],
            "method": _name_of(method),
            "method_options": _plain(getattr(method, "keywords", {})),
            "optimizer": type(updater).__name__,
            "optimizer_options": _plain(updater.defaults),
            "autocast": None if objective.autocast is None else str(objective.autocast),
            "ema": ema,
        },
        history=now.history,
        ema=None if now.average is None else {n: t.clone() for n, t in now.average.weights.items()},
        statement=statement.to_json(),
        statement_text=statement.to_text(),
        steps_taken=now.step,
        steps_lost=lost,
        steps_short=max(0, steps - now.step),
        seconds=now.seconds,
    )


@dataclass(kw_only=True)
class _Standing:
    """Where a training stands after its last whole step: what a checkpoint holds, and nothing else does."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    public: Public | None
    state: Any  # the method's
    step: int = 0
    answers: int  # of the plan, that led here
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    average: Ema | None = None
    whole: bool = True  # False while an update is half done
    drawn: Any = None  # of the public batches: a step that fails half-way may have drawn more

    def __post_init__(self) -> None:
        self.drawn = None if self.public is None else self.public.random_state

    def advance(self, update: Gradient, state: Any, *, answers: int) -> None:
        update.write_to(self.model)
        self.whole = False
        self.optimizer.step()
        self.state, self.step, self.answers = state, self.step + 1, answers
        if self.average is not None:
            self.average.update(dict(self.model.named_parameters()), self.step)
        self.drawn = None if self.public is None else self.public.random_state
        self.whole = True

    def to_save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "public": self.drawn,
            "ema": None if self.average is None else self.average.weights,
            **{name: getattr(self, name) for name in _PLAIN},
        }

    def restore(self, path: Path, saved: Mapping[str, Any]) -> None:
        if (saved.get("ema") is None) != (self.average is None):
            raise InvalidArgument(
                f"checkpoint={str(path)!r} was made with ema={self.average is None}: continue with that, or name "
                "another file."
            )
        try:
            plain = {name: saved[name] for name in _PLAIN}
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.average is not None:
                for name, average in self.average.weights.items():
                    average.copy_(saved["ema"][name])
            if self.public is not None and saved["public"] is not None:
                self.public.random_state = self.drawn = saved["public"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgument(
                f"checkpoint={str(path)!r} is of another model, optimizer or program: continue with those it was made "
                "with, or name another file."
            ) from error
        vars(self).update(plain)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.state = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, self.state)


_PLAIN = ("state", "step", "answers", "history", "seconds")


class _Patience:
    """Holds a first Ctrl-C back until the step is whole; a second one comes through at once."""

    def __init__(self) -> None:
        self.ended = False
        # Only the main thread can; and where a program has its own handler, that is respected.
        mine = threading.current_thread() is threading.main_thread()
        self._held = mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> Self:
        if self._held:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, *_: object) -> None:
        if self.ended:
            raise KeyboardInterrupt
        self.ended = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.ended and kind is None:
            raise KeyboardInterrupt  # it came after the last step: the training is finished, the program still ends


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


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON takes it: what is no number, word or switch is written out."""
    return {k: v if isinstance(v, bool | int | float | str | None) else repr(v) for k, v in options.items()}


def _resume_key(name: str, path: Path) -> str:
    """Short, whatever the path: databases limit the length of a key."""
    return f"{name}:{path.name}:{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"


def _known_plan(private: Private, key: str) -> Asked | None:
    """What the ledger knows of the training of this name and checkpoint."""
    return next((line for line in private.statement().asked if line.resume_key == key), None)


def _check_continues(
    path: Path, saved: Mapping[str, Any] | None, known: Asked | None, sampler: Sampler, noise: float | None
) -> None:
    """Refuse, before anything is changed, what is not one training."""
    if saved is not None and known is None:
        raise InvalidArgument(
            f"checkpoint={str(path)!r} is of a training that this ledger does not know: use the ledger and the name it "
            "began with, or move the checkpoint away."
        )
    if saved is None and known is not None and not known.open:
        raise InvalidArgument(
            f"checkpoint={str(path)!r} is gone, and its training has ended: to train again, which costs again, name "
            "another file."
        )
    if known is None:
        return
    planned = known.mechanism
    if planned.sampler != sampler or noise not in (None, planned.noise.scale):
        raise InvalidArgument(
            f"checkpoint={str(path)!r} was planned with {planned.sampler} and noise={planned.noise.scale}: keep "
            "them, or name another file for another training."
        )


def _calibrated(private: Private, sampler: Sampler, times: int, budget: Budget | None) -> float:
    budget = budget or private.account.budget
    return calibration.noise_multiplier(
        epsilon=budget.epsilon, delta=budget.delta, sampler=sampler, steps=times, adjacency=private.adjacency
    )


@torch.no_grad()
def _measure(
    objective: Objective,
    public: Public | None,
    test: Public | None,
    measures: Mapping[str, Metric],
    params: Params | None = None,
    which: str = "",
) -> dict[str, float]:
    """Loss and metrics on public and test data only; private rows are never measured here."""
    result: dict[str, float] = {}
    params = objective.parameters() if params is None else params
    was_training = objective.module.training
    objective.module.eval()
    for prefix, data in (("public", public), ("test", test)):
        if data is None:
            continue
        for label, measure in {"loss": objective.loss, **measures}.items():
            values = data.losses(params, objective=Objective(objective.module, measure, objective.autocast))
            result[f"{prefix}_{which}{label}"] = float(values.mean())
    objective.module.train(was_training)
    return result


def _facts(history: list[dict[str, float]], epsilon: float, rate: float) -> str:
    last = history[-1] if history else {}
    shown = [f"{k.replace('_', ' ')} {v:.3f}" for k, v in last.items() if k not in ("step", "epsilon")]
    return " · ".join([f"ε {epsilon:.2f}", f"{rate:.1f} steps/s", *shown])
