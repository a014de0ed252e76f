import tomllib
from datetime import datetime
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict

from appa_flwr.config import KEYS, SECTIONS, Config, split_names
from appa_flwr.config.keys import valid
from appa_flwr.config.keys import to_toml_table
from appa_flwr.core.errors import UserError

GEMMA = {"model": "google/gemma-2-2b-it"}


@pytest.mark.parametrize(
    "keys",
    [{"policy.tuning": "lora"}, {"ppo.learning-rate": 1e-5}, {"sft.learning-rate": 1e-5}, {"run.phases": "serve"}],
)
def test_whoever_sets_tuning_or_a_step_size_has_chosen(keys):
    assert Config.load({**GEMMA, **keys}).flat().items() >= keys.items()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("ppo.learning-rate", "1", 1.0),
        ("seed", "42", 42),
        ("run.resume", "true", True),
        ("run-name", 42, "42"),
    ],
)
def test_text_is_what_its_key_wants(key, text, value):
    read = Config.load({key: text}).flat()[key]
    assert (read, type(read)) == (value, type(value))


def test_flat_and_toml_round_trip_every_key_with_its_type():
    given = {"groups": 'a"b; é\\c', "survey": "x\x7f\n", "ppo.learning-rate": 1, "appa.alpha": float("-inf")}
    flat = Config.load({**given, "ppo.kl-coefficient": 1e-300}).flat()
    assert type(flat["ppo.learning-rate"]) is float  # an integer is taken for a number
    back = flatten_dict(tomllib.loads(to_toml_table(flat)))  # as Flower does it
    assert back == flat
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in flat.items()}
    assert Config.load(back).flat() == flat


def test_there_are_few_keys_and_each_has_a_one_line_doc():
    assert len(KEYS) <= 74
    assert valid(KEYS["run.tracker"]).split(", ") == ['""', "tensorboard", "wandb", "trackio"]
    assert len(SECTIONS) <= 9
    for doc in (*(field.description for field in KEYS.values()), *(section.__doc__ for section in SECTIONS.values())):
        assert doc
        assert "\n" not in doc


def test_split_names():
    assert split_names("a, b ,,c") == ("a", "b", "c")
    assert split_names("Korea, South; Egypt;") == ("Korea, South", "Egypt")
    assert split_names(" ") == ()


def test_a_run_without_a_name_gets_one_that_says_what_it_is():
    config = Config.load({"task": "opa", "rule": "min", "seed": 5, "run.output-dir": "/out"})
    with pytest.raises(UserError, match="run-name"):
        _ = config.run_folder
    named = config.named(datetime(2026, 1, 2, 3, 4, 5))
    assert named.run_folder == Path("/out/opa-min-seed5-20260102-030405")
    assert named.named(datetime(2027, 1, 1)) == named
