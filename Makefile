# Each target sets up .venv by itself. Needs CPython 3.10+ and make; Inductor also needs a C++ compiler.
# Another version of torch or Python has an environment of its own: make test TORCH=2.15.0 PYTHON=python3.12
PYTHON ?= python3
TORCH ?=
# A part of a long suite, such as 3/40; a level of CPU, such as avx2; when no more long tests start.
PART ?=
LEVEL ?=
UNTIL ?=
# Tests start many processes, and each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))$(addprefix -,$(TORCH))
PY := $(VENV)/bin/python
# torch goes first and pinned, so that no package can pull in another build of it.
PIP := $(PY) -m pip install --quiet --constraint $(VENV)/constraints.txt
CMAKE := $(VENV)/bin/cmake -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja
PYTEST := $(PY) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-levels test-exhaustive test-functions daily bench docs tables lint gpu gpu-here sanitize test-aarch64 wheel test-wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

comma := ,
# The steps of a set-up, each with a line that says what it does.
$(VENV)/tools: constraints.txt
	@echo "set-up: $(VENV), an environment of $(PYTHON), with CMake and Ninja"
	@$(PYTHON) -m venv $(VENV)
	@sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) cmake ninja scikit-build-core
	@touch $@

$(VENV)/torch: $(VENV)/tools
	@echo "set-up: $$(grep ^torch== $(VENV)/constraints.txt), a large download the first time"
	@$(PIP) torch numpy
	@touch $@

# The native kernels of a checkout are for its CPU, or what HOP_AVX512 says (native/build.cmake).
CPU := avx512-$(or $(HOP_AVX512),$(if $(shell grep -om1 avx512f /proc/cpuinfo 2>/dev/null),ON,OFF))
$(VENV)/$(CPU): $(VENV)/tools
	@rm -f $(VENV)/avx512-*
	@touch $@

# Without a compiler pip goes on, and `hop info` says why there are no native kernels.
$(VENV)/base: $(VENV)/torch $(VENV)/$(CPU) pyproject.toml CMakeLists.txt $(wildcard native/*.* native/*/*)
	@echo "set-up: native kernels, for which a compiler works some minutes the first time"
	@$(CMAKE) -P native/build.cmake
	@echo "set-up: hop"
	@$(PIP) --no-build-isolation --editable .
	@touch $@

# Extras of hop, which is there: pip installs what they name alone.
extras = @echo "set-up: packages for $(1)"; $(PIP) 'torch-hop[$(1)]'

$(VENV)/dev: $(VENV)/base
	$(call extras,dev)
	@touch $@

# The CuTe DSL compiles GPU kernels on machines without a GPU; it is there for Linux only.
$(VENV)/cuda: $(VENV)/dev
	$(if $(filter Linux,$(shell uname)),$(call extras,cuda))
	@touch $@

$(VENV)/demo: $(VENV)/base
	$(call extras,demo)
	@touch $@

$(VENV)/bench: $(VENV)/dev $(VENV)/demo
	$(call extras,bench)
	@touch $@

$(VENV)/docs: $(VENV)/dev
	$(call extras,docs)
	@touch $@

$(VENV)/runtimes: $(VENV)/dev
	$(call extras,onnx$(comma)executorch$(comma)litert$(comma)oracles)
	$(call extras,micro) || echo "no tflite-micro for this machine: its tests skip"
	@touch $@

# TOSA's reference model pins other versions than ours: it has an environment of its own, and is run by files.
$(VENV)/tosa: $(VENV)/base
	@echo "set-up: .venv-tosa, with TOSA's reference model"
	@$(PYTHON) -m venv .venv-tosa
	@if .venv-tosa/bin/python -m pip install --quiet --no-deps --constraint constraints.txt tosa-tools; then touch $@; \
	else echo "no tosa-tools for this machine: the tests of its reference model skip"; fi

$(VENV)/wheel: $(VENV)/base
	$(call extras,wheel)
	@touch $@

FULL ?=
demo: $(VENV)/demo ## quantize a real sentence-embedding model, embed real text, export it, package it (FULL=1: compare every route, too)
	@$(PY) examples/minilm.py $(if $(FULL),--full)

test: $(VENV)/dev ## the quick suite
	@$(PYTEST) -m "not full and not exhaustive"

test-all: $(VENV)/dev $(VENV)/cuda $(VENV)/demo $(VENV)/runtimes $(VENV)/tosa ## make test, then operators, routes, formats, dtypes, GPU kernels and runtimes crossed
	@$(PYTEST) -m "not full and not exhaustive"
	@$(PYTEST) -m "full and not exhaustive" $(UNTIL:%=--until %)

test-levels: $(VENV)/dev ## what depends on the CPU, taking it for each level that it has (LEVEL=avx2: for that one)
	@$(PY) -m tests.levels $(LEVEL)

