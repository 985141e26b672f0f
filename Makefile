# The two commands of the README. Each works alone in a fresh clone, with Python >= 3.11 and a package index.
.PHONY: demo test site dist

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INPUTS := pyproject.toml constraints.txt

demo: $(VENV)/.demo
	@$(BIN)/tilefit check hf:gpt2 --gpu h200 --batch 16 --seq 1024 --amp bf16; status=$$?; test $$status -le 1

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

# The documentation, in build/site; a warning fails it.
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Wheel and sdist, in dist; made twice, they are the same.
dist: $(VENV)/.dev
	rm -rf dist build/again
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m hatchling build -d build/again
	cmp dist/*.whl build/again/*.whl && cmp dist/*.tar.gz build/again/*.tar.gz

$(BIN)/python:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Creating $(VENV) with $$python"; exec $$python -m venv $(VENV); \
		fi; \
	done; echo "tilefit needs Python 3.11 or newer; name it with: make PYTHON=/path/to/python3.11" >&2; exit 1

# torch goes first and alone: whatever comes later then finds it already there, and cannot replace it.
$(VENV)/.torch: $(INPUTS) | $(BIN)/python
	@echo "Installing torch (the first time takes a minute)"
	@$(PIP) install -c constraints.txt torch
	@touch $@

$(VENV)/.demo: $(VENV)/.torch
	@echo "Installing tilefit and transformers"
	@$(PIP) install -c constraints.txt -e '.[transformers]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@echo "Installing tilefit and what its tests need"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(INPUTS) | $(BIN)/python
	@echo "Installing what the site is built with"
	@$(PIP) install -c constraints.txt 'mkdocs-material' 'mkdocstrings[python]'
	@touch $@
