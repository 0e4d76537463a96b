"""The three columns of table 7 of Nasr et al. 2023 (paper 000): how a round uses private and public users.

Each is (params, public, ask) -> mean update; `ask` is its one way to private users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.federated.public_users import PublicUsers
from sfumato.federated.questions import UpdateMean
from sfumato.federated.work import FED_SGD, LocalWork, Params
from sfumato.gradients import Clip, Gradient

Ask = Callable[..., Any]
Method = Callable[[Params, PublicUsers | None, Ask], Gradient]


def dp_sgd(
    params: Params, public: PublicUsers | None, ask: Ask, *, work: LocalWork = FED_SGD, clip: float = 1.0
) -> Gradient:
    """Everybody alike: those who want no protection are enrolled with the private users."""
    answer: Gradient = ask(UpdateMean(params, Clip(clip), work))
    return answer


def dp_sgd_beside_public(
    params: Params,
    public: PublicUsers | None,
    ask: Ask,
    *,
    share: float,
    work: LocalWork = FED_SGD,
    clip: float = 1.0,
    public_clip: float | None = None,
    public_users: int | None = None,
) -> Gradient:
    """Privacy for private users only: public ones, the declared `share` of all, join the mean without noise.

    `public_clip` bounds each of their updates: the clip norm by default; math.inf lets them be.
    """
    if not 0 < share < 1:
        raise InvalidArgument(f"share={share} must lie between 0 and 1: it is the share of users who are public.")
    longest = clip if public_clip is None else public_clip
    joining = _needed(public).update(params, work=work, users=public_users, longest=longest)
    return (1 - share) * dp_sgd(params, public, ask, work=work, clip=clip) + share * joining


def dope_sgd(
    params: Params,
    public: PublicUsers | None,
    ask: Ask,
    *,
    work: LocalWork = FED_SGD,
    clip: float = 1.0,
    origin_clip: float | None = None,
    public_clip: float | None = None,
    public_users: int | None = None,
) -> Gradient:
    """Private users' updates, clipped around the public users' mean update (Algorithm 2, as corrected).

    `origin_clip` is the paper's lambda, the longest that mean may be: the clip norm by default; `public_clip` bounds
    each public user's update in it, likewise.
    """
    longest = clip if origin_clip is None else origin_clip
    if not longest > 0:
        raise InvalidArgument(f"origin_clip={longest} must be positive: it is the longest public step.")
    each = clip if public_clip is None else public_clip
    mean = _needed(public).update(params, work=work, users=public_users, longest=each)  # lines 4-5
    around = Clip(clip, origin=mean.clipped(longest))  # equation (3)
    answer: Gradient = ask(UpdateMean(params, around, work))  # lines 6-12, the origin added once and not per user
    return around.restore(answer)


def _needed(public: PublicUsers | None) -> PublicUsers:
    if public is None:
        raise InvalidArgument("public is missing: this method takes the update of public users, so give PublicUsers.")
    return public
