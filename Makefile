# `make` = lint + test.
.PHONY: all lint test docs
all: test

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

test:
	scripts/test.sh

docs:
	.venv/bin/slime hooks --markdown > docs/hooks.md
	.venv/bin/slime flags > docs/flags.md
