"""The ready-made loop: plan, ask, step, evaluate on public data, checkpoint, and a `Run` at the end.

It is the four-line loop of the README with progress, checkpoints and resuming around it; it adds no privacy logic.
Where several processes train, all run it; the first one reads and writes files and shows the progress.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.method import Algorithm, Method, Params, StatefulMethod, algorithm
from sfumato.arguments import Metric, check_kinds, compared_with, made_optimizer, one_per_row
from sfumato.averages import Ema
from sfumato.checkpoint import LedgerHead, check_checkpoint, held_checkpoint, load_checkpoint, save_checkpoint
from sfumato.data.samplers import Sampler
from sfumato.diagnostics import Alignments, latest
from sfumato.ensembles import Iterates, evaluating
from sfumato.errors import InvalidArgument, LedgerError, SfumatoError
from sfumato.objective import Objective, cross_entropy
from sfumato.patience import Patience
from sfumato.privacy import calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.mechanisms import Mechanism
from sfumato.privacy.statement import Asked
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import GradientMean
from sfumato.run import Run
from sfumato.setup import as_begun, check_begun, setup_of
from sfumato.standing import Standing

_BAR = 16  # letters: on 80 columns there is room for the steps, the time left and what counts most
_GRADIENTS = GradientMean.kind()  # what the training asks; its plan may hold other questions for later


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
    afterwards: Sequence[Planned] = (),
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    ema: bool = False,
    keep_last: int = 0,
    alignment: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: float = 30.0,
    name: str = "training",
    progress: bool = True,
) -> Run:
    """Train `model` privately and return a `Run`.

    Args:
        model: the module of `private.objective`; its weights are updated in place.
        budget: what this training may cost; by default all that a new account has. The noise is calibrated to it,
            unless `noise` (standard deviation / clip norm) is given instead.
        batch_size: the expected batch of Poisson sampling; or give a `sampler`.
        reserve: steps that are reserved beyond `steps`, to do again what a crash loses. Without a reserve a crash
            shortens the training. Either way the Run says how many steps were lost.
        afterwards: what will be asked of `private` when the training is over, such as `NearPrivate().lines(...)`. It is
            reserved in the same plan, which is composed as a whole: the noise of the training leaves room for it, and
            the plan stays open for `private.ask`, until `private.close()` gives back what was not asked. A program that
            died in between finds it again by training once more with the same checkpoint, which asks nothing.
        optimizer: makes a torch optimiser of the parameters; SGD with learning rate 0.5 by default.
        metrics: functions (module, batch) -> one value per example, measured on `public` and `test`; accuracy by
            default for classifiers.
        ema: also keep an exponential moving average of the weights, measured beside them and returned as `Run.ema`;
            it costs no privacy and smooths the noise of the last steps.
        keep_last: keep the iterates of so many last steps as `Run.iterates`, for `sfumato.ensembles`; with a checkpoint
            in the folder `<checkpoint>.iterates`, else in memory; of several processes the first one keeps them.
        alignment: measure in every step how far the private gradient points where the public one does, with a
            confidence band, as `Run.alignment`; free, but for a public gradient where the method takes none.
        checkpoint: a file; if it exists the training is resumed, with its state exact and its noise fresh. It must be
            called as it was begun, with the same method, optimizer, steps and so on. Ctrl-C and errors leave the file
            at the last whole step: at most the answer of the step under way is lost. Only an error inside
            `optimizer.step()`, hooks included, leaves weights that may be half changed and are not saved: then the
            steps since the last save are lost, as after a kill.
        checkpoint_every: seconds between checkpoints; 0 saves after every step.
    """
    check_kinds(private=private, public=public, test=test, budget=budget, batch_size=batch_size, metrics=metrics)
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
    for role, rows in (("public", public), ("test", test)):
        if rows is not None:
            private._check_apart(rows._source, role)
    sampler = sampler or private.poisson(float(batch_size or 0))
    if not isinstance(keep_last, int) or keep_last < 0:
        raise InvalidArgument(f"keep_last={keep_last} must be a whole number of steps, or 0 for none.")
    if alignment and public is None:
        raise InvalidArgument("alignment compares private with public gradients: give public=Public(...).")
    later = [private._mechanism(Planned(*line)) for line in afterwards]
    if any(m.question == _GRADIENTS for m in later):
        raise InvalidArgument(f"afterwards has a line of {_GRADIENTS}, which the training itself asks: leave it out.")
    way = algorithm(method)
    group = private.processes
    group.same_start(model)
    updater, trained = made_optimizer(optimizer, model)
    if public is not None:
        public.random_state = group.first(lambda: public.random_state)
    measures = metrics if metrics is not None else ({"accuracy": accuracy} if objective.loss is cross_entropy else {})

    setup = setup_of(trained, method, updater, steps=steps, reserve=reserve)
    begun_with = as_begun(setup, budget)
    now = Standing(
        model=model,
        optimizer=updater,
        public=public,
        state=way.init(objective.parameters()),
        answers=0,
        average=Ema(objective.parameters()) if ema else None,
    )
    path = None if checkpoint is None else Path(checkpoint)
    key = None if path is None else group.first(partial(plan_key, path, name))
    with ExitStack() as held:
        group.only_first(lambda: held.enter_context(held_checkpoint(path)))
        known = None if key is None else _known_plan(private, key)
        if path is not None:
            saved = group.first(partial(load_checkpoint, path))
            _check_continues(path, saved, known, sampler, noise)
            check_begun(path, saved, begun_with, method)
            if saved is not None:
                private.account.check_head(saved.get("ledger", ""))  # none in checkpoints of earlier versions
            _check_afterwards(path, private, known, later)
            group.only_first(partial(check_checkpoint, path, now.state))
        else:
            saved = None
        if alignment:
            now.alignments = Alignments(public, math.nan, sampler.expected)
        if path is not None and saved is not None:
            now.restore(path, saved)

        if now.step == 0:
            # What public data alone gave; and what fails here would fail later, after answers were paid for.
            now.history = [{"step": 0, "epsilon": 0.0, **_measure(private, public, test, measures)}]
        plan: Plan | None = None
        if known is None:
            times = way.answers(steps) + reserve
            if noise is None:
                share = budget or _whole_budget(private)
                noise = group.first(partial(_calibrated, private, sampler, times, share, later))
            plan = private.plan(Planned(GradientMean, noise, sampler, times), *afterwards, resume_key=key)
        elif known.open and key is not None:
            plan = private.resume(key, seen={_GRADIENTS: now.answers})
        counted = plan.taken_of(_GRADIENTS) if plan is not None else known.answers if known is not None else 0
        lost = counted - now.answers
        target = now.step if plan is None else _affordable(way, now.step, steps, plan.remaining(_GRADIENTS))
        if keep_last and group.leads:
            folder = None if path is None else path.with_name(f"{path.name}.iterates")
            now.iterates = Iterates(last=keep_last, total=max(1, target), folder=folder)
            now.iterates.retain(now.kept)
        if now.alignments is not None and plan is not None:
            now.alignments.noise_multiplier = plan.mechanisms[0].noise.scale

        evaluate_every = evaluate_every or max(1, steps // 10)
        head = LedgerHead(private.account)
        begun, start = now.step, time.perf_counter()
        seconds, last_saved = now.seconds, start

        def keep() -> None:
            now.seconds = seconds + time.perf_counter() - start
            if path is not None and group.leads:
                save_checkpoint(path, {**now.to_save(), "ledger": head(), "begun": begun_with})

        def evaluate(plan: Plan) -> None:
            group.check_same(objective.parameters())
            epsilon = group.first(partial(_spent, plan))
            measured = _measure(private, public, test, measures)
            if now.average is not None:
                measured |= _measure(private, public, test, measures, now.average.weights, "ema_")
            if now.alignments is not None:
                measured |= latest(now.alignments.to_list())
            now.history.append({"step": now.step, "epsilon": epsilon, **measured})

        progress = progress and group.leads
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            disable=not progress,
        )
        if plan is not None:
            more = any(plan.remaining(mechanism.question) for mechanism in later)
            with Patience() as patience, bar, plan.kept_open() if more else plan:
                task = bar.add_task(name, total=target, completed=now.step, facts="")
                try:
                    while now.step < target:
                        ask = private.ask
                        if now.alignments is not None:
                            ask = now.alignments.watched(ask, now.step + 1)
                        update, state = way.step(now.state, objective.parameters(), public, ask)
                        if public is not None:  # what public rows gave may be rounded otherwise in another process
                            update = group.same(update)
                        now.advance(update, state, answers=plan.taken_of(_GRADIENTS) - lost)
                        if group.any(patience.ended):
                            raise KeyboardInterrupt
                        if now.step % evaluate_every == 0 or now.step == target:
                            evaluate(plan)
                        if progress:
                            rate = (now.step - begun) / (time.perf_counter() - start)
                            facts = _facts(now.history, _spent(plan), rate, bar.console.width - _width(name, target))
                            bar.update(task, completed=now.step, facts=facts)
                        first = now.step == begun + 1  # else a kill in the first seconds would lose everything
                        if first or time.perf_counter() - last_saved >= checkpoint_every:
                            keep()
                            last_saved = time.perf_counter()
                    if not now.history or now.history[-1]["step"] != target:
                        evaluate(plan)  # a resumed training that had nothing left to do
                    keep()
                except BaseException as error:
                    # Another process may have taken the plan over: then the checkpoint is that one's to write. A ledger
                    # that could not be reached, which has a cause, says no such thing.
                    if isinstance(error, LedgerError) and (error.__cause__ is None or plan.taken == 0):
                        raise
                    if plan.taken == 0 and key is None:
                        plan.close()  # nothing was answered and nobody can resume it: give everything back
                    # The last whole step is kept before the plan pauses, so that nothing that was paid for is lost.
                    if not now.whole and path is not None:
                        error.add_note(
                            f"The optimizer failed within its step, so checkpoint={str(path)!r} stays as it was last "
                            "saved, and what came after is lost: with checkpoint_every=0 every step is saved."
                        )
                    elif now.step > begun:
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
            **setup,
            "noise_multiplier": used["noise"]["scale"],
            "sampler": used["sampler"],
            "autocast": None if objective.autocast is None else str(objective.autocast),
            "ema": ema,
            **({"processes": group.count} if group.count > 1 else {}),
        },
        history=now.history,
        ema=None if now.average is None else {n: t.clone() for n, t in now.average.weights.items()},
        iterates=now.iterates,
        alignment=[] if now.alignments is None else now.alignments.to_list(),
        statement=statement.to_json(),
        statement_text=statement.to_text(),
        steps_taken=now.step,
        steps_lost=lost,
        steps_short=max(0, steps - now.step),
        seconds=now.seconds,
    )


def plan_key(path: Path, name: str = "training") -> str:
    """Under which the ledger knows the plan of a training with this checkpoint.

    Short, whatever the path: databases limit the length of a key.
    """
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


def _affordable(way: Algorithm, begun: int, steps: int, left: int) -> int:
    """How far a training gets with the answers that are left; only a crash leaves fewer than are needed."""
    while steps > begun and way.answers(steps) - way.answers(begun) > left:
        steps -= 1
    return steps


def _spent(plan: Plan) -> float:
    """About what the training alone has cost so far, without what is asked afterwards."""
    return plan.epsilon_after(plan.taken_of(_GRADIENTS))


def _check_afterwards(path: Path, private: Private, known: Asked | None, later: Sequence[Mechanism]) -> None:
    """Refuse to continue an open plan with other lines: those it was made with would be given back unasked."""
    if known is None or not known.open:
        return
    planned = [line.mechanism for line in private.statement().asked if line.plan == known.plan][1:]
    if planned != list(later):
        lines = ", ".join(f"{m.question} with {m.noise}" for m in planned) or "nothing"
        raise InvalidArgument(f"checkpoint={str(path)!r} was planned with afterwards={lines}: keep that.")


def _whole_budget(private: Private) -> Budget:
    whole = private.account.budget
    if 0 < (left := private.account.left()) < whole.epsilon:
        raise InvalidArgument(
            f"budget is missing: of its epsilon={whole.epsilon:g} the account has about {left:.4g} left after earlier "
            f"plans, so say what this training may cost, budget=Budget(..., {whole.delta:g})."
        )
    return whole


def _calibrated(private: Private, sampler: Sampler, times: int, budget: Budget, later: Sequence[Mechanism]) -> float:
    return calibration.noise_multiplier(
        epsilon=budget.epsilon,
        delta=budget.delta,
        sampler=sampler,
        steps=times,
        adjacency=private.adjacency,
        extra=later,
    )


@torch.no_grad()
def _measure(
    private: Private,
    public: Public | None,
    test: Public | None,
    measures: Mapping[str, Metric],
    params: Params | None = None,
    which: str = "",
) -> dict[str, float]:
    """Loss and metrics on public and test data only; private rows are never measured here."""
    result: dict[str, float] = {}
    objective = private.objective
    assert objective is not None
    params = objective.parameters() if params is None else params
    with evaluating(objective.module):
        for prefix, data in (("public", public), ("test", test)):
            if data is None:
                continue
            for label, measure in {"loss": objective.loss, **measures}.items():
                checked = one_per_row("loss" if label == "loss" else f"metrics[{label!r}]", measure)
                measured = Objective(objective.module, checked, objective.autocast)
                with compared_with(private, prefix, data) if label == "loss" else nullcontext():
                    values = data.losses(params, objective=measured)
                result[f"{prefix}_{which}{label}"] = float(values.mean())
    return result


def _width(name: str, target: int) -> int:
    """Of a progress bar without its facts: name, bar, "3/10", time left and the gaps between them."""
    return len(name) + _BAR + 2 * len(str(target)) + 1 + len("00:00:00") + 4


def _facts(history: list[dict[str, float]], epsilon: float, rate: float, room: int) -> str:
    """As many as there is room for, else the steps and the time left would vanish: losses are the first to go."""
    last = {k: v for k, v in (history[-1] if history else {}).items() if k not in ("step", "epsilon")}
    ordered = sorted(last, key=lambda k: ("loss" in k, not k.startswith("test")))
    shown = [f"ε {epsilon:.2f}", *(f"{k.replace('_', ' ')} {last[k]:.3f}" for k in ordered)]
    shown.insert(2, f"{rate:.1f} steps/s")
    while shown and len(" · ".join(shown)) > room:
        shown.pop()
    return " · ".join(shown)
