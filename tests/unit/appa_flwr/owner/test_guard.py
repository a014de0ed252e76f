"""No bundle runs at a group that its owner has not pinned, by a guard that comes in no bundle."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supernode.runtime import run_clientapp

from appa_flwr.errors import UserError
from appa_flwr.launch.sites import prepare
from appa_flwr.owner import guard
from appa_flwr.survey.generate import generate

MINE, OTHER = b"the bundle that was read", b"another one"


def pinning(*bundles: bytes) -> str:
    return f'bundle = "{" ".join(hashlib.sha256(bundle).hexdigest() for bundle in bundles)}"\n'


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Start the guard as a SuperNode does, for a bundle; what was unpacked."""
    unpacked: list[bytes] = []
    monkeypatch.setattr(run_clientapp, "install_from_fab", lambda content, skip_prompt: unpacked.append(content))

    def start(policy: str | None, bundle: bytes) -> list[bytes]:
        path = tmp_path / "policy.toml"
        if policy is not None:
            path.write_text(policy)
        monkeypatch.setenv("APPA_POLICY", str(path))
        monkeypatch.setattr(guard, "flwr_clientapp", lambda: run_clientapp.install_from_fab(bundle, skip_prompt=True))
        guard.main()
        return unpacked

    return start


@pytest.mark.parametrize("policy", ["", "votes = false\n", pinning(MINE), pinning(OTHER, MINE), 'bundle = ""\n'])
def test_a_pinned_bundle_runs_and_any_where_none_is_pinned(started, policy):
    assert started(policy, MINE) == [MINE]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (pinning(OTHER), guard.NOT_PINNED),
        (None, guard.UNREADABLE),
        ("bundle = 3\n", guard.UNREADABLE),
        ('bundle = "abc"\n', guard.UNREADABLE),
        ("no toml", guard.UNREADABLE),
    ],
)
def test_another_one_is_not_even_unpacked_and_the_reason_holds_nothing_private(started, policy, why):
    with pytest.raises(UserError, match=f"^{why.replace('(', '[(]').replace(')', '[)]')}$"):
        started(policy, MINE)


def test_without_a_policy_s_name_nothing_runs(monkeypatch):
    monkeypatch.delenv("APPA_POLICY", raising=False)
    with pytest.raises(UserError, match=guard.UNREADABLE):
        guard.check(MINE)


def test_flower_still_starts_the_program_by_its_name_and_unpacks_by_that_function():
    assert TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP] == "flwr-clientapp"
    assert "install_from_fab" in run_clientapp.run_clientapp.__code__.co_names


def test_a_group_s_start_script_puts_the_guard_first(tmp_path: Path):
    sites = prepare(generate(num_questions=20, num_groups=2, seed=0), tmp_path, host="h", port=1, keys={})
    folder = sites.group("Avaria")
    program = folder / "guard" / TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP]
    assert program.stat().st_mode & 0o111
    assert program.read_text().splitlines()[1] == 'exec python -P -m appa_flwr.owner.guard "$@"'
    assert 'export PATH="$PWD/guard:$PATH" APPA_POLICY="$PWD/policy.toml"' in (folder / "start.sh").read_text()