test-exhaustive: $(VENV)/dev $(VENV)/cuda $(VENV)/demo $(VENV)/runtimes $(VENV)/tosa ## what test-all takes samples of (hours; PART=3/40: one part of forty)
	@$(PYTEST) -m exhaustive $(PART:%=--part %) $(UNTIL:%=--until %)

test-functions: $(VENV)/dev ## elementary functions of all 2^32 float32, at each level that the CPU has, by checksums
	@$(PY) -W ignore -m tests.numerics.all_floats

# What takes too long for each change: one of them a day, in turn, so that none is ever old. Some minutes each.
DAY := $(shell expr $$(date +%s) / 86400)
DAILY := test,TORCH=2.11.0 test-levels,LEVEL=portable test-exhaustive sanitize demo,FULL=1 test,TORCH=2.15.0 \
	test-levels,LEVEL=avx2 test-exhaustive test-levels,LEVEL=avx512_vnni test-aarch64 test-functions
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

bench: $(VENV)/bench ## time ours against PyTorch's own; writes benchmarks/results and the pages docs/performance*.md
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

# Stages of benchmarks.gpu_stages, such as: HOP_KERNELS=kernels make gpu-here PYTHON=python3.12 STAGE="first sanitizer"
STAGE ?= all
RESULTS ?= benchmarks/results
gpu-here: ## a quarter of an hour on a GPU, with Python, torch and the folder HOP_KERNELS alone: no pip, no network
	@$(PYTHON) -m benchmarks.gpu --stage $(STAGE) --output $(RESULTS)/gpu.json

# The native kernels and their tests, without Python: a folder of build/, options of CMake, options of the compiler.
NATIVE_TESTS := $(patsubst native/tests/%.cpp,%,$(wildcard native/tests/*.cpp))
native-tests = @$(CMAKE) -G Ninja -S . -B build/$(1) --log-level=NOTICE -DHOP_NATIVE_TESTS=ON -DCMAKE_BUILD_TYPE=None $(2) \
	-DCMAKE_CXX_FLAGS="$(3)" && NINJA_STATUS="native tests, %f of %t: " $(VENV)/bin/cmake --build build/$(1)

sanitize: $(VENV)/tools ## native kernels against plain C++ under the address and undefined-behaviour sanitizers
	$(call native-tests,sanitized,-DHOP_AVX512=$(CPU:avx512-%=%),-O1 -g -fno-omit-frame-pointer -fsanitize=address$(comma)undefined -fno-sanitize-recover=all)
	@for test in $(NATIVE_TESTS); do echo $$test; build/sanitized/tests/$$test || exit 1; done

# The same for AArch64, on CPUs without and with what each level needs, which an emulator stands for.
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
AARCH64_CPUS := cortex-a53 neoverse-n1 max
AARCH64_CASES ?= 2000

aarch64-build: aarch64-tools $(VENV)/tools
	$(call native-tests,aarch64,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_CXX_COMPILER=$(AARCH64_CXX),-O2 -Werror)

.PHONY: aarch64-tools aarch64-build $(AARCH64_CPUS:%=aarch64-on-%)
aarch64-tools:
	@for tool in $(AARCH64_CXX) $(firstword $(AARCH64_RUN)); do \
		command -v $$tool >/dev/null || { echo "test-aarch64 not run: there is no $$tool (Debian: g++-aarch64-linux-gnu, qemu-user)"; exit 1; }; \
	done

$(AARCH64_CPUS:%=aarch64-on-%): aarch64-on-%: aarch64-build
	@for test in $(NATIVE_TESTS:%=build/aarch64/tests/%); do \
		case $$test in *quantize*|*update*) cases=$$(($(AARCH64_CASES) / 10));; *) cases=$(AARCH64_CASES);; esac; \
		$(AARCH64_RUN) -cpu $* $$test 0 $$cases > $$test.$*.txt 2>&1; code=$$?; \
		echo "$* $$(basename $$test): $$(cat $$test.$*.txt)"; [ $$code = 0 ] || exit 1; done

test-aarch64: $(AARCH64_CPUS:%=aarch64-on-%) ## native kernels for AArch64 against plain C++, cross-compiled and run by an emulator, 2000 products a level

# The library looks for libtorch_cpu.so in the process.
wheel: $(VENV)/wheel ## a wheel for x86-64 Linux, any Python and each torch that is supported, into dist/
	@rm -rf build/wheel dist
	@HOP_AVX512=ON $(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist build/wheel/*.whl
	@ls -l dist

test-wheel: ## install the wheel of dist/ beside torch (TORCH=2.15.0: that one) where there is no compiler, and run its kernels
	@$(PYTHON) tests/project/wheel.py $(TORCH)

clean: ## remove environments and caches
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
