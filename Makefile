# The two commands to know: make demo, make test. Both set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch first and alone, pinned: asked for by another package it would bring several gigabytes of CUDA.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types site check faults bench slow gpu bench-gpu federated mutants services services-stop postgres wheel clean

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(INSTALL) -e ".[test,models,docs]"
	@touch $@

$(VENV)/.postgres: $(VENV)/.test
	$(INSTALL) -e ".[test,models,docs,postgres]"
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(INSTALL) -e ".[test,models,docs,bench]"
	@touch $@

demo: $(VENV)/.core  ## train on embedded digits at epsilon 2: DP-SGD cold and warm, mirror descent, DOPE-SGD
	$(BIN)/sfumato demo

test: $(VENV)/.test  ## everything CI runs; what needs one core each goes side by side
	$(MAKE) --output-sync=target -j 2 lint types site
	$(MAKE) check

site: $(VENV)/.test  ## the documentation as a site, build/site/index.html; a broken link is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/site

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

check: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

faults: $(VENV)/.test  ## kill -9 at 200 random moments of trainings with resume, then four spenders of one budget
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.kill --kills 200
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.spend --where file --seconds 60
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.table --times 10 --kills 0

services: $(VENV)/.postgres  ## start PostgreSQL for the tests, from Debian's packages: apt-get install postgresql
	$(BIN)/python -m tests.faults.postgres start

services-stop:
	$(BIN)/python -m tests.faults.postgres stop

postgres: services  ## the ledger in a database: tests, and 16 spenders for a minute while the server is killed twice
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m postgres tests/privacy tests/faults tests/cli/test_budget.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.spend --where postgres --seconds 60
	$(MAKE) services-stop

bench: $(VENV)/.bench  ## the engine beside Opacus and Opake, interleaved
	$(BIN)/python -m benchmarks.engine --out benchmarks/results/engine.json
	$(BIN)/python -m benchmarks.mnist_opacus --out benchmarks/results/mnist_opacus.json
	$(BIN)/python -m benchmarks.page

federated: build/flower/.ready  ## federated tests with Flower: its simulation, and real processes on loopback
	OMP_NUM_THREADS=1 build/flower/bin/python -m pytest tests/federated

# An environment of its own: Flower wants older versions of typer and rich.
build/flower/.ready: pyproject.toml
	$(PYTHON) -m venv build/flower
	build/flower/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	build/flower/bin/python -m pip install --quiet --disable-pip-version-check -e . "flwr[simulation]>=1.41,<1.43" pytest pytest-xdist
	@touch $@

mutants: $(VENV)/.test  ## every known way to leak, and the audit that finds it: the table, and build/mutants.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

gpu: $(VENV)/.test  ## what only a GPU can show: kernels compiled, CUDA graphs, noise
	$(BIN)/python -m pytest -m "gpu or not gpu" tests/kernels tests/gradients/test_kernels.py \
	  tests/gradients/test_cuda.py tests/privacy/test_noise.py tests/test_nn.py tests/test_augment.py \
	  tests/test_augment_policies.py tests/test_ensembles.py tests/test_warmup.py tests/synthesis

bench-gpu: $(VENV)/.bench  ## the table of docs/benchmarks.md, on this machine's GPU
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu.json
	$(BIN)/python -m benchmarks.page

wheel: $(VENV)/.test  ## build the wheel and try it in a fresh environment
	rm -rf build/wheel && $(BIN)/python -m build --wheel --outdir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/sfumato account --dataset-size 48000 --batch-size 4096 --steps 352 --delta 1e-5 --epsilon 2 --json

clean:
	rm -rf $(VENV) build dist runs
