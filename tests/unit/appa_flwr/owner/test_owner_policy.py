"""The owner's file: its keys, its defaults, and what is wrong with it in one line."""

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
    policy = read_owner_policy(written(tmp_path, 'may-leave = ["votes", "truth"]\n'))
    assert policy == OwnerPolicy(may_leave=["votes", "truth"])
    kinds = ("votes", "training", "rewards", "predictions", "answers", "truth")
    assert [policy.may(kind) for kind in kinds] == [True, False, False, False, False, True]
    assert [OwnerPolicy().may(kind) for kind in kinds] == [True, True, True, False, False, False]
    assert [SIMULATION.may(kind) for kind in kinds] == [True] * 6


def test_a_simulation_has_no_owners_and_a_node_its_own_one_s_policy(tmp_path):
    assert owner_policy_of({"partition-id": 0}) is SIMULATION
    assert owner_policy_of({"group": "Avaria"}) == OwnerPolicy()
    path = written(tmp_path, "may-leave = []")
    assert owner_policy_of({"group": "Avaria", "policy": str(path)}) == OwnerPolicy(may_leave=[])
    assert owner_policy_of({"partition-id": 0, "policy": str(path)}) is SIMULATION


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("least-answers = 3\nbundle = ''\nanother = 1", "another, least-answers: an owner's policy has the keys"),
        ('may-leave = ["vote"]', "may-leave = 'vote': Input should be 'votes', 'training', "),
        ('bundle = "abc"', "bundle = 'abc': String should match pattern"),
        ("may-leave =", "is not a TOML file"),
        (None, "cannot be read (No such file"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, says):
    path = tmp_path / "policy.toml" if text is None else written(tmp_path, text)
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}: {says}')}"):
        owner_policy_of({"group": "Avaria", "policy": str(path)})


def test_every_key_says_what_it_decides(tmp_path):
    assert all(described().values())
    text = owner_policy_file(bundle="ab" * 32)
    assert read_owner_policy(written(tmp_path, text)) == OwnerPolicy(bundle="ab" * 32)
    assert all(f"\n{key} = " in text for key in described())
