"""Three groups deployed as `appa deploy` does by default: a whole run, from which nothing but sums has left.

Not in a plain run: `make test ARGS="-m long -s tests/e2e/test_secure_deployment.py"`, 8 minutes on two free cores; it
prints how long an iteration waits for the groups, beside a plain run.
"""

from __future__ import annotations

import json
import math
import subprocess
from statistics import median

import pytest
from deployment import REPO, TINY_LOOP
from real_run import APPA

from appa_flwr.owner.ledger import Ledger
from appa_flwr.owner.owner_policy import read_owner_policy
from appa_flwr.protocol import wire
from appa_flwr.secure.roster import read_roster

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

SMALL = {
    **TINY_LOOP,
    "data.num-questions": 60,  # of the 12 held-out ones owners let their scores out
    "data.unanswered": "leave",
    "ppo.num-iterations": 5,
    "federation.min-groups": 3,
    "run-name": "r",
}


def deployed(folder, **more):
    """The run's folder, of a deployment on this machine that has ended well."""
    keys = [part for key, value in {**SMALL, **more}.items() for part in ("-c", f"{key}={json.dumps(value)}")]
    subprocess.run([*APPA, "deploy", str(folder), "--local", "--groups", "3", *keys], cwd=REPO, check=True)
    return folder / "server" / "runs" / "r"


def iterations(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def waits(run):
    """Seconds after the first, in which processes start that later ones find."""
    return [line["seconds"]["federation_wait"] for line in iterations(run)[1:]]


def test_a_deployment_is_of_sums_unless_told_otherwise(tmp_path):
    run = deployed(tmp_path / "parties")
    lines = iterations(run)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["weights"] == {} and not line["missing_groups"] for line in lines)
    rows = json.loads((run / "summary.json").read_text())
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

    plain = deployed(tmp_path / "plain", **{"federation.sums": "plain"})
    assert all(line["weights"] for line in iterations(plain))
    secure, single = waits(run), waits(plain)
    print(f"seconds an iteration waits: secure {secure}, plain {single}; {median(secure) / median(single):.2f} times")
    assert median(secure) < 2.5 * median(single)  # the goal is 2; a wait is whole turns of Flower's three seconds
