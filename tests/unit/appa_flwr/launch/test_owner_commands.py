"""`appa group`: what a ledger tells, what a node forgets, and what an owner's policy no longer knows."""

from appa_flwr.owner.ledger import Ledger, Release
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate


def test_an_audit_counts_replies_by_run_and_by_the_words_of_the_policy(appa, tmp_path):
    ledger = Ledger(tmp_path / "a.ledger.sqlite")
    for run, kind, numbers, refused in (
        ("7", "rewards", 10, ""),
        ("7", "rewards", 12, ""),
        ("7", "votes", 0, "no"),
        ("8", "rewards, truth", 5, ""),
    ):
        ledger.write(Release(0.0, run, kind, "A", numbers, "ab", refused))
    printed = appa("group", "audit", ledger.path)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    assert [row[:5] for row in rows if row[:1] in (["7"], ["8"])] == [
        ["7", "rewards", "2", "0", "22"],
        ["7", "votes", "0", "1", "0"],
        ["8", "rewards, truth", "1", "0", "5"],
    ]


def test_a_node_forgets_all_runs_and_never_its_ledger(appa, tmp_path):
    ledger = Ledger(tmp_path / "a.ledger.sqlite")
    ledger.write(Release(0.0, "7", "votes", "A", 1, "ab", ""))
    folder = tmp_path / "a.ledger.memory"
    folder.mkdir()
    for name in ("17.sqlite", "17.sqlite-journal", "18.sqlite"):
        (folder / name).write_text("answers")
    assert appa("group", "forget", ledger.path) == "forgotten: 17, 18\n"
    assert list(folder.iterdir()) == []
    assert ledger.path.exists()


def test_a_check_names_a_key_of_an_owner_s_policy_that_is_gone(appa, tmp_path):
    written = store.write_split(generate(num_questions=20, num_groups=3, seed=4), tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text(appa("group", "policy"))
    check = ["group", "check", next(iter(written.groups.values())), "--questions", written.questions]
    assert f"{policy}: can be used" in appa(*check, "--policy", policy)
    policy.write_text("least-answers = 10\n")
    said = appa(*check, "--policy", policy, code=2)
    assert "policy.toml: least-answers: an owner's policy has the keys may-leave, bundle alone" in said.replace(
        "\n", " "
    )
