"""What a classifier makes of a private row is that row's alone, wherever it stands."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from sfumato import Budget, Planned, Private, Public
from sfumato.errors import InvalidArgument
from sfumato.questions import Histogram
from sfumato.selection import NearPrivate, Released, Views, entropy


def mlp(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def scored(views: Views) -> Tensor:
    return torch.cat([entropy(views.logits).double()[:, None], views.logits.double()], 1)


# Widths at which matrix products of 32-bit floats round a row by its place, on CPUs that this was seen on; and others.
@pytest.mark.parametrize("widths", [(64, 30, 10), (33, 10), (20, 25, 2), (64, 32, 10), (5, 3)], ids=str)
@pytest.mark.parametrize("many", [7, 512])
def test_a_newcomer_moves_nobody(widths: tuple[int, ...], many: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(1100, widths[0], generator=generator)
    released = Released(mlp(*widths), batch_size=many)
    released.of(Public(torch.rand(50, widths[0], generator=generator)))
    mapped = released.row_map(scored)
    alone = mapped(rows)
    for newcomer in (rows[3], torch.full((widths[0],), torch.nan), 1e30 * rows[4]):
        assert torch.equal(mapped(torch.cat([newcomer[None], rows]))[1:], alone)
    assert torch.equal(mapped(rows.flip(0)).flip(0), alone)
    assert torch.equal(mapped(rows[5:6]), alone[5:6])
    torch.testing.assert_close(alone[:, 1:], released.views(rows).logits.double(), rtol=1e-4, atol=1e-5)


def test_votes_of_repeated_rows_stay_where_they_are() -> None:
    """Four in ten public rows are one blank row, so the threshold ties with it, and so are many private ones."""
    torch.manual_seed(0)
    model = Released(mlp(64, 30, 10))
    pool = torch.rand(400, 64)
    pool[:160] = 0.5
    private = torch.rand(700, 64)
    private[::3] = 0.5
    counts: list[Tensor] = []
    for rows in (private, torch.cat([torch.full((1, 64), torch.nan), private])):
        door = Private(rows, name="d", size=700, budget=Budget(1.0, 1e-5))

        def ask(question: object, door: Private = door, rows: Tensor = rows) -> Tensor:
            if not isinstance(question, Histogram):
                return torch.eye(30).double()
            counts.append(question.exact(door._sample(torch.arange(len(rows)).numpy(), largest=700)))
            answer: Tensor = door.ask(question)
            return answer

        near = NearPrivate(uncertain=3.0, components=4)
        door.plan(*near.lines(door, pca=100.0, support=10.0), Planned(Histogram, 10.0, door.everyone()))
        near(model, Public(pool), 50, ask)
    assert torch.equal(counts[0], counts[1])
    assert int(counts[0].sum()) > 0


def test_places_are_tried_with_public_rows() -> None:
    with pytest.raises(InvalidArgument, match=r"of\(pool\) first"):
        Released(mlp(4, 3)).row_map(scored)
