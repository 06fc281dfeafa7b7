# `make setup` once, then any of the others. They run in .venv if it is there, else in the
# environment that is active. The checks themselves are in .ci/check, which CI runs as well.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
.DEFAULT_GOAL := help
.PHONY: help setup lint types test full cover conform kinds slow gpu audit format docs-images ci

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1: /'

setup: ## an environment in .venv with all that the tests need
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt -e '.[test]'

format: ## format the code
	ruff format .

lint: ## ruff, its formatting, names, and which module may import which
	.ci/check lint

types: ## mypy
	.ci/check types

test: ## a test of each kind, on two cores
	.ci/check tests

full: ## all tests but the slow ones
	.ci/check full

cover: ## the same, and which lines of fp8stack no test runs
	pytest -q -n 2 --dist worksteal -m 'not slow' --cov --cov-report=term-missing:skip-covered

conform: ## whether this machine computes what the formats say, in short
	.ci/check conform

kinds: ## the tests as on a CPU without bf16 instructions, then as on one with them
	.ci/check kinds

slow: ## the tests that take long
	pytest -m slow -n 2 --dist worksteal

gpu: ## the tests and the benchmark for a machine with a CUDA GPU
	pytest -m gpu
	python -m bench gpu

audit: ## known vulnerabilities of the versions in constraints.txt
	.ci/check audit

docs-images: ## draw the pictures of docs/recipes.md again
	python -m bench pictures

ci: ## what CI runs: a fresh environment, then all checks
	.ci/run
