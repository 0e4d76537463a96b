"""Ensembles of iterates (Nasr et al. 2023, section 3.2 and appendix F): better predictions for no privacy at all.

The guarantee of DP-SGD and its kin is for every iterate, so whatever is made of them is post-processing. Methods that
hide their iterates and release the last one only (PNSGD, output perturbation) are the exception: keep none of theirs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sfumato.data.sources import as_source
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.nn.modes import in_mode
from sfumato.objective import Batch
from sfumato.public import Public

Params = Mapping[str, Tensor]
Predictor = Callable[[Batch], Tensor]  # inputs -> one label per row
View = Callable[[Batch], Batch]  # the same rows, seen otherwise


class Iterates:
    """The last `last` iterates of a training of `total` steps; before those, nothing is copied.

    Copies stay where the parameters are, or on `device`. With a `folder` each is a file there instead, which outlives
    a crash, and is read only while it is iterated over (onto `device`, or the CPU).

    >>> iterates = Iterates(last=2, total=3)
    >>> for step in (1, 2, 3):
    ...     iterates.keep({"w": torch.tensor([float(step)])}, step)
    >>> len(iterates), iterates.mean()
    (2, {'w': tensor([2.5000])})
    """

    def __init__(
        self,
        *,
        last: int = 100,
        total: int,
        folder: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (("last", last), ("total", total)):
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name}={value!r} must be a whole number of at least 1: it counts steps.")
        self._window = range(max(0, total - last) + 1, total + 1)
        self._device = device
        self._folder = None if folder is None else Path(folder)
        self._kept: dict[int, Params | Path] = {}  # by step; a folder may hold others than those of this window
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(self._folder, error) from error
            names = (re.fullmatch(r"step-(\d{6,})\.safetensors", path.name) for path in self._folder.iterdir())
            self._kept = dict(sorted((int(name[1]), self._folder / name[0]) for name in names if name))

    def keep(self, params: Params, step: int) -> None:
        """Copy the trained parameters (`Objective.parameters()`) as they are after this step, counted from 1.

        What was kept of this step and later ones is of a training that was cut short, or of another one: it goes.
        """
        if not 1 <= step < self._window.stop:
            raise InvalidArgument(f"step={step} must be between 1 and total={self._window.stop - 1}: count from 1.")
        self.rewind(step - 1)
        if step not in self._window:
            return
        if self._folder is None:
            self._kept[step] = {n: p.detach().to(self._device or p.device, copy=True) for n, p in params.items()}
        else:
            self._kept[step] = _write(self._folder / f"step-{step:06}.safetensors", params)

    def rewind(self, step: int) -> None:
        """Forget what came after this step: a resumed training does those steps again, with fresh noise."""
        self.retain(s for s in self.steps if s <= step)

    @property
    def steps(self) -> list[int]:
        """Of which iterates were kept, within this window or not."""
        return list(self._kept)

    def retain(self, steps: Iterable[int]) -> None:
        """Forget all but those of these steps: what else lies in the folder is of another training."""
        for strange in set(self._kept) - set(steps):
            kept = self._kept.pop(strange)
            if isinstance(kept, Path):
                kept.unlink(missing_ok=True)

    def __len__(self) -> int:
        return sum(step in self._window for step in self._kept)

    def __iter__(self) -> Iterator[Params]:
        from safetensors.torch import load_file

        for kept in [kept for step, kept in self._kept.items() if step in self._window]:
            yield load_file(kept, device=str(self._device or "cpu")) if isinstance(kept, Path) else kept

    def mean(self) -> dict[str, Tensor]:
        """The mean of the weights, summed in float64 and rounded once to their own type: one model like any other."""
        total: dict[str, Tensor] = {}
        params: Params = {}
        for params in self:
            for name, p in params.items():
                total[name] = total[name].add_(p) if name in total else p.to(torch.float64, copy=True)
        if not params:
            raise InvalidArgument(f"No iterate was kept before step {self._window.start}: train on, or raise last.")
        return {name: total[name].div_(len(self)).to(p.dtype) for name, p in params.items()}


def _write(path: Path, params: Params) -> Path:
    """Write, flush to disk and rename: a crash leaves a whole file or none, and a draft that the next try replaces."""
    from safetensors.torch import save

    draft = path.with_name(f".{path.name}.tmp")
    # Tied weights share storage, which safetensors refuses: every name gets its own copy.
    content = save({n: p.detach().to("cpu", copy=True).contiguous() for n, p in params.items()})
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise _unwritable(path.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> SfumatoError:
    return SfumatoError(
        f"folder={str(folder)!r} cannot be written ({error.strerror}): name another folder, or free some space."
    )


def mean_logits(
    module: nn.Module,
    weights: Iterable[Params],
    inputs: Batch,
    *,
    batch_size: int = 1024,
    autocast: torch.dtype | None = None,
    views: Sequence[View] = (),
) -> Tensor:
    """The mean of the module's outputs over the weights, whatever their shape, summed in float64.

    With `views`, such as `sfumato.augment.mirrored`, it is also the mean over the inputs as they are and as each view
    shows them. The module is called in eval mode on its own device and left as it was. What the weights do not name
    (frozen parameters, buffers) is the module's own.
    """
    each = _each(module, weights, inputs, batch_size, autocast, views)
    first = next(each)
    total, count = first.double(), 1
    for outputs in each:
        total, count = total + outputs, count + 1
    return (total / count).to(first.dtype)


def majority_vote(
    module: nn.Module,
    weights: Iterable[Params],
    inputs: Batch,
    *,
    batch_size: int = 1024,
    autocast: torch.dtype | None = None,
    views: Sequence[View] = (),
) -> Tensor:
    """The label that the module, giving logits (N, classes), predicts under most of the weights; else as `mean_logits`.

    A tie goes to the tied label with the largest sum of logits, and if those are equal too to the first.

    >>> module = nn.Linear(2, 2, bias=False)
    >>> weights = [{"weight": torch.eye(2)}, {"weight": torch.eye(2)}, {"weight": -9 * torch.eye(2)}]
    >>> majority_vote(module, weights, torch.eye(2)), mean_logits(module, weights, torch.eye(2)).argmax(1)
    (tensor([0, 1]), tensor([1, 0]))
    """
    each = _each(module, weights, inputs, batch_size, autocast, views)
    first = next(each)
    if first.ndim != 2:
        raise InvalidArgument(f"module gives {tuple(first.shape)}: votes need (N, classes), or take mean_logits.")
    total, votes = first.double(), nn.functional.one_hot(first.argmax(1), first.shape[1])
    for outputs in each:
        total, votes = total + outputs, votes + nn.functional.one_hot(outputs.argmax(1), outputs.shape[1])
    tied = votes == votes.amax(1, keepdim=True)
    # Made finite, so that a tied label with a logit of -inf still stands above those that lost.
    return torch.where(tied, total.nan_to_num(), -torch.inf).argmax(1)


def _each(
    module: nn.Module,
    weights: Iterable[Params],
    inputs: Batch,
    batch_size: int,
    autocast: torch.dtype | None,
    views: Sequence[View],
) -> Iterator[Tensor]:
    """The outputs of all rows, in float32 at least, under each of the weights in turn; there is at least one."""
    source = as_source(inputs)
    if not len(source) or batch_size < 1:
        raise InvalidArgument(f"inputs has {len(source)} rows and batch_size={batch_size}: both must be at least 1.")
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    device = next((t.device for t in own.values()), torch.device("cpu"))
    # A state dict names tied weights twice; `functional_call` wants one name for each.
    name_of = {id(t): name for name, t in reversed(own.items())}
    parts: list[Tensor] = []
    for params in weights:
        if strange := [n for n, p in params.items() if n not in own or own[n].shape != p.shape]:
            raise InvalidArgument(
                f"weights has {strange[0]!r}, which module has not, or not in this shape: give its own."
            )
        lent = {name_of[id(own[n])]: p.detach().to(own[n].device) for n, p in params.items()}
        lent |= {n: lent.get(n, b).clone() for n, b in module.named_buffers()}  # a forward pass may write to them
        parts = []
        with torch.no_grad(), evaluating(module), torch.autocast(device.type, autocast, enabled=autocast is not None):
            for start in range(0, len(source), batch_size):
                batch = source.gather(np.arange(start, min(start + batch_size, len(source))))
                batch = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)
                seen = (torch.func.functional_call(module, lent, (see(batch),)) for see in (_as_it_is, *views))
                parts.append(_mean(seen))
        yield torch.cat(parts)
    if not parts:
        raise InvalidArgument("weights is empty: give iterates that were kept, and no generator that was used up.")


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _mean(outputs: Iterable[Tensor]) -> Tensor:
    """In float32 at least."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in outputs]
    return wide[0] if len(wide) == 1 else torch.stack(wide).mean(0)


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """In eval mode, and then part by part as before."""
    return in_mode(module, training=False)


