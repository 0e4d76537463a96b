"""The language models: exact gradients per row, weights that are lent, ensembles, and words that see no future."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import Clip, Objective, Public
from sfumato.errors import InvalidArgument
from sfumato.gradients import Performance, clipped_sum
from sfumato.gradients.rules import recurrence
from sfumato.models.bert import WordBERT
from sfumato.models.lstm import WordLSTM
from sfumato.text import IGNORED, next_word, word_loss
from tests.gradients import oracle

WORDS, LENGTH, ROWS = 13, 7, 5
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: WordLSTM(WORDS, hidden=6),
    "bert": lambda: WordBERT(WORDS, width=8, length=LENGTH),
}


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[Objective, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    words = torch.randint(WORDS, (ROWS, LENGTH + 1))
    return Objective(MODELS[name]().to(dtype), next_word), (words[:, :-1].contiguous(), words[:, 1:].contiguous())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_per_row_are_those_of_autograd(name: str, dtype: torch.dtype) -> None:
    objective, batch = made(name, dtype)
    params = objective.parameters()
    gradients = oracle.one_by_one(objective, params, batch, ROWS)
    norms = torch.stack([g.double().flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
    for norm, origin in ((float(norms.median()), None), (0.1, oracle.like(params, 1)), (1e6, None)):
        clip = Clip(norm, origin=origin)
        truth = {n: g.sum(0) for n, g in oracle.clipped(gradients, clip).items()}
        for performance in (Performance(), Performance(micro_batch=2), Performance(ghost=False)):
            ours = clipped_sum(objective, params, batch, clip=clip, performance=performance)
            assert oracle.relative_error(ours, truth) < (1e-10 if dtype == torch.float64 else 2e-5)


def test_a_layer_of_lstm_is_one_use_of_its_recurrent_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one per step: what the rule reports is counted."""
    objective, batch = made("lstm")
    seen: list[tuple[int, ...]] = []
    rule = recurrence.recurrence

    def counted(call: recurrence.Call) -> object:
        seen.append(tuple(call.args[0].shape))
        return rule(call)

    monkeypatch.setattr("sfumato.gradients.rules.native.TABLE", {**_native(), recurrence.lstm_recurrence: counted})
    performance = Performance(micro_batch=ROWS)
    clipped_sum(objective, objective.parameters(), batch, clip=Clip(1.0), performance=performance)
    seen.clear()  # the probe's
    clipped_sum(objective, objective.parameters(), batch, clip=Clip(1.0), performance=performance)
    assert seen == [(LENGTH, ROWS, 24)] * 2  # two layers, all steps at once


def _native() -> dict[object, object]:
    from sfumato.gradients.rules import native

    return dict(native.TABLE)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_recurrence_is_torchs_own(backwards: bool) -> None:
    """Against nn.LSTM, of which one layer in the second direction is read."""
    torch.manual_seed(1)
    layer = nn.LSTM(3, 4, bidirectional=True).double()
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    first = torch.randn(2, 2, 4, dtype=torch.float64), torch.randn(2, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        out, (_, last) = layer(x, first)
        end = "_reverse" if backwards else ""
        w_ih, w_hh, b_ih, b_hh = (
            getattr(layer, f"{n}_l0{end}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        index = int(backwards)
        states, cell = recurrence.lstm_recurrence(
            F.linear(x, w_ih, b_ih), first[0][index], first[1][index], w_hh, b_hh, backwards
        )
    torch.testing.assert_close(states, out[..., 4:] if backwards else out[..., :4])
    torch.testing.assert_close(cell, last[index])


def test_gradients_flow_through_first_and_last_states() -> None:
    """A decoder that starts from an encoder's states, and a loss on the last cell."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader, self.writer = nn.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            _, states = self.reader(x)
            out, (_, cell) = self.writer(x, states)
            return torch.cat([out.flatten(1), cell[0]], 1)

    torch.manual_seed(0)
    objective = Objective(Pair().double(), lambda module, x: module(x).square().mean(1))
    rows, params = torch.randn(ROWS, 6, 3, dtype=torch.float64), objective.parameters()
    gradients = oracle.one_by_one(objective, params, rows, ROWS)
    clip = Clip(0.05)
    truth = {n: g.sum(0) for n, g in oracle.clipped(gradients, clip).items()}
    assert oracle.relative_error(clipped_sum(objective, params, rows, clip=clip), truth) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_no_word_sees_those_after_it(name: str) -> None:
    objective, (inputs, _) = made(name)
    changed = inputs.clone()
    changed[:, 4] = (changed[:, 4] + 1) % WORDS
    with torch.no_grad():
        before, after = objective.module(inputs), objective.module(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("name", MODELS)
def test_public_gradients_are_taken_at_the_weights_given(name: str) -> None:
    objective, batch = made(name)
    moved = {n: p + 0.1 for n, p in objective.parameters().items()}
    found = Public(batch, objective=objective).gradient(moved)
    truth = {n: g.mean(0) for n, g in oracle.one_by_one(objective, moved, batch, ROWS).items()}
    assert oracle.relative_error(found, truth) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_per_word_is_that_of_mean_logits(name: str) -> None:
    objective, (inputs, targets) = made(name)
    targets = targets.clone()
    targets[0, 3:] = IGNORED
    weights = [{n: p + move for n, p in objective.parameters().items()} for move in (0.0, 0.2)]
    logits = []
    for lent in weights:
        objective.module.load_state_dict(lent)
        logits.append(objective.module(inputs).detach())
    mean = ((logits[0] + logits[1]) / 2).log_softmax(-1)
    counted = [(i, j) for i in range(ROWS) for j in range(LENGTH) if targets[i, j] != IGNORED]
    by_hand = -sum(float(mean[i, j, targets[i, j]]) for i, j in counted) / len(counted)
    assert word_loss(objective.module, weights, (inputs, targets), batch_size=2) == pytest.approx(by_hand, rel=1e-9)


def test_a_model_that_knows_nothing_has_a_perplexity_of_all_words() -> None:
    objective, rows = made("lstm")
    nothing = {n: torch.zeros_like(p) for n, p in objective.parameters().items()}
    assert math.exp(word_loss(objective.module, [nothing], rows)) == pytest.approx(WORDS)
    with pytest.raises(InvalidArgument, match="nothing to measure"):
        word_loss(objective.module, [nothing], (rows[0], torch.full_like(rows[1], IGNORED)))
    with pytest.raises(InvalidArgument, match="every next word"):
        next_word(nn.Flatten(), (torch.zeros(2, 3, 4), torch.zeros(2, 5, dtype=torch.long)))
