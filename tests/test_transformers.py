"""GPT-2 of `transformers`, whole and with LoRA of `peft`, under `train` and every method as they are."""

from __future__ import annotations

import copy
import importlib.util
import json
import lzma
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import gpt2_finetune
from sfumato import Budget, NotPrivateSeed, Objective, Private, Public, train
from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.method import algorithm
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.algorithms.weight_multiplicity import weight_multiplicity
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.gradients import Clip, Performance, clipped_sum
from sfumato.models.causal import next_token_loss, perplexity
from sfumato.questions import GradientMean
from tests.gradients import oracle
from tests.gradients.test_engine import TOLERANCE, clip_for, median_norm, total

transformers = pytest.importorskip("transformers", reason="needs the 'models' extra")
ROOT = Path(__file__).parent.parent
TOKENS, LENGTH, ROWS = 40, 8, 5
SEED = NotPrivateSeed(1)
METHODS: dict[str, Callable[[float], Any]] = {
    "dp_sgd": lambda clip: partial(dp_sgd, clip=clip),
    "dope_sgd": lambda clip: partial(dope_sgd, clip=clip, public_batch=4),
    "shrunk_origin": lambda clip: ShrunkOrigin(origin_clip=clip, public_batch=4, method=partial(dp_sgd, clip=clip)),
    "mirror_descent": lambda clip: MirrorDescent(decay_steps=4, public_batch=4, method=partial(dp_sgd, clip=clip)),
    "ada_dps": lambda clip: AdaDPS(public_batch=4, method=partial(dp_sgd, clip=clip)),
    "weight_multiplicity": lambda clip: partial(weight_multiplicity, views=2, radius=0.1, public_batch=3, clip=clip),
}


def gpt2(*, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).to(dtype).eval()
    return model


def with_lora(model: nn.Module, *, begun: bool = True, **options: Any) -> Any:
    """`begun`: B is not zero any more, so that A has a gradient too."""
    peft = pytest.importorskip("peft", reason="needs peft, of the 'models' extra")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["c_attn", "c_fc", "c_proj"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
        **options,
    )
    dtype = next(model.parameters()).dtype
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, p in adapted.named_parameters():
        if p.requires_grad and dtype == torch.float64:
            p.data = p.data.double()
        if begun and "lora_B" in name:
            p.data.copy_(torch.rand(p.shape, generator=generator) - 0.5)
    return adapted.eval()


WHOLE_AND_LORA = {"whole": lambda **o: gpt2(**o), "lora": lambda **o: with_lora(gpt2(**o))}


def sequences(count: int, seed: int) -> Tensor:
    return torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def padded(ids: Tensor, lengths: list[int], *, left: bool = False) -> dict[str, Tensor]:
    mask = (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask.flip(1) if left else mask}


def their_loss(model: nn.Module, row: Tensor) -> float:
    """What `transformers` itself says of one sequence; it takes logarithms in float32."""
    with torch.no_grad():
        return float(model(row[None], labels=row[None]).loss)


# ------------------------------------------------------------------------------------------------ loss, perplexity


def test_the_loss_is_that_of_transformers_row_by_row() -> None:
    model, ids = gpt2(), sequences(ROWS, 1)
    theirs = [their_loss(model, row) for row in ids]
    assert next_token_loss(model, ids).tolist() == pytest.approx(theirs, rel=1e-6)


def test_padding_counts_for_nothing() -> None:
    """A padded row is worth what the same row is worth without its padding, which may hold anything."""
    model, ids, lengths = gpt2(), sequences(ROWS, 1), [8, 6, 4, 3, 2]
    batch = padded(ids, lengths)
    theirs = [their_loss(model, row[:n]) for row, n in zip(ids, lengths, strict=True)]
    assert next_token_loss(model, batch).tolist() == pytest.approx(theirs, rel=1e-6)
    other = torch.where(batch["attention_mask"] == 0, (ids + 1) % TOKENS, ids)
    assert not torch.equal(other, ids)
    assert next_token_loss(model, {**batch, "input_ids": other}).tolist() == pytest.approx(theirs, rel=1e-6)


