"""docs/paper_map.md against the code: every name and test file in it exists, every equation leads to a function."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "paper_map.md").read_text(encoding="utf-8")
SPANS = set(re.findall(r"`([^`\n]+)`", PAGE))
NAME = re.compile(r"(?:appa_flwr|pluralllm|server_app|client_app|experiments)(?:\.\w+)+")
NUM_EQUATIONS = 24
WITHOUT_OWN_FUNCTION = {12, 21, 22, 23, 24}  # the standard objective, and the theory


def resolve(name: str) -> object:
    """The module, or what is in it, that a dotted name stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", sorted(filter(NAME.fullmatch, SPANS)))
def test_every_name_exists(name):
    resolve(name)


@pytest.mark.parametrize("path", sorted(span for span in SPANS if span.endswith(".py")))
def test_every_test_file_exists(path):
    assert (REPO / "tests" / path).is_file()


def test_what_does_not_exist_is_noticed():
    for name in ("appa_flwr.aggregation.reverse_softmax", "server_app.ppo_engine.PPOEngine"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(name)


def test_every_equation_has_one_row_with_a_function_that_says_its_number():
    rows = re.findall(r"^\| (\d+) \|[^|]+\|([^|]+)\|", PAGE, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, NUM_EQUATIONS + 1))
    for number, code in rows:
        functions = [resolve(name) for name in NAME.findall(code)]
        assert functions
        assert all(map(inspect.isfunction, functions))
        if int(number) not in WITHOUT_OWN_FUNCTION:
            assert re.search(rf"Equations? (\d+ and )?{number}\b", inspect.getdoc(functions[0]) or "")
