# Everything sets itself up: `make train` and `make test` work in a fresh clone on a fresh machine.
#   make train   trains the GPT on two ranks and shows the table
#   make test    all tests, C++ and Python; ends with one summary
#   make build   library, Python package, tests, examples, benchmarks
#   make bench   the tables of docs/benchmarks.md
#   make lint    formatting and style, as CI checks them
#   make clean   removes what was built (not .venv, data/ and runs/)

RANKS ?= 2
VENV ?= .venv
export VENV
run := $(VENV)/bin/unisono run -n $(RANKS)

.PHONY: train test build bench lint clean data
.DELETE_ON_ERROR:

setup := $(VENV)/.ready
$(setup): tools/setup.sh tools/requirements.txt tools/requirements-mpi.txt
	@tools/setup.sh
	@touch $@

data: $(setup)
	@$(VENV)/bin/python tools/fetch_data.py

train: $(setup) data
	@tools/build.sh train
	$(run) build/release/examples/gpt $(ARGS)
	@$(VENV)/bin/python tools/plot_run.py runs/gpt

build: $(setup)
	@tools/build.sh

test: $(setup) data
	@tools/build.sh
	@tools/build.sh sanitize
	UNISONO_BUILD_DIR=$(CURDIR)/build/release UNISONO_TEST_MPI=$(abspath $(VENV))/mpich/bin PATH="$(abspath $(VENV))/bin:$$PATH" \
	  $(VENV)/bin/python -m pytest -q $(ARGS)

bench: $(setup)
	@tools/build.sh
	$(VENV)/bin/unisono bench all-reduce $(ARGS)
	$(VENV)/bin/unisono bench step $(ARGS)

lint: $(setup)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tools/requirements-lint.txt
	@VENV=$(VENV) tools/lint.sh

clean:
	rm -rf build
