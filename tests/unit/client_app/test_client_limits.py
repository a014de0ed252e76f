"""What an owner's policy keeps a server from learning by catalogues and weights of its choice."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from client_node import TRAIN, Node, config_of, home_files, weights
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from in_process import deployed
from small import AS_OWNERS_ASK

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger
from appa_flwr.protocol import wire
from appa_flwr.survey.generate import generate
from client_app import state, survey_answers
from server_app.federation.catalogue import build_catalogue

SURVEY = generate(num_questions=160, num_groups=2, seed=3)
GROUP = SURVEY.groups[0]


class Owned(Node):
    """A deployed node of the first group, in its first run."""

    def __init__(self, folder, owner_policy="", **changes):
        config, files = home_files(SURVEY, folder, config_of(data__num_groups=2))
        config = Config.load({**config.flat(), **AS_OWNERS_ASK, **changes})
        super().__init__(next(iter(deployed(config, {GROUP: files[GROUP]}, owner_policy=owner_policy).values())))
        self.ledger = Ledger(files[GROUP].with_suffix(".ledger.sqlite"))
        self.catalogue = build_catalogue(config)
        self.answered = [q.question_id in SURVEY.answers[GROUP] for q in self.catalogue.questions]

    def run(self, number):
        self.context = Context(number, 2, self.context.node_config, RecordDict(), self.context.run_config)

    def cut(self, *, training, held_out):
        """A catalogue with so many of the answered questions, and all that nobody answered."""
        train_Q, kept = self.catalogue.train_Q, ~np.array(self.answered)
        for part_Q, count in ((train_Q, training), (~train_Q, held_out)):
            kept[np.flatnonzero(part_Q & self.answered)[:count]] = True
        rows = np.flatnonzero(kept)
        questions = tuple(self.catalogue.questions[row] for row in rows)
        public = self.catalogue
        arrays = (public.train_Q, public.embedding_QKE, public.option_QK, public.unanswered_Q)
        return wire.Catalogue(questions, *(array[rows] for array in arrays))

    def code(self, kind, content):
        """Of the refusal; 0 for an answer."""
        reply = self.ask(kind, content)
        return reply.error.code if reply.has_error() else 0

    def take(self, catalogue):
        return self.code(wire.CATALOGUE, wire.pack_catalogue(catalogue))


def training(config, **settings):
    record = ConfigRecord({"server-round": 1, **settings})
    return RecordDict({"arrays": wire.join_weights(weights(config)), "config": record})


def test_a_catalogue_of_few_answered_questions_is_refused(tmp_path):
    node = Owned(tmp_path)
    assert node.take(node.cut(training=9, held_out=10)) == wire.FEW_ANSWERS
    assert node.code(TRAIN, training(node.config)) == wire.FORGOTTEN  # it has taken none
    assert node.take(node.cut(training=10, held_out=10)) == 0


def test_few_held_out_answers_count_as_none(tmp_path):
    for run, held_out in enumerate((3, 4)):  # the test's policy asks for four
        node = Owned(tmp_path / str(run), owner_policy="least-answers = 4\nsum-rounding = 0.0")
        assert node.take(node.cut(training=12, held_out=held_out)) == 0
        metrics = node.ask("evaluate", training(node.config)).content.metric_records["metrics"]
        enough = held_out == 4
        assert metrics["num-examples"] == 4 * enough
        assert (max(metrics["errors"]) > 0) == enough
        sums = node.groups(wire.TARGETS, wire.pack_weights(weights(node.config)))[GROUP].sums
        assert sums["held-out", "uniform"]["answers"] == 4 * enough
        assert (sums["held-out", "uniform"]["js"] > 0) == enough
        assert sums["training", "uniform"]["answers"] == 12


def test_target_tables_are_made_once_in_a_run(tmp_path):
    """Tables by other weights would each tell more, and no reply would have been counted for them."""
    node = Owned(tmp_path)
    assert node.take(node.cut(training=12, held_out=10)) == 0
    made = weights(node.config)
    assert node.groups(wire.TARGETS, wire.pack_weights(made))[GROUP].sums
    other = ArrayRecord({name: 0.9 * value for name, value in made.to_torch_state_dict().items()})
    memory = state.memory_of(node.context)
    table_QK = state.targets(memory, GROUP)
    assert not node.groups(wire.TARGETS, wire.pack_weights(other))[GROUP].sums
    np.testing.assert_array_equal(state.targets(memory, GROUP), table_QK)
    assert node.ledger.replies()[wire.TARGETS] == 1
    node.run(2)
    assert node.take(node.cut(training=12, held_out=10)) == 0
    node.groups(wire.TARGETS, wire.pack_weights(other))
    assert not np.array_equal(state.targets(state.memory_of(node.context), GROUP), table_QK)


def test_a_run_has_one_catalogue(tmp_path):
    node = Owned(tmp_path)
    first, other = node.cut(training=12, held_out=10), node.cut(training=30, held_out=10)
    assert node.take(first) == 0
    assert node.take(first) == 0  # sent again after a restart
    for changed in (
        other,
        replace(first, embedding_QKE=first.embedding_QKE + 1),
        replace(first, train_Q=~first.train_Q),
    ):
        assert node.take(changed) == wire.OTHER_CATALOGUE
    node.run(2)
    assert node.take(other) == 0


def test_of_two_catalogues_at_the_same_time_a_run_has_one(tmp_path, monkeypatch):
    """The other's answers would be used, and replies about them counted for the first one's questions."""
    node = Owned(tmp_path)
    first, other = node.cut(training=12, held_out=10), node.cut(training=30, held_out=10)
    read, codes = survey_answers.answers, []

    def meanwhile(*args):
        found = read(*args)
        if not codes:
            codes.append(None)
            codes[0] = node.take(other)
        return found

    monkeypatch.setattr(survey_answers, "answers", meanwhile)
    assert node.take(first) == wire.OTHER_CATALOGUE
    assert codes == [0]
    memory = state.memory_of(node.context)
    assert state.catalogue_digest(memory) == wire.digest(wire.pack_catalogue(other))
    assert len(state.data(memory, GROUP)) == 30


@pytest.mark.parametrize(
    ("training_count", "held_out_count", "allowed"),
    [(20, 10, True), (29, 10, False), (30, 10, True), (20, 9, False), (19, 10, False)],
)
def test_two_runs_ask_about_the_same_answers_or_about_quite_other_ones(
    training_count, held_out_count, allowed, tmp_path
):
    node = Owned(tmp_path)
    assert node.take(node.cut(training=20, held_out=10)) == 0
    node.run(2)
    changed = node.cut(training=training_count, held_out=held_out_count)
    assert node.take(replace(changed, embedding_QKE=2 * changed.embedding_QKE)) == (0 if allowed else wire.NEARLY_SAME)


def test_a_question_has_so_many_replies_of_each_kind_over_all_catalogues(tmp_path):
    node = Owned(tmp_path, owner_policy="training-replies = 3\nvalidation-replies = 2\ntarget-replies = 1")
    ask = {
        TRAIN: lambda: training(node.config),
        "evaluate": lambda: training(node.config),
        wire.TARGETS: lambda: wire.pack_weights(weights(node.config)),
    }
    assert node.take(node.cut(training=20, held_out=10)) == 0
    for kind in (TRAIN, TRAIN, "evaluate", wire.TARGETS):
        assert node.code(kind, ask[kind]()) == 0
    node.run(2)  # ten questions more, and the twenty have had two rounds
    assert node.take(node.cut(training=30, held_out=10)) == 0
    for kind, left in ((TRAIN, 1), ("evaluate", 1), (wire.TARGETS, 0)):
        codes = [node.code(kind, ask[kind]()) for _ in range(left + 1)]
        assert codes == [0] * left + [wire.REPLIES_SPENT], kind
    assert node.ledger.replies() == {TRAIN: 3, "evaluate": 2, wire.TARGETS: 1}
    assert [line.refused for line in node.ledger.releases()][-1] == wire.REFUSALS[wire.REPLIES_SPENT]


@pytest.mark.parametrize(
    ("owner_policy", "changes", "code"),
    [
        ("", {}, 0),
        ("", {"pluralllm.strategy": "fedadam"}, wire.WEAK_TRAINING),
        ("sgd = true", {"pluralllm.strategy": "fedadam"}, 0),
        ("", {"pluralllm.local-steps": 15}, wire.WEAK_TRAINING),
        ("least-steps = 15", {"pluralllm.local-steps": 15}, 0),
    ],
)
def test_the_owner_says_how_pluralllm_may_be_trained(owner_policy, changes, code, tmp_path):
    node = Owned(tmp_path, owner_policy, **changes)
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert node.code(TRAIN, training(node.config)) == code


def test_nobody_can_repeat_a_round_but_the_node_itself(tmp_path):
    """Who knows the draws can try answers until the same weights come back."""
    sent = {}
    for name, owner_policy in (("a", ""), ("b", ""), ("c", "secret-draws = false"), ("d", "secret-draws = false")):
        node = Owned(tmp_path / name, owner_policy)
        assert node.take(node.cut(training=20, held_out=10)) == 0
        asked = [node.ask(TRAIN, training(node.config)).content.array_records["arrays"] for _ in range(2)]
        assert asked[0] == asked[1]  # nobody averages the draws away by asking again
        sent[name] = asked[0]["weights"].numpy()
    assert (sent["c"] == sent["d"]).all()
    assert (sent["a"] != sent["b"]).any()
    assert (sent["a"] != sent["c"]).any()


def test_sums_over_answers_are_rounded_and_their_numbers_are_not(tmp_path):
    said = {}
    for step in (0.0, 0.25):
        node = Owned(tmp_path / str(step), f"sum-rounding = {step}\nsecret-draws = false")
        assert node.take(node.cut(training=20, held_out=10)) == 0
        errors = node.ask("evaluate", training(node.config)).content.metric_records["metrics"]["errors"]
        loss = node.ask(TRAIN, training(node.config)).content.metric_records["metrics"]["loss"]
        sums = node.groups(wire.TARGETS, wire.pack_weights(weights(node.config)))[GROUP].sums
        others = [value for of in sums.values() for key, value in of.items() if key != "answers"]
        said[step] = np.array([*(10 * error for error in errors), 20 * loss, *others])
        assert {of["answers"] for of in sums.values()} <= {10.0, 20.0}
    np.testing.assert_allclose(said[0.25] / 0.25, np.rint(said[0.0] / 0.25), atol=1e-9)
    assert (np.abs(said[0.0] / 0.25 - np.rint(said[0.0] / 0.25)) > 1e-3).mean() > 0.5


def test_a_message_that_nobody_knows_is_refused_and_written_down(tmp_path):
    node = Owned(tmp_path)
    for kind in ("query.answers", "train.mine"):
        assert node.code(kind, RecordDict()) == wire.UNKNOWN_ACTION
    assert [(line.kind, line.refused) for line in node.ledger.releases()] == [
        ("query.answers", wire.REFUSALS[wire.UNKNOWN_ACTION]),
        ("train.mine", wire.REFUSALS[wire.UNKNOWN_ACTION]),
    ]


@pytest.mark.parametrize("kind", [wire.TARGETS, wire.VOTE, wire.SCORE, TRAIN, "evaluate"])
def test_where_a_roster_is_pinned_nothing_but_sums_leaves(kind, tmp_path):
    node = Owned(tmp_path, f'roster = "{"0" * 64}"')
    assert node.take(node.catalogue) == 0
    assert node.code(kind, RecordDict()) == wire.ONLY_SUMS
    assert node.ledger.releases()[-1].numbers == 0
    assert node.ledger.releases()[-1].refused == wire.REFUSALS[wire.ONLY_SUMS]


def test_a_request_has_an_end(tmp_path):
    node = Owned(tmp_path)
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert node.code(wire.TARGETS, wire.pack_weights(weights(node.config))) == 0
    for count, code in ((wire.MOST_ANSWERS, 0), (wire.MOST_ANSWERS + 1, wire.FAILED)):
        answer_JK = np.tile(np.eye(1, node.catalogue.option_QK.shape[1]), (count, 1))
        asked = wire.ScoreRequest(np.zeros(count, dtype=np.int64), answer_JK, ("js",))
        assert node.code(wire.SCORE, wire.pack_score_request(asked)) == code


@pytest.mark.parametrize("question_id", ["a\0b", "x" * 1001])
def test_an_id_that_would_spoil_the_ledger_is_refused(question_id, tmp_path):
    node = Owned(tmp_path)
    public = node.cut(training=20, held_out=10)
    first, *others = public.questions
    bad = replace(public, questions=(replace(first, question_id=question_id), *others))
    assert node.take(bad) == wire.FAILED


FOREIGN = "their_metric:half"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A metric of somebody's own that says when it is imported, and is at hand on the group's machine."""
    (tmp_path / "their_metric.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w')\n\ndef half(prediction, target, options):\n"
        "    return 0.5 * (target[:, 0] >= 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "imported"
    sys.modules.pop("their_metric", None)


def asked(node, metric):
    answer_JK = np.eye(1, node.catalogue.option_QK.shape[1])
    return wire.pack_score_request(wire.ScoreRequest(np.zeros(1, dtype=np.int64), answer_JK, (metric,)))


def test_a_foreign_metric_is_never_imported_without_the_owner(tmp_path, installed):
    for policy in ("", 'metrics = "their_metric:other os:abort"'):
        node = Owned(tmp_path, policy, metric=FOREIGN)
        assert node.take(node.cut(training=20, held_out=10)) == wire.METRIC_REFUSED
        # A server that asks for it while the run's config names another is refused too.
        node = Owned(tmp_path / "other", policy)
        assert node.take(node.cut(training=20, held_out=10)) == 0
        assert node.code(wire.TARGETS, wire.pack_weights(weights(node.config))) == 0
        assert node.code(wire.SCORE, asked(node, FOREIGN)) == wire.METRIC_REFUSED
        assert not installed.exists()


def test_a_foreign_metric_scores_where_the_owner_names_it(tmp_path, installed):
    node = Owned(tmp_path, f'metrics = "{FOREIGN} another:one"', metric=FOREIGN)
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert node.code(wire.TARGETS, wire.pack_weights(weights(node.config))) == 0
    reply = node.groups(wire.SCORE, asked(node, FOREIGN))[GROUP]
    assert {key: reward_J.tolist() for key, reward_J in reply.rewards.items()} == {(FOREIGN, wire.TARGET_SIDE): [0.5]}


def test_a_deployed_node_opens_no_file_but_its_owners(tmp_path):
    node = Owned(tmp_path)
    path = node.context.node_config.pop("data")
    node.context.run_config["survey"] = path
    with pytest.raises(UserError, match="lacks `data`"):
        survey_answers.answers(node.context, (GROUP,), ())


def test_what_a_run_says_of_a_source_changes_nothing_of_what_a_deployed_node_reads(tmp_path):
    read = []
    reading = {"weight": "W", "group-by": "Q1", "missing": "1,2", "refusals": "drop", "min-respondents": 9999}
    for name, keys in (("plain", {}), ("other", reading)):
        node = Owned(tmp_path / name)
        node.context.run_config.update({f"data.{key}": value for key, value in keys.items()})
        assert node.take(node.catalogue) == 0
        read.append(state.truth(state.memory_of(node.context), GROUP))
    np.testing.assert_array_equal(*read)
