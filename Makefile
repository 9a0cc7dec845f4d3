# make demo   a video and its report in outputs/, made on the CPU or on the GPU that is there
# make test   ruff and every test
# make lint   ruff alone
# make docs   the pages and the API reference as HTML in outputs/docs; fails on a link that leads nowhere
# Each sets itself up in .venv. Set TORCH_INDEX_URL before the first call to take torch from another index.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX_URL ?=
DEMO_PROMPT ?= a red circle moving right on a navy background

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
SETTINGS := setup.py pyproject.toml constraints.txt

# Threads that spin while they wait cost a machine with other work far more than they save an idle one.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/base.stamp
	$(BIN)/visual-gen generate --config configs/wan_shapes_t2v.yaml --prompt "$(DEMO_PROMPT)" --output outputs/demo.mp4

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .

docs: $(VENV)/test.stamp
	$(BIN)/python -m docs.build outputs/docs

clean:
	rm -rf $(VENV) build *.egg-info outputs

# What must be there before the project itself can be installed: its build tool, without a build environment of its own
# (which would ignore constraints.txt), and torch, if it comes from elsewhere. Its dependencies do not: an index for torch
# need not have the versions that constraints.txt pins.
$(VENV)/tools.stamp: $(SETTINGS)
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) setuptools wheel
	$(if $(TORCH_INDEX_URL),$(PIP) --no-deps --index-url "$(TORCH_INDEX_URL)" torch)
	touch $@

$(VENV)/base.stamp: $(VENV)/tools.stamp
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/test.stamp: $(VENV)/tools.stamp
	$(PIP) --no-build-isolation -e '.[dev,fa4]'
	touch $(VENV)/base.stamp $@
