"""The black-box membership audit: who sees the final model's predictions alone guesses who was in.

A likelihood-ratio attack (LiRA, Carlini et al. 2022, "Membership Inference Attacks From First Principles"): shadow
models, trained alike with other coins, tell for each candidate how confident a model is of it that has seen it, and one
that has not. In one target model the candidates depend on each other, so their scores are judged by the bound for one
run (Steinke et al. 2023), which allows for that. It proves least of all audits, and is closest to what outsiders do.
"""

from __future__ import annotations

import numpy as np

from sfumato.audit.one_run import Training, verdict_on
from sfumato.audit.verdict import CONFIDENCE, Verdict
from sfumato.errors import InvalidArgument


def membership(
    training: Training,
    *,
    candidates: int,
    epsilon: float,
    delta: float,
    name: str,
    shadows: int = 16,
    audit: str = "membership",
    confidence: float = CONFIDENCE,
) -> Verdict:
    """`training` trains one model with the included candidates and gives its confidence in each of them.

    >>> rng = np.random.default_rng(0)
    >>> learned_by_heart = lambda included: included * 2.0 + rng.normal(0, 1.0, 300)
    >>> told = {"candidates": 300, "delta": 1e-10, "name": "by heart"}
    >>> [membership(learned_by_heart, epsilon=epsilon, **told).holds for epsilon in (0.5, 2.5)]
    [False, True]
    """
    if shadows < 4:
        raise InvalidArgument(
            f"shadows={shadows} must be at least 4: each candidate has to be in some, and out of some."
        )
    included = np.random.default_rng().random((shadows + 1, candidates)) < 0.5
    scores = np.stack([training(coins) for coins in included])
    ratio = likelihood_ratio(scores[:-1], included[:-1], scores[-1])
    return verdict_on(ratio, included[-1], epsilon=epsilon, delta=delta, name=name, audit=audit, confidence=confidence)


def likelihood_ratio(
    scores: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    included: np.ndarray[tuple[int, int], np.dtype[np.bool_]],
    target: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """log N(target; in) / N(target; out) of each candidate; means are its own, the variance that of all (few shadows).

    A candidate that was in all shadows, or in none, gets 0: nothing is known of it.
    """
    inside, outside = included.sum(0), (~included).sum(0)
    known = (inside > 0) & (outside > 0)
    mean_in = (scores * included).sum(0) / np.maximum(inside, 1)
    mean_out = (scores * ~included).sum(0) / np.maximum(outside, 1)
    residual = scores - np.where(included, mean_in, mean_out)
    variance = max(float(np.mean(residual**2)), 1e-300)
    ratio = ((target - mean_out) ** 2 - (target - mean_in) ** 2) / (2 * variance)
    return np.where(known, ratio, 0.0)
