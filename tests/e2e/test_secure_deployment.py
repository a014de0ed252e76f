"""Three groups deployed whose owners have pinned a roster: a whole run, from which nothing but sums has left.

Not in a plain run: `make test ARGS="-m long tests/e2e/test_secure_deployment.py"`, 4 minutes on two cores.
"""

from __future__ import annotations

import json
import math

import pytest
from deployment import REPO, TINY_LOOP

from appa_flwr.config import Config
from appa_flwr.launch.deploy import deploy_local
from appa_flwr.owner.ledger import Ledger
from appa_flwr.owner.owner_policy import read_owner_policy
from appa_flwr.protocol import wire
from appa_flwr.secure.roster import read_roster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_deployed_run_with_a_pinned_roster(tmp_path):
    small = {"data.num-groups": 3, "data.num-questions": 40, "data.unanswered": "leave", "ppo.num-iterations": 2}
    config = Config.load({**TINY_LOOP, **small, "federation.sums": "secure", "federation.min-groups": 3})
    folder = deploy_local(config, tmp_path / "parties", app_folder=REPO)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["weights"] == {} and not line["missing_groups"] for line in lines)
    rows = json.loads((folder / "summary.json").read_text())
    assert {row["method"] for row in rows} >= {"base", "sft", "ppo", "uniform", "majority"}
    assert not any(math.isnan(row["min_as"]) for row in rows)  # owners release their scores unless they say no
    for site in (tmp_path / "parties" / "groups").iterdir():
        pinned = read_owner_policy(site / "policy.toml").roster
        assert pinned == read_roster((site / "roster.toml").read_bytes()).sha256
        releases = Ledger(site / f"{site.name}.ledger.sqlite").releases()
        assert not any(release.refused for release in releases)
        kinds = {release.kind for release in releases}
        assert kinds == {wire.ROLL_CALL, wire.CATALOGUE, wire.TARGETS, *wire.IN_SUMS}
        assert sum(release.numbers for release in releases if release.kind == wire.TARGETS) == 0
