# Every target makes what it needs, from a fresh clone on: `make help` lists them.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# pip takes the versions that were tested from here; pyproject.toml says which ones may work.
PIN := --constraint .ci/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint bench table1 table2 table3 figures clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## Make the environment .venv with lapbench and its development tools

$(READY): pyproject.toml .ci/constraints.txt
	@echo "Installing into $(VENV) (torch and about 90 other packages; some minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) torch torchvision
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) --editable '.[dev]'
	@touch $@

quickstart: $(READY) ## Train 0, 2 and 4 Laplacian heads on 3 seeds of the bundled digits and print the table
	$(BIN)/lapbench sweep quickstart --jobs $(JOBS)

table1: $(READY) ## Train and print Table 1: ViT-B on CIFAR-10, CIFAR-100 and ImageNet (needs the data, and GPUs)
	$(BIN)/lapbench sweep table1

table2: $(READY) ## Train and print Table 2: d20 language models on FineWeb-Edu (needs the data, and GPUs)
	$(BIN)/lapbench sweep table2

table3: $(READY) ## Train and print Table 3: DINO on ImageNet, linear probe, k-NN, ADE20K (needs the data, and GPUs)
	$(BIN)/lapbench sweep table3

figures: $(READY) ## Draw the token geometry of the small sweeps, after training what is missing of them
	$(BIN)/lapbench sweep quickstart --jobs $(JOBS)
	$(BIN)/lapbench compare runs/quickstart
	$(BIN)/lapbench sweep geometry_tiny --jobs $(JOBS)
	$(BIN)/lapbench compare runs/geometry_tiny
	$(BIN)/lapbench sweep language_tiny --jobs $(JOBS)
	$(BIN)/lapbench compare runs/language_tiny
	$(BIN)/lapbench sweep ssl_tiny --jobs $(JOBS)
	$(BIN)/lapbench compare runs/ssl_tiny

test: $(READY) ## Run the tests
	$(BIN)/python -m pytest --numprocesses $(JOBS)

lint: $(READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) ## Measure speed and memory, as ratios taken in one run
	$(BIN)/python -m tests.benchmarks

clean: ## Delete the environment and caches; data/ and runs/ stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
