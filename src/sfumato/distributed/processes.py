"""Several processes, one training: each holds its own private rows, the first one holds the ledger and draws the noise.

All processes are one trust domain: what leaves it is what leaves the door. They go through the door's steps together:

1. Each checks the question with rows of its own; if one refuses it, all do.
2. The first process charges the ledger, once, and all learn of success or refusal before anything is drawn.
3. Each samples its own units with its own secret generator. Poisson sampling decides unit by unit, so that all of them
   together draw the Poisson sample of the whole. Each sums what its units contribute.
4. The sums are added up in the first process, in float64 as those of micro-batches are; it adds noise, once, and sends
   the noisy answer to all. (An all-reduce is a reduce and a broadcast: the noise goes between the two.)

A unit lives in one process only, so what it can move the sum by is what it can move it by in one process.
"""

from __future__ import annotations

import atexit
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfumato.data.samplers import FixedSize, Sampler
from sfumato.data.user_ids import user_ids
from sfumato.distributed.account import SharedAccount
from sfumato.distributed.tensors import (
    Form,
    checksum,
    digest,
    generators,
    projected,
    public_of,
    row_digests,
    set_generators,
)
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.gradients import Gradient
from sfumato.objective import Batch
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.questions import Exact, Joint, Sealed

T = TypeVar("T")
_COMPARED_EVERY = 64  # questions of a kind, between two looks at whether all ask with the same public tensors
_APART = 1e-3  # of their length: rounding stays far below it, another batch or another first weight far above


class ProcessLost(SfumatoError):
    """Another process ended or did not answer in time. What was charged stays charged; the training can be resumed."""


