# make demo   build the Kimi K2.6 kernels for sm_120 and for the CPU, prove those of a round on the CPU, decode with a toy model there:
#             plainly, and by draft trees with the same bits
# make test   style, types, tests
#
# Both set up everything they need in .venv; they want Python 3.11 or newer with its venv module, and g++. No GPU, no CUDA toolkit.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,$(shell command -v $(name) 2>/dev/null)))
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ENGINE := specs/engines/kimi-k2.6.yaml
TOY    := specs/engines/tiny-narrow-int4.yaml
BUNDLE := tests/golden/bundles/tiny-narrow-int4.kdtr
# Kernels of the round: a CPU needs minutes for the products of the full size.
QUICK  := ^(tree_(build|rows|accept|commit)|chain_build|kv_compact|attention_plan|mla_prepare|loop_condition)$$
JOBS   ?= 2

.PHONY: demo test check format golden clean

demo: $(READY)
	$(BIN)/kdgen build $(ENGINE) --arch sm_120 --arch host
	$(BIN)/kdgen verify $(ENGINE) --device host --only '$(QUICK)'
	$(BIN)/kdgen build $(TOY) --arch host
	$(BIN)/kdgen decode $(BUNDLE) --device host --mode ar
	$(BIN)/kdgen decode $(BUNDLE) --device host --mode tree --draft oracle:0.9@1,0 --budget 16 --against ar --draw

test: $(READY) check
	$(BIN)/python -m pytest -n $(JOBS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Makes the tracked files under tests/golden/ anew; they must come out byte for byte the same unless a definition has changed.
golden: $(READY)
	$(BIN)/python tests/golden/regenerate.py

clean:
	rm -rf $(VENV) generated build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamp is written last: an interrupted set-up is done again.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/kdgen schema --write generated/schema >/dev/null
	@touch $(READY)