def best_on_public(
    module: nn.Module,
    candidates: Mapping[str, Params | Predictor],
    public: Public,
    *,
    batch_size: int = 1024,
    autocast: torch.dtype | None = None,
) -> tuple[str, dict[str, float]]:
    """The name of the candidate that is the most accurate on `public`, and the accuracy of each.

    A candidate is weights of the module, such as `Run.ema` or `Iterates.mean()`, or a function from inputs to labels,
    such as `functools.partial(majority_vote, module, iterates)`. Of equals the first wins: name the simplest first.

    `public` holds rows (inputs, labels) that nothing was trained on. Never choose on private rows: that leaks, and no
    ledger sees it. Never on the test set: the best of several is then no estimate any more. And not on public rows that
    a warm-up was trained on, where everything scores near 100 %: hold some of them back for this.

    >>> module = nn.Linear(2, 2, bias=False)
    >>> public = Public((torch.eye(2), torch.tensor([0, 1])))
    >>> best_on_public(module, {"last": {"weight": -torch.eye(2)}, "mean": {"weight": torch.eye(2)}}, public)
    ('mean', {'last': 0.0, 'mean': 1.0})
    """
    if not candidates:
        raise InvalidArgument("candidates is empty: give weights or predictors by name.")
    if not isinstance(public, Public):
        raise InvalidArgument(
            f"public is a {type(public).__name__}: it must be a Public, since choosing on others leaks."
        )
    right = dict.fromkeys(candidates, 0)
    for batch in public.batches(8192):  # so many, since an ensemble in a folder is read anew for each
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InvalidArgument("public has no rows (inputs, labels): accuracy needs labels to compare with.")
        inputs, labels = batch
        for name, candidate in candidates.items():
            if isinstance(candidate, Mapping):
                found = majority_vote(module, [candidate], inputs, batch_size=batch_size, autocast=autocast)
            else:
                found = candidate(inputs)
            if found.shape != labels.shape:
                raise InvalidArgument(
                    f"candidates[{name!r}] gives {tuple(found.shape)} for labels of {tuple(labels.shape)}: it must "
                    "predict one label per row."
                )
            right[name] += int((found == labels.to(found.device)).sum())
    scores = {name: count / len(public) for name, count in right.items()}
    return max(scores, key=lambda name: scores[name]), scores