class Processes:
    """The processes that `torchrun` started; without it, this one process.

    Every process makes one, gives it to its `Private`, and runs the same program; each holds rows that no other holds.
    `rank` counts from 0, the process that keeps the ledger, draws the noise and writes files; `count` is their number.

    Args:
        timeout: seconds after which a process that does not answer is given up. It must be more than the slowest
            process needs for a step, or for loading its rows.
        alone: take part in no group, whatever `torchrun` says.

    >>> processes = Processes()
    >>> processes.rank, processes.count, torch.arange(3)[processes.mine]
    (0, 1, tensor([0, 1, 2]))
    """

    def __init__(self, *, timeout: float = 600.0, alone: bool = False) -> None:
        if not timeout > 0:
            raise InvalidArgument(f"timeout={timeout} must be positive: it is how long to wait for other processes.")
        self.rank, self.count = 0, 1
        self._timeout, self._asked = timeout, Counter[str]()
        self._lost: str | None = None
        self._started = False  # here, and so to be ended here
        self._nccl = False
        # A group of one has nobody to agree with, and gloo's threads, which may abort when the process ends.
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if alone or not dist.is_available() or not (dist.is_initialized() or several):
            return
        wait = timedelta(seconds=timeout)
        if not dist.is_initialized():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            own_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
            dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpus else "gloo", timeout=wait)
            self._started = True
            atexit.register(self.close)  # else gloo's threads end in an abort
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._nccl = "nccl" in dist.get_backend_config()
        # What is agreed upon is a few numbers of the host: for those NCCL would make the GPU wait.
        self._host = dist.new_group(backend="gloo", timeout=wait) if self.count > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this is the process that keeps the ledger and writes files."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process should compute: its own GPU, if there is one."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    @property
    def mine(self) -> slice:
        """This process's share of rows that all of them can read: `rows[processes.mine]`."""
        return slice(self.rank, None, self.count)

    def holds(self, users: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows are of users of this process: a share in which every user has all of their records."""
        own = [zlib.crc32(repr(user).encode()) % self.count == self.rank for user in user_ids(users)]
        return np.array(own, dtype=bool)

    def close(self) -> None:
        """Leave the group, if it was joined here."""
        if self._started and dist.is_initialized() and (self._lost is None or not self._nccl):
            dist.destroy_process_group()  # of a broken group NCCL would wait for those who are gone
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.count > 1 and self._lost is None:
            with self._reaching():
                dist.barrier(self._host)  # nobody leaves while another still listens
        self.close()

    # -------------------------------------------------------------------------------------------- agreeing

    def agree(self, compute: Callable[[], T], said: Callable[[T], object] = lambda _: None) -> T:
        """What each process computes for itself; if it fails in one of them, all raise that error.

        `said` is something public about the result on which all must agree.
        """
        if self.count == 1:
            return compute()
        error: Exception | None = None
        mark = 0
        try:
            value = compute()
            mark = digest(repr(said(value)))
        except ProcessLost:
            raise
        except Exception as failed:
            error = failed
        anyone, highest, lowest = self._highest([int(error is not None), mark, -mark])
        if anyone:
            self._raise_first(error)
        if highest != -lowest:
            raise SfumatoError(
                "The processes asked different questions, or were answered in different shapes: run the same program "
                "with the same settings in every process."
            )
        return value

    def first(self, compute: Callable[[], T]) -> T:
        """What the first process computes, for all; its error is raised by all."""
        value = self.only_first(compute)
        if self.count == 1:
            return cast(T, value)
        told = [value]
        with self._reaching():
            dist.broadcast_object_list(told, 0, self._host)
        return cast(T, told[0])

    def only_first(self, compute: Callable[[], T]) -> T | None:
        """What the first process computes, for itself alone; its error is raised by all."""
        found: T | None = None

        def kept() -> int:
            nonlocal found
            found = compute()
            return 0

        self.number(kept)
        return found

    def number(self, compute: Callable[[], int]) -> int:
        """The first process's whole number (not negative), for all; its error is raised by all."""
        if self.count == 1:
            return compute()
        told, error = torch.tensor([-1]), None
        if self.leads:
            try:
                told[0] = compute()
            except Exception as failed:
                error = failed
        if (number := int(self._sent(told))) < 0:
            self._raise_first(error)
        return number

    def any(self, happened: bool) -> bool:
        """Whether it happened in one of them."""
        return happened if self.count == 1 else bool(self._highest([int(happened)])[0])

    def total(self, number: int) -> int:
        """The sum of everyone's whole number."""
        if self.count == 1:
            return number
        sum_ = torch.tensor([number])
        with self._reaching():
            dist.all_reduce(sum_, group=self._host)
        return int(sum_)

    def _highest(self, numbers: Sequence[int] | Sequence[float]) -> list[Any]:
        tensor = torch.tensor(numbers, dtype=torch.float64 if isinstance(numbers[0], float) else torch.int64)
        with self._reaching():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._host)
        return tensor.tolist()

    def _raise_first(self, mine: Exception | None) -> None:
        """Everyone raises the error of the first process that has one. Only Sfumato's own texts are handed on."""
        said = None if mine is None else (type(mine), str(mine)) if isinstance(mine, SfumatoError) else type(mine)
        heard = self._heard(said)
        rank, error = next((rank, error) for rank, error in enumerate(heard) if error is not None)
        if mine is not None and (rank == self.rank or not isinstance(mine, SfumatoError)):
            raise mine
        if isinstance(error, tuple):
            raise error[0](error[1])
        raise SfumatoError(f"Process {rank} failed with {error.__name__}: see its own message, and start all again.")

    def _heard(self, said: Any) -> list[Any]:
        heard: list[Any] = [None] * self.count
        with self._reaching():
            dist.all_gather_object(heard, said, self._host)
        return heard

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        if self._lost is not None:  # the group is broken: nobody would answer
            raise ProcessLost(self._lost)
        try:
            yield
        except RuntimeError as error:
            self._lost = (
                f"Process {self.rank} of {self.count} lost another one, which ended or did not answer within "
                f"timeout={self._timeout:g} s: what was charged stays charged; start all of them again to resume."
            )
            raise ProcessLost(self._lost) from error

    # -------------------------------------------------------------------------------------------- the same for all

    def same(self, gradient: Gradient) -> Gradient:
        """The first process's gradient, for all: bitwise equal, where computing it rounds otherwise in another process.

        Answers of the door need it not. Public gradients on GPUs do.
        """
        if self.count == 1:
            return gradient
        mine = dict(gradient)
        form, kind = Form(mine), reduce(torch.promote_types, (t.dtype for t in mine.values()))
        sent = form.of(self._sent(form.flat(mine, self._carrier(form.device), kind)))
        assert isinstance(sent, dict)
        return Gradient({name: t.to(mine[name]) for name, t in sent.items()})

    def same_start(self, module: nn.Module) -> None:
        """Gives all processes the first one's weights, and its global generators, which make public choices."""
        if self.count == 1:
            return
        for tensor in [*module.parameters(), *module.buffers()]:
            with torch.no_grad():
                sent = tensor.detach().to(self._carrier(tensor.device), copy=True).contiguous()
                tensor.copy_(self._sent(sent))
        states = self.first(generators)
        if not self.leads:
            set_generators(states)

    def check_same(self, params: Mapping[str, Tensor]) -> None:
        """Raise if the parameters of the processes differ in a single bit."""
        if self.count == 1:
            return
        number = checksum(params.values())
        highest, lowest = self._highest([number, -number])
        if highest != -lowest:
            raise SfumatoError(
                "The weights of the processes have drifted apart: make every public choice alike in all of them, or "
                "pass updates through Processes.same."
            )

    def _sent(self, tensor: Tensor) -> Tensor:
        with self._reaching():
            dist.broadcast(tensor, 0, group=self._group_of(tensor))
        return tensor

    def _carrier(self, device: torch.device) -> torch.device:
        return device if device.type == "cuda" and self._nccl else torch.device("cpu")

    def _group_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return None if tensor.is_cuda else self._host

    # -------------------------------------------------------------------------------------------- at the door

    def account(self, ledger: Ledger | str | os.PathLike[str] | None, name: str, **terms: Any) -> Account:
        """The account of a dataset, which the first process keeps."""

        def opened() -> Account:
            return (ledger if isinstance(ledger, Ledger) else Ledger(ledger)).account(name, **terms)

        # It has all that is public of an account, and its plans all that is public of a plan.
        return opened() if self.count == 1 else cast(Account, SharedAccount(self, self.only_first(opened)))

    def seed(self, seed: NotPrivateSeed | None) -> NotPrivateSeed | None:
        """A repeatable seed of each process's own, so that they do not all draw the same sample."""
        if seed is None or self.leads:
            return seed
        return NotPrivateSeed(int(np.random.SeedSequence([seed.seed, self.rank]).generate_state(1, np.uint64)[0]))

    def check_apart(self, some_rows: Callable[[], Batch | None], users: Any) -> None:
        """Raise if two processes were given the same rows, or records of one user: that unit would count twice.

        Looks at some rows of each, so it finds data that was not divided at all, and users in whole. Within the trust
        domain; what is said outside is said of a wrong set-up before anything is answered.
        """
        if self.count == 1:
            return
        if users is not None:
            ids = self._heard({digest(repr(user)) for user in user_ids(users)})
            if len(set.union(*ids)) < sum(map(len, ids)):
                raise InvalidArgument(
                    "users has someone with records in two processes, who would count twice: give each process all "
                    "records of its users, such as rows[processes.holds(users)]."
                )
            return
        rows = some_rows()
        told = [held for held in self._heard(() if rows is None else row_digests(rows)) if len(set(held)) > 1]
        if len(set(told)) < len(told):  # rows that are all alike, zeros say, may well be so in two processes
            raise InvalidArgument(
                "data is the same in two processes, and its rows would count twice: give each its own part, such as "
                "rows[processes.mine]."
            )

    def check_possible(self, question: type, sampler: Sampler) -> None:
        """Raise for what only one process can do."""
        if self.count > 1 and issubclass(question, Sealed):
            raise InvalidArgument(
                f"question={question.kind()} needs all rows in one process, and there are {self.count}: ask it in one."
            )
        if self.count > 1 and isinstance(sampler, FixedSize):
            raise InvalidArgument(
                f"sampler={sampler} draws from all rows at once, which {self.count} processes cannot: use "
                "private.poisson(...)."
            )

    def asked(self, question: Any, check: Callable[[], None], terms: object) -> None:
        """Every process asks this question on these terms, and none refuses it."""
        if self.count == 1:
            check()
            return
        if not all(part.adds_up for part in (question.parts if isinstance(question, Joint) else (question,))):
            raise InvalidArgument(
                f"question={question.kind()} compares rows with each other, and each of {self.count} processes knows "
                "its own alone: ask it in one process, or one that adds up, such as Histogram."
            )
        self.agree(check, said=lambda _: (question.kind(), question.unit, terms, [len(t) for t in public_of(question)]))
        self._asked[question.kind()] += 1
        if self._asked[question.kind()] % _COMPARED_EVERY == 1 and (tensors := public_of(question)):
            values = [v for group in tensors for v in projected(group)]
            highest, lowest = self._highest(values), self._highest([-v for v in values])
            pairs = zip(highest[::2], highest[1::2], lowest[1::2], strict=True)
            if any(high + low > _APART * length for length, high, low in pairs):
                raise SfumatoError(
                    "The processes ask at different weights, or around different public gradients: give Public the "
                    "same seed and the model the same weights in all of them."
                )

    def answer(self, exact: Exact, noised: Callable[[Exact], Exact], *, discrete: bool) -> Exact:
        """The sum over all processes, with noise that the first one adds, once."""
        if self.count == 1:
            return noised(exact)
        form, kind = Form(exact), torch.int64 if discrete else torch.float64
        flat = form.flat(exact, self._carrier(form.device))
        with self._reaching():
            dist.reduce(flat, 0, group=self._group_of(flat))
        noisy = self.only_first(lambda: form.flat(noised(form.of(flat)), flat.device, kind))
        return form.of(self._sent(torch.empty_like(flat, dtype=kind) if noisy is None else noisy), form.device)


ALONE = Processes(alone=True)
