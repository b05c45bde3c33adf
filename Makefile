# Each target sets up .venv by itself. Needs CPython 3.10+ and make; Inductor also needs a C++ compiler.
# Another version of torch or Python has an environment of its own: make test TORCH=2.15.0 PYTHON=python3.12
PYTHON ?= python3
TORCH ?=
# A part of a long suite, such as 3/40; a level of CPU, such as avx2.
PART ?=
LEVEL ?=
VENV := .venv$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))$(addprefix -,$(TORCH))
PY := $(VENV)/bin/python
# torch goes first and pinned, so that no package can pull in another build of it.
PIP := $(PY) -m pip install --quiet --constraint $(VENV)/constraints.txt
PYTEST := $(PY) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-levels test-exhaustive test-functions daily bench docs tables lint gpu gpu-here sanitize test-aarch64 wheel test-wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/base: pyproject.toml constraints.txt setup.py $(wildcard native/*.h native/*/*)
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) torch numpy
	@$(PIP) --editable .
	@$(PY) -m compileall -q hop # for environments that tell Python to keep no bytecode
	@touch $@

$(VENV)/dev: $(VENV)/base
	@$(PIP) --editable '.[dev]'
	@touch $@

# The CuTe DSL compiles GPU kernels on machines without a GPU; it is there for Linux only.
$(VENV)/cuda: $(VENV)/dev
	@if [ "$$(uname)" = Linux ]; then $(PIP) --editable '.[cuda]'; fi
	@touch $@

$(VENV)/demo: $(VENV)/base
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/bench: $(VENV)/dev $(VENV)/demo
	@$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/docs: $(VENV)/dev
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/runtimes: $(VENV)/dev
	@$(PIP) --editable '.[onnx,executorch,litert,oracles]'
	@$(PIP) --editable '.[micro]' || echo "no tflite-micro for this machine: its tests skip"
	@touch $@

# TOSA's reference model pins other versions than ours: it has an environment of its own, and is run by files.
$(VENV)/tosa: $(VENV)/base
	@$(PYTHON) -m venv .venv-tosa
	@if .venv-tosa/bin/python -m pip install --quiet --no-deps --constraint constraints.txt tosa-tools; then touch $@; \
	else echo "no tosa-tools for this machine: the tests of its reference model skip"; fi

$(VENV)/wheel: $(VENV)/base
	@$(PIP) --editable '.[wheel]'
	@touch $@

FULL ?=
demo: $(VENV)/demo ## quantize a real sentence-embedding model, embed real text, export it, package it (FULL=1: compare every route, too)
	@$(PY) examples/minilm.py $(if $(FULL),--full)

test: $(VENV)/dev ## every operator on every route once
	@$(PYTEST) -m "not full and not exhaustive"

test-all: $(VENV)/dev $(VENV)/cuda $(VENV)/demo $(VENV)/runtimes $(VENV)/tosa ## operators, routes, formats, dtypes, GPU kernels and runtimes crossed
	@$(PYTEST) -m "not exhaustive"

test-levels: $(VENV)/dev ## what depends on the CPU, taking it for each level that it has (LEVEL=avx2: for that one)
	@$(PY) -m tests.levels $(LEVEL)

test-exhaustive: $(VENV)/dev $(VENV)/cuda $(VENV)/demo $(VENV)/runtimes $(VENV)/tosa ## what test-all takes samples of (hours; PART=3/40: one part of forty)
	@$(PYTEST) -m exhaustive $(PART:%=--part %)

test-functions: $(VENV)/dev ## elementary functions of all 2^32 float32, at each level that the CPU has, by checksums
	@$(PY) -W ignore -m tests.numerics.all_floats

# What takes too long for each change: one of them a day, in turn, so that none is ever old. Some minutes each.
DAY := $(shell expr $$(date +%s) / 86400)
DAILY := test,TORCH=2.11.0 test-levels,LEVEL=portable test-exhaustive sanitize test,TORCH=2.15.0 \
	test-levels,LEVEL=avx2 test-exhaustive test-levels,LEVEL=avx512_vnni test-aarch64 \
	test-functions
