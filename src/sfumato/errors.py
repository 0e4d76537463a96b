"""Every error a user can cause: one sentence that names the argument, its value and the remedy."""

from __future__ import annotations


class SfumatoError(Exception):
    """Base of all errors that Sfumato raises on purpose; the command line prints it and exits with status 2."""


class InvalidArgument(SfumatoError, ValueError):
    """An argument is wrong; nothing was charged and nothing was changed."""


class UnsupportedModel(SfumatoError, ValueError):
    """The model cannot be given exact per-example gradients, or mixes examples; the message names the module."""


class UnsupportedAccounting(SfumatoError, ValueError):
    """No sound accountant exists for this combination of sampling, adjacency and noise."""


class BudgetExceeded(SfumatoError):
    """The ledger refused: the answer would cost more than is left. No noise was drawn."""


class LedgerError(SfumatoError):
    """The ledger cannot be used as it is: corrupt, read-only, of another dataset, or taken over by another process."""


def shown(value: object) -> str:
    """How an error names an argument of the wrong kind: words and numbers as they are, of all else the type.

    It may be private rows.

    >>> shown("dope-sgd"), shown(0.1), shown(([1.0], [2.0]))
    ("'dope-sgd'", '0.1', 'tuple')
    """
    return repr(value) if isinstance(value, str | int | float) else type(value).__name__
