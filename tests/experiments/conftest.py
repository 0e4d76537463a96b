"""A small spec of its own, whose cells train in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from sfumato.experiments.spec import Spec, load_spec

SMALL = """
title = "A small table"
paper = "000"
where = "Table 0"

[data]
name = "digits"
private = 600
public = 100
hold_out = 30
test = 100

[model]
name = "mlp"
hidden = [16]

[synthesis]
rows = 40
network = "digits"
images = 200
batch_size = 20
augment_p = 0.0
steps = 2
guide_rows = 20
guide_steps = 2

[warm_up]
steps = 30
batch_size = 35

[training]
delta = 1e-4
steps = 6
batch_size = 120
learning_rate = 0.5
keep_last = 3

[smoke.training]
views = 2
augment = { pad = 1 }

[[cell]]
row = "cold"
column = "accuracy"
paper = 60
setting = "cold"
epsilon = 2

[[cell]]
row = "warm"
column = "accuracy"
paper = 70.5
setting = "warm"
epsilon = 2

[[cell]]
row = "extended"
column = "accuracy"
setting = "extended"
method = ["dope-sgd"]
epsilon = 2

[[cell]]
row = "mirror"
column = "accuracy"
setting = "warm"
method = ["mirror-descent"]
noise = 2.5
mirror = { decay_steps = 4 }

[[cell]]
row = "synthetic"
column = "accuracy"
paper = 75
data = { synthetic = true }
setting = "warm-aug"
epsilon = 2
"""


def write_spec(folder: Path, text: str = SMALL) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return load_spec(write_spec(tmp_path))
