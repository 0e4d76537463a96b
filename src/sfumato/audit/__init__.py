"""Audits: evidence that a promise is kept, and attacks that show where it is not."""

from sfumato.audit.bounds import Rates, clopper_pearson, epsilon_lower_bound, epsilon_of_mu, mu_lower_bound, split
from sfumato.audit.one_run import best_of, epsilon_one_run, guessed
from sfumato.audit.verdict import Verdict

__all__ = [
    "Rates",
    "Verdict",
    "best_of",
    "clopper_pearson",
    "epsilon_lower_bound",
    "epsilon_of_mu",
    "epsilon_one_run",
    "guessed",
    "mu_lower_bound",
    "split",
]
