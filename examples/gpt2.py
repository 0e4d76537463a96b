"""Your own training loop around a model of `transformers`: GPT-2, AdamW, and one line that touches private text.

    python examples/gpt2.py                            # a tiny GPT-2 over bytes, a minute or two on a CPU
    python examples/gpt2.py --lora                     # adapters alone are trained privately (needs peft)
    python examples/gpt2.py --folder gpt2 --texts dir  # yours: a model with its tokenizer, and *.txt files

By default the text is Python's own reference manual, of which a tenth of the topics counts as public: the model first
learns those, then the others at epsilon 4. It ends with the perplexity of topics that it never saw, before and after.
"""

# %% [markdown]
# # Your own training loop around a model of `transformers`
#
# Nothing of the model, the optimiser or the schedule is wrapped or replaced.

# %%
from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from sfumato import Budget, GradientMean, Objective, Planned, Private, Public
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.models.causal import next_token_loss, perplexity
from sfumato.privacy.calibration import noise_multiplier
from sfumato.warmup import warm_up

EPSILON, DELTA = 4.0, 1e-5
PUBLIC, TEST = 0.1, 0.1  # of the texts


# %% [markdown]
# ## The model, as it comes
#
# A tiny one over bytes, made here, or any causal model from a folder; with adapters of `peft` their weights alone are
# trained, and frozen ones need no noise.


# %%
def tiny_model() -> nn.Module:
    sizes = {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes)).eval()


def as_bytes(text: str) -> list[int]:
    """The one vocabulary that needs no text to be made from."""
    return list(text.encode())


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    layers = ["c_attn", "c_fc", "c_proj"]  # of GPT-2, which has Conv1D layers: their weights are transposed
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=layers, fan_in_fan_out=True)).eval()


# %% [markdown]
# ## What is protected
#
# One row is one privacy unit: a sequence of so many tokens, not the text it is cut from, nor its author. What must be
# chosen before private rows are touched, such as the clip norm, is chosen by public ones.


# %%
def rows_of(texts: list[str], encode: Any, length: int) -> Tensor:
    """Sequences of one length, one after the other; a sequence is what is protected."""
    tokens = torch.tensor([token for text in texts for token in encode(text)])
    return tokens[: len(tokens) // length * length].view(-1, length)


def usual_norm(objective: Objective, public_rows: Tensor) -> float:
    """How long the gradient of a public row is: a clip norm that costs nothing to choose."""
    each = (Public(row[None], objective=objective).gradient(objective.parameters()) for row in public_rows)
    return float(torch.stack([gradient.norm() for gradient in each]).median())


# %% [markdown]
# ## Public rows first, then the loop
#
# `private.plan` reserves all steps at once, at the noise that the budget allows. In the loop, `private.ask`, which
# `dope_sgd` is given, is all that sees private rows: it draws them by itself, so that what is charged is what is drawn.
# Its answer is an ordinary gradient; what follows is ordinary PyTorch.


# %%
def main(options: argparse.Namespace) -> tuple[float, float]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.folder is None:
        model, encode = tiny_model(), as_bytes
    else:
        model = AutoModelForCausalLM.from_pretrained(options.folder, local_files_only=True)
        encode = AutoTokenizer.from_pretrained(options.folder, local_files_only=True).encode
    model = model.to(device)

    files = sorted(options.texts.glob("*.txt")) if options.texts else []
    texts = [path.read_text() for path in files] if options.texts else [topics[name] for name in sorted(topics)]
    order = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    first, second = round(PUBLIC * len(order)), round((PUBLIC + TEST) * len(order))
    public_rows, test_rows, private_rows = (
        rows_of(part, encode, options.length) for part in (order[:first], order[first:second], order[second:])
    )

    precision = torch.bfloat16 if device == "cuda" else None
    whole = Objective(model, next_token_loss, precision)
    passes = max(1, options.passes * len(public_rows) // 32)
    adam = partial(torch.optim.AdamW, lr=options.learning_rate)
    warm_up(whole, Public(public_rows, seed=0), steps=passes, batch_size=32, optimizer=adam, progress=True)
    before = perplexity(model, test_rows, autocast=precision)

    if options.lora:
        model = with_adapters(model).to(device)
    objective = Objective(model, next_token_loss, precision)
    public = Public(public_rows, objective=objective, seed=0)
    clip = usual_norm(objective, public_rows[:32])

    budget = Budget(EPSILON, DELTA)
    private = Private(private_rows, name="texts", size=options.size, objective=objective, budget=budget)
    sampler = private.poisson(options.size / 10)
    noise = noise_multiplier(
        epsilon=EPSILON, delta=DELTA, sampler=sampler, steps=options.steps, adjacency=private.adjacency
    )
    private.plan(Planned(GradientMean, noise, sampler, options.steps))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.steps)
    for _ in track(range(options.steps), "private"):
        # The one line that touches private rows: their gradients, clipped around that of public rows, with noise.
        gradient = dope_sgd(objective.parameters(), public, private.ask, clip=clip, public_batch=64)
        gradient.write_to(model)
        optimizer.step()
        schedule.step()

    after = perplexity(model, test_rows, autocast=precision)
    print(f"Perplexity of unseen texts: {before:.2f} after public rows, {after:.2f} after private rows too.")
    print(private.statement().to_text())
    return before, after


# %% [markdown]
# ## Run it


# %%
def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="of a model and its tokenizer, as save_pretrained writes them")
    parser.add_argument("--texts", type=Path, help="a folder of *.txt files")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--size", type=int, default=5900, help="of private sequences: declared, a rough number will do")
    parser.add_argument("--passes", type=int, default=6, help="over the public rows")
    parser.add_argument("--steps", type=int, default=20, help="on private rows")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    before, after = main(parsed([] if "ipykernel" in sys.modules else None))  # a notebook has arguments of its own
    if not after < before:
        sys.exit("Private text is expected to teach the model something.")
