"""The federated loop: plan all rounds, run them, evaluate on public data, keep a checkpoint, and a `Run` at the end."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.averages import Ema
from sfumato.checkpoint import LedgerHead, check_checkpoint, held_checkpoint, load_checkpoint, save_checkpoint
from sfumato.ensembles import Iterates, evaluating
from sfumato.errors import InvalidArgument, LedgerError, SfumatoError
from sfumato.federated.methods import Method, dp_sgd
from sfumato.federated.public_users import PublicUsers
from sfumato.federated.questions import UpdateMean, Users
from sfumato.gradients import Gradient
from sfumato.objective import Objective, cross_entropy
from sfumato.patience import Patience
from sfumato.privacy import calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger_plan import Plan
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.run import Run

_UPDATES = UpdateMean.kind()


def federate(
    objective: Objective,
    *,
    private: Private,
    public: PublicUsers | None = None,
    test: Public | None = None,
    method: Method = dp_sgd,
    rounds: int,
    users_per_round: float,
    budget: Budget | None = None,
    noise: float | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    evaluate_every: int | None = None,
    ema: bool = False,
    keep_last: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: float = 30.0,
    name: str = "federated training",
    watch: Callable[[dict[str, float]], None] | None = None,
) -> Run:
    """Train `objective.module` over rounds of users and return a `Run`. The server is trusted; see docs/federated.md.

    Args:
        private: users behind the door, made by `private_users`.
        method: what a round does; `functools.partial(dope_sgd, work=FedAvg..., clip=0.5)` sets it up.
        users_per_round: how many private users a round asks, in expectation: each joins by itself, with the same
            probability. It is what sums are divided by, however many answer.
        budget: what this training may cost; by default all that the ledger allows. The noise is calibrated to it,
            unless `noise` (standard deviation / clip norm) is given instead. All rounds are reserved before the first.
        optimizer: makes a torch optimiser of the parameters, which takes minus the mean update for the gradient; SGD
            with learning rate 1 by default, which adds it.
        checkpoint: a file; if it exists the training is resumed. Rounds that were paid for and lost stay paid for.
        watch: is called with each evaluation.
    """
    for what, value in (("rounds", rounds), ("keep_last", keep_last)):
        if not isinstance(value, int) or value < (what == "rounds"):
            raise InvalidArgument(f"{what}={value!r} must be a whole number of rounds.")
    if budget is not None and noise is not None:
        raise InvalidArgument("Give either budget or noise: the noise is what the budget is turned into.")
    if public is not None and isinstance(private._source, Users) and private._source.has_any_of(public.clients):
        raise InvalidArgument(
            "public has users who are private, too, and would be promised what they do not get: enrol everyone once."
        )
    sampler = private.poisson(users_per_round)
    trained = [p for p in objective.module.parameters() if p.requires_grad]
    updater = torch.optim.SGD(trained, lr=1.0) if optimizer is None else optimizer(trained)
    now = _Standing(module=objective.module, optimizer=updater, public=public)
    now.average = Ema(objective.parameters()) if ema else None
    path = None if checkpoint is None else Path(checkpoint)
    key = None if path is None else f"{name}:{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    with held_checkpoint(path):
        known = next((a for a in private.statement().asked if key is not None and a.resume_key == key), None)
        if path is not None:
            check_checkpoint(path, None)
            saved = load_checkpoint(path)
            if (saved is not None and known is None) or (saved is None and known is not None and not known.open):
                raise InvalidArgument(
                    f"checkpoint={str(path)!r} and the ledger do not know the same training: use both as they were, or "
                    "name another file for a new training."
                )
            if saved is not None:
                private.account.check_head(saved.pop("ledger", ""))
                now.restore(path, saved)
        plan: Plan | None = None
        if known is None:
            if noise is None:
                limit = budget or private.account.budget
                noise = calibration.noise_multiplier(
                    epsilon=limit.epsilon,
                    delta=limit.delta,
                    sampler=sampler,
                    steps=rounds,
                    adjacency=private.adjacency,
                )
            plan = private.plan(Planned(UpdateMean, noise, sampler, rounds), resume_key=key)
        elif known.open and key is not None:
            if known.mechanism.sampler != sampler or noise not in (None, known.mechanism.noise.scale):
                raise InvalidArgument(
                    f"checkpoint={str(path)!r} was planned with {known.mechanism}: keep that, or name another file."
                )
            plan = private.resume(key, seen={_UPDATES: now.answers})
        lost = (0 if known is None else known.answers) - now.answers if plan is None else plan.taken - now.answers
        target = now.round if plan is None else min(rounds, now.round + plan.remaining(_UPDATES))
        if keep_last:
            folder = None if path is None else path.with_name(f"{path.name}.iterates")
            now.iterates = Iterates(last=keep_last, total=max(1, target), folder=folder)
            now.iterates.retain(now.kept)
        every, head = evaluate_every or max(1, rounds // 10), LedgerHead(private.account)
        begun, start, last_saved = now.seconds, time.perf_counter(), time.perf_counter()

        def keep() -> None:
            now.seconds = begun + time.perf_counter() - start
            if path is not None:
                save_checkpoint(path, {**now.to_save(), "ledger": head()})

        if plan is not None:
            with Patience() as patience, plan:
                try:
                    while now.round < target:
                        update = method(objective.parameters(), public, private.ask)
                        now.advance(update, answers=plan.taken - lost)
                        if patience.ended:
                            raise KeyboardInterrupt
                        if now.round % every == 0 or now.round == target:
                            measured = {"step": now.round, "epsilon": plan.epsilon_after(plan.taken)}
                            measured |= _measure(objective, test)
                            now.history.append(measured)
                            if watch is not None:
                                watch(measured)
                        if time.perf_counter() - last_saved >= checkpoint_every:
                            keep()
                            last_saved = time.perf_counter()
                    keep()
                except LedgerError:
                    raise  # another process may have taken the plan over: then the checkpoint is that one's to write
                except BaseException as error:
                    if plan.taken == 0 and key is None:
                        plan.close()  # nothing was answered and nobody can resume it: give everything back
                    try:
                        if now.whole:
                            keep()  # the last whole round, before the plan pauses
                    except SfumatoError as also:
                        error.add_note(str(also))
                    raise
    statement = private.statement()
    used = next(a.mechanism for a in reversed(statement.asked) if a.mechanism.question == _UPDATES)
    return Run(
        weights={n: t.detach().clone() for n, t in objective.module.state_dict().items()},
        config={
            "name": name,
            "steps": rounds,
            "noise_multiplier": used.noise.scale,
            "sampler": used.to_json()["sampler"],
            "method": _described(method),
            "optimizer": type(updater).__name__,
            "learning_rate": updater.defaults.get("lr"),
            "public_users": 0 if public is None else len(public),
        },
        history=now.history,
        ema=None if now.average is None else dict(now.average.weights),
        iterates=now.iterates,
        statement=statement.to_json(),
        statement_text=statement.to_text(),
        steps_taken=now.round,
        steps_lost=lost,
        steps_short=max(0, rounds - now.round),
        seconds=now.seconds,
    )


@dataclass(kw_only=True)
class _Standing:
    """Where the training stands after its last whole round: what a checkpoint holds."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    public: PublicUsers | None
    round: int = 0
    answers: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    average: Ema | None = None
    iterates: Iterates | None = None
    kept: list[int] = field(default_factory=list)  # rounds whose iterates belong to this training, of a checkpoint
    whole: bool = True  # half a round is not saved

    def advance(self, update: Gradient, *, answers: int) -> None:
        (update * -1.0).write_to(self.module)
        self.whole = False
        self.optimizer.step()
        self.round, self.answers, self.whole = self.round + 1, answers, True
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if self.average is not None:
            self.average.update(named, self.round)
        if self.iterates is not None:
            self.iterates.keep(named, self.round)

    def to_save(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "public": None if self.public is None else self.public.random_state,
            "ema": None if self.average is None else self.average.weights,
            "iterates": self.kept if self.iterates is None else self.iterates.steps,
            **{name: getattr(self, name) for name in _PLAIN},
        }

    def restore(self, path: Path, saved: dict[str, Any]) -> None:
        try:
            self.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.public is not None:
                self.public.random_state = saved["public"]
            if self.average is not None:
                for name, average in self.average.weights.items():
                    average.copy_(saved["ema"][name])
            self.kept = saved["iterates"]
            vars(self).update({name: saved[name] for name in _PLAIN})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgument(
                f"checkpoint={str(path)!r} is of another model, optimizer or program: continue with those it was made "
                "with, or name another file."
            ) from error


_PLAIN = ("round", "answers", "history", "seconds")


def _described(method: Any) -> dict[str, Any]:
    options = method.keywords if isinstance(method, partial) else {}
    name = str(getattr(getattr(method, "func", method), "__name__", type(method).__name__))
    return {"name": name, **{k: v if isinstance(v, int | float | None) else repr(v) for k, v in options.items()}}


@torch.no_grad()
def _measure(objective: Objective, test: Public | None) -> dict[str, float]:
    """On rows that are nobody's secret; users are never measured here."""
    if test is None:
        return {}
    measures: dict[str, Callable[[nn.Module, Any], Tensor]] = {"loss": objective.loss}
    if objective.loss is cross_entropy:
        measures["accuracy"] = lambda module, batch: (module(batch[0]).argmax(1) == batch[1]).double()
    with evaluating(objective.module):
        found = {
            name: test.losses(objective.parameters(), objective=Objective(objective.module, measure))
            for name, measure in measures.items()
        }
    return {f"test_{name}": float(values.mean()) for name, values in found.items()}
