"""Faults injected into real trainings. One thread, said before torch is loaded: a forked child inherits no others."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