daily: ## one of the long checks, by the date: versions of torch, levels of CPU, the sanitizers, AArch64, parts of the exhaustive suite
	@set -- $(DAILY); turn=$$(( $(DAY) % $$# )); round=$$(( $(DAY) / $$# )); shift $$turn; \
	set -- $$(echo $$1 | tr , ' '); \
	if [ $$1 = test-exhaustive ]; then set -- $$1 PART=$$(( (2 * round + (turn > 2)) % 40 ))/40; fi; \
	echo "today: make $$*"; \
	case $$2 in TORCH=*) \
		version=$${2#TORCH=}; \
		if ! $(PYTHON) -m pip index versions torch 2>/dev/null | grep -qw "$$version"; then \
			echo "not run: no index here has torch $$version"; exit 0; \
		fi;; \
	esac; \
	if [ $$1 = test-aarch64 ] && ! $(MAKE) --no-print-directory aarch64-tools; then exit 0; fi; \
	$(MAKE) "$$@"

bench: $(VENV)/bench ## time ours against PyTorch's own; writes benchmarks/results and docs/performance.md
	@$(PY) -m benchmarks

docs: $(VENV)/docs ## build the site from docs/ into build/site; warnings are errors, links and headings are checked
	@$(PY) -m sphinx -q -W --keep-going -d build/doctrees docs build/site && echo "build/site/index.html"

tables: $(VENV)/dev ## write what pages show of the code and of results: tables, the gallery, diagrams
	@$(PY) -m docs.make

lint: $(VENV)/dev $(VENV)/cuda $(VENV)/demo $(VENV)/runtimes $(VENV)/docs ## ruff and pyright
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/pyright --pythonpath $(PY)

gpu: $(VENV)/dev $(VENV)/cuda ## operators on every route, optimizers, tensors and FSDP2 on a GPU, its kernels checked and timed; fails where there is none
	@status=0; $(PY) -m pytest tests/impls/test_routes.py tests/impls/test_device.py --device cuda || status=1; \
	$(PY) -m benchmarks.gpu || status=1; exit $$status

# Stages of benchmarks.gpu_stages, such as: HOP_KERNELS=kernels make gpu-here PYTHON=python3.12 STAGE="first-tile tiles"
STAGE ?= all
gpu-here: ## what a GPU is asked first, with Python, torch and the folder HOP_KERNELS alone: no pip, no network
	@$(PYTHON) -m benchmarks.gpu --stage $(STAGE)

# The native kernels and their tests, without Python, with the sanitizers of memory and of undefined behaviour.
SANITIZED := build/sanitized
SANITIZE := -std=c++17 -Inative -O1 -g -Wno-psabi -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-omit-frame-pointer \
	-fsanitize=address,undefined -fno-sanitize-recover=all
KERNELS := $(patsubst native/%.cpp,$(SANITIZED)/%.o,$(filter-out native/tests/% native/torch/%,$(wildcard native/*/*.cpp)))
NATIVE_TESTS := $(patsubst native/tests/%.cpp,$(SANITIZED)/tests/%,$(wildcard native/tests/*.cpp))

$(SANITIZED)/%.o: native/%.cpp
	@mkdir -p $(@D)
	@$(CXX) $(SANITIZE) -MMD -c $< -o $@

$(SANITIZED)/tests/%: $(SANITIZED)/tests/%.o $(KERNELS)
	@$(CXX) $(SANITIZE) $^ -lpthread -o $@

.PRECIOUS: $(SANITIZED)/%.o $(SANITIZED)/tests/%.o
-include $(KERNELS:.o=.d) $(wildcard $(SANITIZED)/tests/*.d)

sanitize: $(NATIVE_TESTS) ## native kernels against plain C++ under the address and undefined-behaviour sanitizers
	@for test in $^; do echo $$test; $$test || exit 1; done

# The same for AArch64, on CPUs without and with what each level needs, which an emulator stands for.
AARCH64 := build/aarch64
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
AARCH64_CPUS := cortex-a53 neoverse-n1 max
AARCH64_CASES ?= 2000
AARCH64_FLAGS := -std=c++17 -Inative -O2 -Wall -Wextra -Werror -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized \
	-ffp-contract=off -fno-math-errno -fno-trapping-math
AARCH64_KERNELS := $(KERNELS:$(SANITIZED)/%=$(AARCH64)/%)
AARCH64_TESTS := $(NATIVE_TESTS:$(SANITIZED)/%=$(AARCH64)/%)

$(AARCH64)/%.o: native/%.cpp
	@mkdir -p $(@D)
	@$(AARCH64_CXX) $(AARCH64_FLAGS) -MMD -c $< -o $@

$(AARCH64)/tests/%: $(AARCH64)/tests/%.o $(AARCH64_KERNELS)
	@$(AARCH64_CXX) $^ -lpthread -o $@

.PRECIOUS: $(AARCH64)/%.o $(AARCH64)/tests/%.o
-include $(AARCH64_KERNELS:.o=.d) $(wildcard $(AARCH64)/tests/*.d)

.PHONY: aarch64-tools $(AARCH64_CPUS:%=aarch64-on-%)
aarch64-tools:
	@for tool in $(AARCH64_CXX) $(firstword $(AARCH64_RUN)); do \
		command -v $$tool >/dev/null || { echo "test-aarch64 not run: there is no $$tool (Debian: g++-aarch64-linux-gnu, qemu-user)"; exit 1; }; \
	done

$(AARCH64_CPUS:%=aarch64-on-%): aarch64-on-%: $(AARCH64_TESTS)
	@for test in $^; do \
		case $$test in *quantize*|*update*) cases=$$(($(AARCH64_CASES) / 10));; *) cases=$(AARCH64_CASES);; esac; \
		$(AARCH64_RUN) -cpu $* $$test 0 $$cases > $$test.$*.txt 2>&1; code=$$?; \
		echo "$* $$(basename $$test): $$(cat $$test.$*.txt)"; [ $$code = 0 ] || exit 1; done

test-aarch64: aarch64-tools ## native kernels for AArch64 against plain C++, cross-compiled and run by an emulator, 2000 products a level
	@$(MAKE) --no-print-directory $(AARCH64_CPUS:%=aarch64-on-%)

# What setuptools left of earlier builds would go into the wheel. The library looks for libtorch_cpu.so in the process.
wheel: $(VENV)/wheel ## a wheel for x86-64 Linux, any Python and each torch that is supported, into dist/
	@rm -rf build/lib* build/bdist* build/wheel dist
	@$(PY) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	@PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist build/wheel/*.whl
	@ls -l dist

test-wheel: ## install the wheel of dist/ beside torch (TORCH=2.15.0: that one) where there is no compiler, and run its kernels
	@$(PYTHON) tests/project/wheel.py $(TORCH)

clean: ## remove environments and caches
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
