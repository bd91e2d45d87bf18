# The only commands a newcomer needs. Everything happens in .venv; nothing else is touched.
PYTHON ?= python3
BIN := .venv/bin
PLUGINS := $(wildcard plugins/*)
# Two busy processes with two threads each on two cores are ten times slower than with one each.
export OMP_NUM_THREADS ?= 1

.PHONY: install quickstart test soak check bench docs wheels clean

install: .venv/.installed .assets/.fetched  ## .venv with every distribution editable and the test tools; real test models and data

.venv/.installed: pyproject.toml constraints.txt $(PLUGINS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit(f"Twinkle needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Run: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' $(PLUGINS:%=-e %)
	@touch $@

.assets/.fetched: tests/tools/real_assets.py tests/tools/modelscope_standin.py | .venv/.installed
	$(BIN)/python tests/tools/real_assets.py .assets
	$(BIN)/python tests/tools/modelscope_standin.py .assets/modelscope
	@touch $@

quickstart: .venv/.installed  ## fine-tune a tiny Qwen3.5 on self-cognition chats, in about a minute
	$(BIN)/twinkle launch --log-dir outputs/quickstart --plot examples/quickstart.py

test: install  ## the test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

soak: install  ## what takes longer: new environments, kill loops, learning runs
	$(BIN)/python -m pytest -m soak

check: install  ## lint, types, imports and the fast tests
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not soak and not slow'

bench: install  ## every figure in benchmarks/README.md; let nothing else run meanwhile
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

docs: install  ## the documentation as a site, in site/
	$(BIN)/mkdocs build --strict -q

wheels: .venv/.installed  ## a wheel of every distribution, in dist/
	rm -rf dist
	for folder in . $(PLUGINS); do $(BIN)/python -m build -q --wheel --outdir dist $$folder || exit 1; done

clean:
	rm -rf .venv .assets dist site outputs logs .pytest_cache .ruff_cache .hypothesis
