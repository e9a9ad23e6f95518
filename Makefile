# make demo           compare strategies on embedded data and write a report
# make test           lint, types, import rules, all tests, and the documentation's site
# make test-fast      the tests of the daily loop: no worker processes, no Flower, no browser
# make docs           build the documentation's site into site/; open site/index.html
# make release-check  build sdist and wheel, and try the wheel in a clean environment
# make peers          install other simulators next to fednorm, to time them
# make audit          look up known vulnerabilities of the installed versions; needs the network
PYTHON ?= python3
BIN := .venv/bin
OUT ?= results/demo
comma := ,

.PHONY: demo test test-fast pytest lint docs release-check peers audit clean
.DEFAULT_GOAL := demo

# Made anew when the project's requirements change; otherwise a second call does nothing. Modules are
# compiled by all cores: pip uses one.
define install
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fednorm needs Python 3.11 or newer; call make with PYTHON=/path/to/python3.11")'
test -x $(BIN)/python || $(PYTHON) -m venv .venv
@echo "Installing $(1) into .venv: a few minutes the first time, as torch is large."
$(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt --editable $(1)
$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # some packages hold files for other Pythons
touch $(2)
endef

# What the demonstration needs; no developer's tools.
.venv/demo: pyproject.toml constraints.txt
	$(call install,'.',$@)

# The tools as well, but not Flower.
.venv/installed: pyproject.toml constraints.txt
	$(call install,'.[dev]',.venv/demo $@)

# Everything: Flower, which the types and tests of its engine need, and the site.
.venv/flower: pyproject.toml constraints.txt
	$(call install,'.[dev$(comma)docs$(comma)flower]',.venv/demo .venv/docs .venv/installed $@)

.venv/docs: pyproject.toml constraints.txt
	$(call install,'.[docs]',.venv/demo $@)

demo: .venv/demo
	$(BIN)/fednorm compare --out $(OUT)

lint: .venv/flower
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests start many processes, which must not compile the package again and again. One test process
# more than cores, as some wait for others; fast ones do not.
CORES := $(shell nproc 2>/dev/null || echo 2)
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder

pytest: .venv/flower
	$(PYTEST) --numprocesses $(shell expr $(CORES) + 1)

# The checks of types and imports keep one core busy for a minute; the tests use the others.
test: .venv/flower
	$(MAKE) --no-print-directory --jobs 2 lint pytest

test-fast: .venv/installed
	$(PYTEST) --numprocesses $(CORES) -m "not slow and not flower and not browser"

# Material prints a notice of other products otherwise; warnings of the site are errors.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

release-check:
	PYTHON=$(PYTHON) .ci/release-check

# Other simulators, each in an environment of its own, for benchmarks/simulators.py --peers.
PEERS := flower fedlab pfl fluke byzfl
.venv-peers/flower/installed: WANTED = '.[flower]'
.venv-peers/fedlab/installed: WANTED = . fedlab==1.3.0
.venv-peers/pfl/installed: WANTED = . 'pfl[pytorch]==0.6.0'
# What fluke imports; all that it asks for (wandb, clearml, ...) was not resolved within minutes.
.venv-peers/fluke/installed: WANTED = . pandas scikit-learn torchmetrics torchvision psutil seaborn diskcache omegaconf cerberus
.venv-peers/fluke/installed: BARE = fluke-fl==0.8.1
.venv-peers/byzfl/installed: WANTED = '.[peers]'

.venv-peers/%/installed: constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable $(WANTED)
	$(if $(BARE),$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(BARE))
	touch $@

peers: $(PEERS:%=.venv-peers/%/installed)

.venv-audit/installed:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	touch $@

# Without the local part of a version, such as +cpu, of which no database knows.
audit: .venv/flower .venv-audit/installed
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > .venv-audit/versions.txt
	.venv-audit/bin/pip-audit --requirement .venv-audit/versions.txt --no-deps --disable-pip --vulnerability-service osv

clean:
	rm -rf .venv .venv-audit .venv-peers results site dist
