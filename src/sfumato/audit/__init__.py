"""Audits: evidence that a promise is kept, and attacks that show where it is not."""

from sfumato.audit.bounds import (
    Rates,
    clopper_pearson,
    epsilon_lower_bound,
    epsilon_of_mu,
    mu_lower_bound,
    off_by,
    split,
)
from sfumato.audit.canary import distinguish, white_box
from sfumato.audit.conversation import conversation
from sfumato.audit.counts import counts_audit
from sfumato.audit.doctor import doctor
from sfumato.audit.ledger import ledger_audit
from sfumato.audit.membership import membership
from sfumato.audit.noise import noise_audit, pure_noise, resumed_noise
from sfumato.audit.one_run import best_of, epsilon_one_run, guessed, one_run
from sfumato.audit.sampler import drawn_through, sampler_audit
from sfumato.audit.sensitivity import Neighbours, method_sensitivity, question_sensitivity, sensitivity
from sfumato.audit.verdict import CONFIDENCE, Verdict, findings

__all__ = [
    "CONFIDENCE",
    "Neighbours",
    "Rates",
    "Verdict",
    "best_of",
    "clopper_pearson",
    "conversation",
    "counts_audit",
    "distinguish",
    "doctor",
    "drawn_through",
    "epsilon_lower_bound",
    "epsilon_of_mu",
    "epsilon_one_run",
    "findings",
    "guessed",
    "ledger_audit",
    "membership",
    "method_sensitivity",
    "mu_lower_bound",
    "noise_audit",
    "off_by",
    "one_run",
    "pure_noise",
    "question_sensitivity",
    "resumed_noise",
    "sampler_audit",
    "sensitivity",
    "split",
    "white_box",
]