def test_padding_on_the_left_predicts_nothing_either() -> None:
    model, ids, lengths = gpt2(), sequences(2, 1), [8, 3]
    batch = padded(ids, lengths, left=True)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    theirs = [their_loss(model, row[-n:]) for row, n in zip(ids, lengths, strict=True)]
    assert next_token_loss(model, batch).tolist() == pytest.approx(theirs, rel=1e-6)


def test_labels_say_what_is_to_be_predicted() -> None:
    """A prompt of three tokens that is not learnt: only what follows counts."""
    model, ids = gpt2(), sequences(ROWS, 1)
    labels = ids.clone()
    labels[:, :3] = -100
    log_p = F.log_softmax(model(ids).logits, -1)
    answers = [-log_p[:, t - 1].gather(1, ids[:, t : t + 1])[:, 0] for t in range(3, LENGTH)]
    found = next_token_loss(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(found, torch.stack(answers).mean(0))


def test_a_row_with_nothing_to_predict_has_no_loss_and_no_gradient() -> None:
    model = gpt2()
    objective = Objective(model, next_token_loss)
    params, batch = objective.parameters(), padded(sequences(4, 1), [8, 1, 5, 0])
    losses = next_token_loss(model, batch)
    assert losses[[1, 3]].eq(0).all()
    assert losses[[0, 2]].gt(1).all()
    both = clipped_sum(objective, params, batch, clip=Clip(0.5))
    kept = clipped_sum(objective, params, {n: t[[0, 2]] for n, t in batch.items()}, clip=Clip(0.5))
    assert oracle.relative_error(both, kept) < 1e-12


def test_perplexity_weighs_tokens_alike() -> None:
    model, ids, lengths = gpt2(), sequences(ROWS, 1), [8, 6, 4, 3, 2]
    each = [their_loss(model, row[:n]) for row, n in zip(ids, lengths, strict=True)]
    weights = [n - 1 for n in lengths]
    wanted = math.exp(sum(x * n for x, n in zip(each, weights, strict=True)) / sum(weights))
    for size in (1, 2, 100):
        assert perplexity(model, padded(ids, lengths), batch_size=size) == pytest.approx(wanted, rel=1e-6)
    assert abs(wanted - math.exp(sum(each) / ROWS)) > 1e-3  # the mean over rows is another number


def test_perplexity_is_without_dropout_and_leaves_the_mode() -> None:
    model, ids = gpt2(dropout=0.5), sequences(ROWS, 1)
    quiet = perplexity(model, ids)
    model.train()
    assert perplexity(model, ids) == quiet
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize(
    ("rows", "options", "named"),
    [
        ((torch.zeros(2, 3).long(), torch.zeros(2)), {}, "input_ids"),
        ({"tokens": torch.zeros(2, 3).long()}, {}, "input_ids"),
        (torch.zeros(2, 1).long(), {}, "two tokens"),
        (torch.zeros(2, 3).long(), {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_what_perplexity_cannot_read_is_refused(rows: Any, options: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        perplexity(gpt2(), rows, **options)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_adapters_have_exact_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    objective = Objective(with_lora(gpt2(dtype=dtype), **options), next_token_loss)
    params, batch = objective.parameters(), padded(sequences(ROWS, 1), [8, 8, 5, 3, 2])
    assert params
    assert all("lora_" in name for name in params)
    gradients = oracle.one_by_one(objective, params, batch, ROWS)
    assert all(g.any() for g in gradients.values())
    for mode in ("plain", "origin+scale"):
        clip = clip_for(mode, params, median_norm(gradients))
        truth = total(oracle.clipped(gradients, clip))
        for performance in (Performance(), Performance(ghost=False, micro_batch=2)):
            found = clipped_sum(objective, params, batch, clip=clip, performance=performance)
            assert oracle.relative_error(found, truth) <= TOLERANCE[dtype], (mode, performance)


def test_frozen_weights_may_be_bfloat16() -> None:
    """As large models are loaded: peft keeps the adapters in float32, and that is what is bounded."""
    objective = Objective(with_lora(gpt2(dtype=torch.bfloat16)), next_token_loss)
    params, batch = objective.parameters(), sequences(ROWS, 1)
    assert {p.dtype for p in params.values()} == {torch.float32}
    assert {p.dtype for p in objective.frozen()} == {torch.bfloat16}
    gradients = oracle.one_by_one(objective, params, batch, ROWS)
    clip = clip_for("origin", params, median_norm(gradients))
    truth = total(oracle.clipped(gradients, clip))
    assert oracle.relative_error(clipped_sum(objective, params, batch, clip=clip), truth) < 0.02


@pytest.mark.parametrize("kind", WHOLE_AND_LORA)
def test_bfloat16_changes_the_gradient_a_little(kind: str) -> None:
    model, batch = WHOLE_AND_LORA[kind](dtype=torch.float32), sequences(ROWS, 1)
    precise, half = (Objective(model, next_token_loss, autocast) for autocast in (None, torch.bfloat16))
    params = precise.parameters()
    truth = clipped_sum(precise, params, batch, clip=Clip(0.1))
    error = oracle.relative_error(clipped_sum(half, params, batch, clip=Clip(0.1)), truth)
    assert 1e-5 < error < 0.1  # it was computed in bfloat16, and well


def test_dropout_of_adapters_is_each_rows_own() -> None:
    """In train mode equal rows get different masks; in eval mode they have equal gradients."""
    model = with_lora(gpt2(), lora_dropout=0.5)
    objective, row = Objective(model, next_token_loss), sequences(1, 1)
    twice = row.expand(2, -1).contiguous()

    def of_one_and_two() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(3)
        two = clipped_sum(objective, objective.parameters(), twice, clip=Clip(1e9))
        torch.manual_seed(3)
        one = clipped_sum(objective, objective.parameters(), row, clip=Clip(1e9))
        return {n: 2 * g for n, g in one.items()}, two

    assert oracle.relative_error(*of_one_and_two()) < 1e-9
    model.train()
    assert oracle.relative_error(*of_one_and_two()) > 0.01


def test_gradient_checkpointing_is_refused_before_anything_is_spent() -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    private = door(Objective(model.train(), next_token_loss), seed=None)
    with pytest.raises(SfumatoError, match="CheckpointError"):
        train(model, private=private, steps=1, batch_size=5, progress=False)
    assert private.statement().epsilon == 0


# ------------------------------------------------------------------------------------------------ methods


@pytest.mark.parametrize("name", METHODS)
def test_every_method_asks_for_what_autograd_finds(name: str) -> None:
    """Among the adapters: the question of its second step, with all that public rows put in, row by row."""
    objective, data = Objective(with_lora(gpt2()), next_token_loss), sequences(ROWS, 1)
    params, public = objective.parameters(), Public(sequences(6, 2), objective=objective, seed=0)
    clip = median_norm(oracle.one_by_one(objective, params, data, ROWS))
    asked: list[GradientMean] = []

    def ask(q: GradientMean) -> Any:
        asked.append(q)
        found = clipped_sum(objective, q.params, data, clip=q.clip, views=q.views, offsets=q.offsets)
        return q.release(found, ROWS)

    way = algorithm(METHODS[name](clip))
    state = way.init(params)
    for _ in range(2):
        update, state = way.step(state, params, public, ask)
        params = {n: p - 0.1 * update[n] for n, p in params.items()}

    q = asked[-1]
    places = [q.params] if q.offsets is None else [{n: p + v[n] for n, p in q.params.items()} for v in q.offsets]
    gradients = oracle.mean_of([oracle.one_by_one(objective, at, data, ROWS) for at in places])
    truth = total(oracle.clipped(gradients, q.clip))
    ours = clipped_sum(objective, q.params, data, clip=q.clip, views=q.views, offsets=q.offsets)
    assert oracle.relative_error(ours, truth) < 1e-9
    assert set(update) == set(params)


def door(objective: Objective, *, seed: NotPrivateSeed | None = SEED) -> Private:
    budget = Budget(4.0, 1e-3)
    return Private(sequences(60, 5), name="letters", size=60, objective=objective, budget=budget, seed=seed)


@pytest.mark.parametrize(("kind", "name"), [*(("whole", name) for name in METHODS), ("lora", "dope_sgd")])
def test_train_runs_every_method_and_leaves_frozen_weights(kind: str, name: str) -> None:
    model = WHOLE_AND_LORA[kind](dtype=torch.float32)
    objective = Objective(model, next_token_loss)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = train(
        model,
        private=door(objective),
        public=Public(sequences(6, 2), objective=objective, seed=0),
        test=Public(sequences(6, 3)),
        method=METHODS[name](1.0),
        steps=2,
        batch_size=10,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        progress=False,
    )
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(objective.parameters())
    assert run.metrics["test_loss"] == pytest.approx(math.log(perplexity(model, sequences(6, 3))), rel=1e-5)
    assert run.steps_taken == 2


def test_a_model_from_a_local_folder_learns(tmp_path: Path) -> None:
    """Saved, loaded without a network, trained with little noise on rows that all count upwards."""
    gpt2(dtype=torch.float32).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert model.lm_head.weight is model.transformer.wte.weight  # still tied
    counting = (torch.arange(200)[:, None] + torch.arange(LENGTH)) % TOKENS
    objective = Objective(model, next_token_loss)
    private = Private(counting, name="numbers", size=200, objective=objective, budget=Budget(1e3, 1e-4))
    before = perplexity(model, counting[:40])
    train(
        model,
        private=private,
        noise=0.3,
        steps=40,
        batch_size=100,
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        progress=False,
    )
    assert perplexity(model, counting[:40]) < before / 4


# ------------------------------------------------------------------------------------------------ adapters


def test_trained_adapters_are_merged_and_saved(tmp_path: Path) -> None:
    """The merged model says what the adapted one says; the file holds the adapters alone, and they fit the base."""
    peft = pytest.importorskip("peft", reason="needs peft, of the 'models' extra")
    model = with_lora(gpt2(dtype=torch.float32), begun=False)
    ids, base = sequences(ROWS, 9), gpt2(dtype=torch.float32)
    torch.testing.assert_close(model(ids).logits, base(ids).logits)
    objective = Objective(model, next_token_loss)
    train(
        model,
        private=door(objective),
        steps=2,
        batch_size=20,
        optimizer=partial(torch.optim.AdamW, lr=0.05),
        progress=False,
    )
    trained = model(ids).logits
    assert (trained - base(ids).logits).abs().max() > 0.1

    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in objective.parameters().values())
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, local_files_only=True).eval()
    torch.testing.assert_close(again(ids).logits, trained)
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(ids).logits, trained, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ benchmark


def articles_like_wikitext(count: int) -> str:
    """Each of its own words."""
    return "".join(
        f" = Title {i} = \n \n = = Section = = \n" + f" word{i}x followed by word{i}y .\n" * 9 for i in range(count)
    )


def test_articles_are_split_whole() -> None:
    text = articles_like_wikitext(50)
    texts = gpt2_finetune.articles(text)
    assert "".join(texts) == text
    assert len(texts) == 50
    public, private = gpt2_finetune.split(texts, 0.1)
    assert sorted(public + private) == sorted(texts)
    assert 0.1 <= len("".join(public)) / len(text) < 0.13


def test_the_tokenizer_knows_public_text_only() -> None:
    pytest.importorskip("tokenizers", reason="needs the 'models' extra")
    public, private = gpt2_finetune.split(gpt2_finetune.articles(articles_like_wikitext(50)), 0.1)
    pairs = gpt2_finetune.tokenizer(public, 500)
    rows = gpt2_finetune.rows_of(private, pairs, 16)
    assert rows.shape[1] == 16
    assert "followed" in pairs.decode(rows[0].tolist() + rows[1].tolist())  # bytes know every text
    longest = max(re.findall(r"word\d+x", "".join(private)), key=len)
    seen = max(re.findall(r"word\d+x", "".join(public)), key=len)
    assert len(pairs.encode(" " + longest).ids) > len(pairs.encode(" " + seen).ids)


def test_steps_are_as_many_as_fit() -> None:
    scale = gpt2_finetune.SCALES["smoke"]
    rows = {name: {"tokens_per_s": scale.batch * scale.sizes["length"] / 2} for name in ("plain", "dp_sgd")}  # 2 s each
    assert [gpt2_finetune.affordable(scale, [rows, rows], s) for s in (None, 1e9, 21.0, 0.1)] == [8, 8, 5, 1]


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="needs peft, of the 'models' extra")
    (tmp_path / "text").mkdir()
    for part, count in (("train", 400), ("test", 4)):
        packed = lzma.compress(articles_like_wikitext(count).encode(), preset=0)
        (tmp_path / "text" / f"wikitext-2.{part}.txt.xz").write_bytes(packed)
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    small = replace(gpt2_finetune.SCALES["smoke"], timed=4, rounds=1, private=200, test=20)
    monkeypatch.setitem(gpt2_finetune.SCALES, "smoke", small)
    out = tmp_path / "rows.json"
    options = ["--steps", "1", "--batch", "20", "--passes", "1", "--device", "cpu", "--out", str(out)]
    rows = gpt2_finetune.main(options)
    stored = json.loads(out.read_text())
    assert stored["rows"] == rows
    assert stored["device"] == "cpu"
    assert stored["scale"]["batch"] == 20
    kinds = [(r["method"], r["lora"], r["epsilon"]) for r in rows]
    names = [("public_only", 0.0), ("dp_sgd", 1.0), ("dope_sgd", 1.0)]
    assert kinds == [(name, lora, epsilon) for lora in (False, True) for name, epsilon in names]
    for r in rows:
        assert r["tokens_per_s"] > 0
        assert 1 < r["perplexity"] < 1000
        assert (r["ratio"] == 1) == (r["method"] == "public_only")
    assert len({r["perplexity"] for r in rows}) == 5  # the two of public text alone are one model
    assert gpt2_finetune.table(rows).count("\n") == 7
    assert gpt2_finetune.markdown(stored).startswith(gpt2_finetune.table(rows))


# ------------------------------------------------------------------------------------------------ example, page


def test_the_example_runs_on_a_folder_of_yours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the 'models' extra")
    texts = [f"Letter {i} of many, which says that {i} and {i + 1} follow each other.\n" * 6 for i in range(30)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(text)
    pairs = tokenizers.ByteLevelBPETokenizer()
    pairs.train_from_iterator(texts[:3], vocab_size=300, show_progress=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=pairs._tokenizer).save_pretrained(tmp_path)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=pairs.get_vocab_size(), **sizes))
    model.save_pretrained(tmp_path)

    found = importlib.util.spec_from_file_location("example", ROOT / "examples" / "gpt2.py")
    assert found is not None
    assert found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    numbers = {"--length": "16", "--size": "400", "--passes": "1", "--steps": "2"}
    files = {"--folder": str(tmp_path), "--texts": str(tmp_path)}
    options = [word for pair in (numbers | files).items() for word in pair]
    before, after = example.main(example.parsed(options))
    assert before != after
    assert "epsilon = 4 " in capsys.readouterr().out


def test_the_pages_example_of_adapters_runs() -> None:
    """Apart from the others, since it needs peft."""
    pytest.importorskip("peft", reason="needs peft, of the 'models' extra")
    text = (ROOT / "docs" / "transformers.md").read_text()
    first, adapters = (
        re.search(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for kind in ("python", "py")
    )
    assert first is not None
    assert adapters is not None
    names: dict[str, Any] = {}
    for block in (first, adapters):
        exec(compile(block[1], "docs/transformers.md", "exec"), names)
    assert names["adapted"].peft_config
