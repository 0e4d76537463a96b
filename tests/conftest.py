"""Shared set-up: one thread per test process, since the tests themselves run side by side."""

import torch

torch.set_num_threads(1)
