"""`appa group`: keys and rosters, what a ledger tells, and what a node forgets; and that a deployment makes no keys."""

import hashlib

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.launch import deploy
from appa_flwr.launch.group import OPENED, opened_sums, pin_roster
from appa_flwr.launch.sites import prepare
from appa_flwr.owner.ledger import Ledger, Release
from appa_flwr.owner.owner_policy import OwnerPolicy, read_owner_policy
from appa_flwr.secure.roster import own_key, read_roster
from appa_flwr.survey.generate import generate

SURVEY = generate(num_questions=20, num_groups=3, seed=4)
A, B, C = SURVEY.groups


@pytest.fixture
def owners(appa, tmp_path):
    """A key and a policy of each of three groups, and the roster of their lines."""
    roster = tmp_path / "lines.toml"
    roster.write_text("".join(appa("group", "key", tmp_path / f"{name}.key", "--group", name) for name in "ABC"))
    policy = tmp_path / "A" / "policy.toml"
    policy.parent.mkdir()
    policy.write_text(appa("group", "policy"))
    return tmp_path, roster, policy


def test_an_owner_makes_a_key_once_and_pins_the_roster_that_holds_it(appa, owners):
    folder, roster, policy = owners
    key = folder / "A.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert own_key(key).hex() not in roster.read_text()
    assert appa("group", "key", key, "--group", "A") == roster.read_text().splitlines(keepends=True)[0]
    pinned = read_roster(roster.read_bytes())
    assert pinned.names == ("A", "B", "C")
    assert pinned.sha256 == hashlib.sha256(roster.read_bytes()).hexdigest()  # as sha256sum prints it
    appa("group", "pin", roster, "--policy", policy, "--group", "A", "--key", key)
    assert read_owner_policy(policy) == OwnerPolicy(roster=pinned.sha256)
    assert (policy.parent / "roster.toml").read_bytes() == roster.read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("own-score = 3", 'own-score = 3\nroster = "HASH"\n'),
        (
            f'# roster = "x"\nroster="{"ab" * 32}" # ours\nown-score = 3\n',
            '# roster = "x"\nroster="HASH" # ours\nown-score = 3\n',
        ),
        ("roster = ''\n", 'roster = "HASH"\n'),
    ],
)
def test_a_pin_changes_one_line_of_the_owner_s_policy(owners, before, after):
    folder, roster, policy = owners
    policy.write_text(before)
    for _ in range(2):
        pinned = pin_roster(roster, policy, group="A", key=folder / "A.key")
        assert policy.read_text() == after.replace("HASH", pinned.sha256)


def test_nothing_is_pinned_that_the_owner_could_not_use(appa, owners):
    folder, roster, policy = owners
    before = policy.read_text()
    pin = ["group", "pin", roster, "--policy", policy]
    assert "unknown group 'D'" in appa(*pin, "--group", "D", "--key", folder / "A.key", code=2)
    assert "B: is not the public key of" in appa(*pin, "--group", "B", "--key", folder / "A.key", code=2)
    assert "is not there" in appa(*pin, "--group", "A", "--key", folder / "D.key", code=2)
    assert not (folder / "D.key").exists()
    assert policy.read_text() == before
    pin += ["--group", "A", "--key", folder / "A.key"]
    policy.write_text('"roster" = ""\n')
    assert "write this line there yourself" in appa(*pin, code=2)
    policy.unlink()
    roster.write_text("".join(roster.read_text().splitlines(keepends=True)[:2]))
    assert "has 2 groups" in appa(*pin, code=2)
    assert list(policy.parent.iterdir()) == []


def summed(kind: str, cohort: str, *, run: str = "7", refused: str = "") -> Release:
    return Release(0.0, run, kind, "A", 1, "ab", refused, cohort)


def test_an_audit_counts_the_sums_that_were_opened_and_names_whom_two_of_them_tell(appa, tmp_path):
    ledger = Ledger(tmp_path / "a.ledger.sqlite")
    ask, opened = "ask rewards", OPENED
    lines = [
        *(summed(ask, "A; B; C; D"), summed(opened, "A; B; C; D"), summed(opened, "A; B; C; D")),
        *(summed(ask, "A; B; C; D"), summed(ask, "A; B; C"), summed(opened, "A; B; C")),
        *(summed(ask, "A; B; D"), summed(opened, "A; B; D", refused="no")),  # masked, and never opened
        *(summed(ask, "A; B", run="8"), summed(opened, "A; B", run="8")),
        *(summed("ask votes", "A; B; D"), summed(opened, "A; B; D")),  # of another kind
        summed("ask own scores", ""),
    ]
    for line in lines:
        ledger.write(line)
    ledger.spend("scores by targets: A", [("q", b"1"), ("q", b"2"), ("r", b"1")], limit=0, whole=True)
    assert opened_sums(ledger.releases()) == {
        ("7", ask, "A; B; C; D"): 1,
        ("7", ask, "A; B; C"): 1,
        ("7", ask, "A; B; D"): 0,
        ("8", ask, "A; B"): 1,
        ("7", "ask votes", "A; B; D"): 1,
    }
    printed = appa("group", "audit", ledger.path)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    assert [row for row in rows if row[:1] == [ask] and len(row) == 4] == [
        [ask, "A; B; C; D", "A; B; C", "D"],
        [ask, "A; B; C", "A; B", "C"],
    ]
    assert ["7", "ask own scores", "1", "0", "1"] in [row[:5] for row in rows]
    assert ["7", opened, "4", "1", "5"] in [row[:5] for row in rows]
    assert ["scores by targets: A", "2", "2", "1.5"] in rows


def test_a_node_forgets_all_runs_and_never_its_ledger(appa, tmp_path):
    ledger = Ledger(tmp_path / "a.ledger.sqlite")
    ledger.secret()
    folder = tmp_path / "a.ledger.memory"
    folder.mkdir()
    for name in ("17.sqlite", "17.sqlite-journal", "18.sqlite"):
        (folder / name).write_text("answers")
    assert appa("group", "forget", ledger.path) == "forgotten: 17, 18\n"
    assert list(folder.iterdir()) == []
    assert ledger.path.exists()


def test_a_deployment_makes_no_key_of_sums_and_one_machine_that_plays_all_parties_does_what_owners_do(tmp_path):
    sites = prepare(SURVEY, tmp_path, host="h", port=9100, keys={"run.sums": "secure"}, bundle="")
    assert not list(tmp_path.rglob("*.sums.key"))  # until the owners make them
    assert not list(tmp_path.rglob("roster.toml"))
    kept = sites.group(A) / "policy.toml"
    kept.write_text("least-answers = 3\n")
    deploy.pin_rosters(sites)
    keys = {name: sites.sums_key(name).read_bytes() for name in SURVEY.groups}
    assert len(set(keys.values())) == 3
    for name in SURVEY.groups:
        folder = sites.group(name)
        assert len(list(folder.glob("*.sums.key"))) == 1
        roster = read_roster((folder / "roster.toml").read_bytes())
        assert roster.names == tuple(sorted(SURVEY.groups))
        assert read_owner_policy(folder / "policy.toml").roster == roster.sha256
    assert read_owner_policy(kept).least_answers == 3
    deploy.pin_rosters(sites)
    assert keys == {name: sites.sums_key(name).read_bytes() for name in SURVEY.groups}
    sites.sums_key(B).write_text("a1")  # too short
    with pytest.raises(UserError, match=r"\.sums\.key: must hold a private key"):
        deploy.pin_rosters(sites)
