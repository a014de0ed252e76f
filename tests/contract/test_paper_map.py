"""docs/paper_map.md and api.md against the code: every name and test file exists, every equation leads to a function.

And the presets against the paper's three hyperparameter tables, which leave nothing that is in neither preset nor page.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
from paper_tables import ROWS

from appa_flwr.config import KEYS, Config, preset

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "paper_map.md").read_text(encoding="utf-8")
MODULES = set(re.findall(r"^::: (\S+)$", (REPO / "docs" / "api.md").read_text(), flags=re.MULTILINE))
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


@pytest.mark.parametrize("name", sorted(filter(NAME.fullmatch, SPANS - set(KEYS) | MODULES)))
def test_every_name_exists(name):
    resolve(name)


@pytest.mark.parametrize("path", sorted(span for span in SPANS if span.endswith(".py")))
def test_every_test_file_exists(path):
    assert (REPO / "tests" / path).is_file()


def test_what_does_not_exist_is_noticed():
    for name in ("appa_flwr.analysis.aggregation.reverse_softmax", "server_app.ppo_engine.PPOEngine"):
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


# What the page explains, and the keys it names for it.
EXPLAINED = {
    name.strip(): set(re.findall(r"`([^`]+)`", keys))
    for what, keys in re.findall(r"^\| ((?:SFT|PPO|APPA|text): [^|]+)\|[^|]+\|([^|]+)\|$", PAGE, flags=re.MULTILINE)
    for name in what.split(";")
}
# Of GLOBALQA's 2554 questions 2043 (80 %) are for training, so 5 epochs make 10215 rollouts; each sees 2 PPO epochs.
READINGS = {
    # preset: rollouts an iteration, mini-batches, rollouts a step, iterations, optimizer steps
    "paper": (96, 1, 96, 107, 214),  # 10215 / 96 = 106.4; 107 x 2 x 1
    "paper-trl-0.15": (768, 8, 96, 14, 224),  # 10215 / 768 = 13.3; 14 x 2 x 8
    "paper-literal-batch": (96, 8, 12, 107, 1712),  # 107 x 2 x 8
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.table}: {row.name}")
def test_every_row_of_the_papers_tables_is_in_the_preset_or_on_the_page(row):
    given = preset("paper")
    # Set by the preset itself: one that leaned on the embedded defaults would change with them.
    assert {key: given.get(key) for key in row.keys} == row.keys
    assert row.keys or f"{row.table}: {row.name}" in EXPLAINED


def test_the_page_explains_rows_of_the_tables_by_keys_that_exist():
    rows = {f"{row.table}: {row.name}" for row in ROWS}
    assert rows >= {what for what in EXPLAINED if not what.startswith("text: ")}
    assert set(KEYS) >= set().union(*EXPLAINED.values())


def test_the_preset_sets_nothing_that_neither_the_tables_nor_the_page_account_for():
    named = {key for row in ROWS for key in row.keys}.union(*EXPLAINED.values())
    assert named >= set(preset("paper"))


def test_the_three_readings_of_the_papers_batch():
    found = {}
    for name in READINGS:
        config = Config.load(preset(name))
        size, parts = config.rollout.batch_size, config.ppo.num_mini_batches
        iterations = config.iterations(2043)
        found[name] = (size, parts, size // parts, iterations, iterations * config.ppo.epochs * parts)
    assert found == READINGS
    # On the page too, beside what each is a reading of.
    numbers = re.findall(r"^\| `(paper[^`]*)` \|[^|]+\|([\d|, ]+)\|$", PAGE, flags=re.MULTILINE)
    named = {name: tuple(int(number.replace(",", "")) for number in counts.split("|")) for name, counts in numbers}
    assert named == READINGS
