"""docs/paper_map.md and api.md against the code, and the presets against the paper's three hyperparameter tables."""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name as resolve

from small import cases

from appa_flwr.config import KEYS
from appa_flwr.config.sources import assemble, preset
from server_app.ppo_phase import num_iterations

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "paper_map.md").read_text(encoding="utf-8")
MODULES = set(re.findall(r"^::: (\S+)$", (REPO / "docs" / "api.md").read_text(), flags=re.MULTILINE))
SPANS = set(re.findall(r"`([^`\n]+)`", PAGE))
NAME = re.compile(r"(?:appa_flwr|pluralllm|server_app|client_app|experiments)(?:\.\w+)+")
NUM_EQUATIONS = 24
WITHOUT_OWN_FUNCTION = {12, 21, 22, 23, 24}  # the standard objective, and the theory
TABLES = cases("paper_tables")
PRINTED, READINGS = TABLES["printed"], {keys: tuple(row) for keys, row in TABLES["readings"].items()}


def test_the_map_s_names_files_equations_and_hyperparameters_are_those_of_the_code_and_the_preset():
    for name in filter(NAME.fullmatch, SPANS - set(KEYS) | MODULES):
        resolve(name)
    assert [span for span in SPANS if span.endswith(".py") and not (REPO / "tests" / span).is_file()] == []
    equations = re.findall(r"^\| (\d+) \|[^|]+\|([^|]+)\|", PAGE, flags=re.MULTILINE)
    assert [int(number) for number, _ in equations] == list(range(1, NUM_EQUATIONS + 1))
    for number, code in equations:
        functions = [resolve(name) for name in NAME.findall(code)]
        assert functions
        assert all(map(inspect.isfunction, functions))
        if int(number) not in WITHOUT_OWN_FUNCTION:
            assert re.search(rf"Equations? (\d+ and )?{number}\b", inspect.getdoc(functions[0]) or "")

    # Every row is in the preset, a constant, or explained on the page; set by the preset, as defaults may change.
    given = preset("paper")
    assert {key: resolve(key) if NAME.fullmatch(key) else given.get(key) for key in PRINTED} == PRINTED
    rows = re.findall(r"^\| (?:SFT|PPO|APPA|text): [^|]+\|[^|]+\|([^|]+)\|$", PAGE, flags=re.MULTILINE)
    explained = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert set(KEYS) >= explained
    assert explained | PRINTED.keys() >= given.keys()

    found = {}
    for keys in READINGS:
        config = assemble(keys.split(), folder=None)
        size, parts = config.ppo.batch_size, config.ppo.num_mini_batches
        iterations = num_iterations(config, 2043)
        found[keys] = (size, parts, size // parts, iterations, iterations * config.ppo.epochs * parts)
    assert found == READINGS
    # On the page too, beside what each is a reading of.
    numbers = re.findall(r"^\| `(preset=paper[^`]*)` \|[^|]+\|([\d|, ]+)\|$", PAGE, flags=re.MULTILINE)
    named = {keys: tuple(int(number.replace(",", "")) for number in counts.split("|")) for keys, counts in numbers}
    assert named == READINGS
