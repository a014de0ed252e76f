"""The owner's file: its keys, its defaults, and what is wrong with it in one line."""

from __future__ import annotations

import re

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.owner.owner_policy import (
    SIMULATION,
    OwnerPolicy,
    described,
    owner_policy_file,
    owner_policy_of,
    read_owner_policy,
)


def written(tmp_path, text):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def test_a_file_decides_what_it_names_and_no_more(tmp_path):
    found = read_owner_policy(written(tmp_path, "votes = false\nleast-steps = 5\nreward-noise = 0.25\n"))
    assert found == OwnerPolicy(votes=False, least_steps=5, reward_noise=0.25)
    assert found.training
    assert found.changes_rewards
    assert not OwnerPolicy().changes_rewards


def test_a_simulation_has_no_owners_and_a_node_its_own_one_s_policy(tmp_path):
    assert owner_policy_of({"partition-id": 0}) is SIMULATION
    assert owner_policy_of({"group": "Avaria"}) == OwnerPolicy()
    assert not any(getattr(OwnerPolicy(), key) for key in ("mean", "truth", "probes"))
    path = written(tmp_path, "truth = true")
    assert owner_policy_of({"group": "Avaria", "policy": str(path)}) == OwnerPolicy(truth=True)
    assert owner_policy_of({"partition-id": 0, "policy": str(path)}) is SIMULATION


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "votse = false",
            "unknown key votse; known are bundle, metrics, roster, least-cohort, own-score, own-scores, training,",
        ),
        ('metrics = "js"', "metrics = 'js': String should match pattern"),
        ("least_steps = 4", "unknown key least_steps"),
        ("votes = 0", "votes = 0: Input should be a valid boolean"),
        ('mean = "true"', "mean = 'true': Input should be a valid boolean"),
        ("least-steps = 0", "least-steps = 0: Input should be greater than or equal to 1"),
        ("least-cohort = 2", "least-cohort = 2: Input should be greater than or equal to 3"),
        ('roster = "abc"', "roster = 'abc': String should match pattern"),
        ("reward-noise = -0.1", "reward-noise = -0.1: "),
        ("votes =", "is not a TOML file"),
        (None, "cannot be read (No such file"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, says):
    path = tmp_path / "policy.toml" if text is None else written(tmp_path, text)
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}: {says}')}"):
        owner_policy_of({"group": "Avaria", "policy": str(path)})


def test_every_key_says_what_it_decides(tmp_path):
    assert all(described().values())
    assert read_owner_policy(written(tmp_path, owner_policy_file())) == OwnerPolicy()
    assert all(f"\n{key} = " in owner_policy_file() for key in described())
