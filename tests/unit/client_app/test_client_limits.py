"""What an owner lets leave: how many numbers rest on a question, how exact they are, and over whom they are summed."""

from dataclasses import replace

import numpy as np
import pytest
from client_node import GROUP, Owned, asked_of, refused, weights
from flwr.app import ArrayRecord

from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import ScoreRequest, Task
from appa_flwr.protocol.rewards import js
from client_app.party import Party


def test_a_catalogue_of_few_answered_questions_is_refused(tmp_path):
    node = Owned(tmp_path)
    assert node.take(node.cut(training=9, held_out=10)) == refusals.FEW_ANSWERS
    assert refused(node.ask(asked_of(asks.UPDATE, node.public, node.config))) == refusals.FORGOTTEN  # it has taken none
    assert node.take(node.cut(training=10, held_out=10)) == 0


def test_few_held_out_answers_count_as_none(tmp_path):
    for run, held_out in enumerate((3, 4)):  # the test's policy asks for four
        node = Owned(tmp_path / str(run), owner_policy="least-answers = 4").ready(training=12, held_out=held_out)
        validation = node.numbers(asked_of(asks.VALIDATION, node.catalogue, node.config))[GROUP]
        enough = held_out == 4
        assert validation["answers"] == 4 * enough
        assert (validation["error"].max() > 0) == enough
        score_L = node.numbers(asked_of(asks.SCORES, node.catalogue, node.config))[GROUP]["scores"]
        assert score_L.max() == 4 * enough


def test_target_tables_are_made_once_in_a_run(tmp_path):
    """Tables by other weights would each tell more."""
    node = Owned(tmp_path).ready(training=12, held_out=10)
    other = ArrayRecord({name: 0.9 * value for name, value in weights(node.config).to_torch_state_dict().items()})
    table_QK = node.targets(GROUP)
    assert node.send(messages.TARGETS, messages.pack_weights(other)).has_content()
    np.testing.assert_array_equal(node.targets(GROUP), table_QK)
    node.run(2)
    assert node.take(node.cut(training=12, held_out=10)) == 0
    assert node.send(messages.TARGETS, messages.pack_weights(other)).has_content()
    assert not np.array_equal(node.targets(GROUP), table_QK)


def test_a_run_has_one_catalogue(tmp_path):
    node = Owned(tmp_path)
    first, other = node.cut(training=12, held_out=10), node.cut(training=30, held_out=10)
    assert node.take(first) == 0
    assert node.take(first) == 0  # sent again after a restart
    again, swapped = replace(first, embedding_QKE=first.embedding_QKE + 1), replace(first, train_Q=~first.train_Q)
    for changed in (other, again, swapped):
        assert node.take(changed) == refusals.OTHER_CATALOGUE
    # another run is about the same answers, or about quite other ones
    for run, (training, held_out, code) in enumerate(
        ((12, 9, refusals.NEARLY_SAME), (21, 10, refusals.NEARLY_SAME), (30, 10, 0)), start=2
    ):
        node.run(run)
        assert node.take(node.cut(training=training, held_out=held_out)) == code


def test_of_two_catalogues_at_the_same_time_a_run_has_one(tmp_path, monkeypatch):
    """The other's answers would be used, and replies about them counted for the first one's questions."""
    node = Owned(tmp_path)
    first, other = node.cut(training=12, held_out=10), node.cut(training=30, held_out=10)
    read, codes = Party.answers, []

    def meanwhile(*args):
        answers = read(*args)
        if not codes:
            codes.append(None)
            codes[0] = node.take(other)
        return answers

    monkeypatch.setattr(Party, "answers", meanwhile)
    assert node.take(first) == refusals.OTHER_CATALOGUE
    assert codes == [0]
    assert len(node.catalogue.questions) == len(other.questions)
    assert len(node.context_of(GROUP)) == 30


def test_a_question_has_so_many_replies_of_each_kind_over_all_catalogues(tmp_path):
    """Rounds as the owner says, validations and scores a tenth of it; a request that is sent again counts once."""
    node = Owned(tmp_path, owner_policy="training-replies = 3").ready(training=20, held_out=10)

    def update(number):
        asked = asked_of(asks.UPDATE, node.catalogue, node.config)
        return refused(node.ask(replace(asked, settings={**asked.settings, "round": number})))

    assert [update(number) for number in (1, 1, 2, 1)] == [0] * 4
    assert [node.code(asks.VALIDATION), node.code(asks.SCORES)] == [0, 0]
    node.run(2)  # ten questions more, and the twenty have had two rounds
    node.ready(training=30, held_out=10)
    assert [update(number) for number in (1, 2)] == [0, refusals.REPLIES_SPENT]
    assert [node.code(asks.VALIDATION), node.code(asks.SCORES)] == [refusals.REPLIES_SPENT] * 2
    assert node.ledger.releases()[-1].refused == refusals.REFUSALS[refusals.REPLIES_SPENT]


def test_a_plain_step_that_is_nearly_a_sum_of_answers_is_refused(tmp_path):
    node = Owned(tmp_path, **{"pluralllm.local-steps": 15})
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert node.code(asks.UPDATE) == refusals.WEAK_TRAINING


def test_nobody_can_repeat_a_round_but_the_node_itself(tmp_path):
    """Who knows the draws can try answers until the same weights come back."""
    steps = []
    for name in ("a", "b"):
        node = Owned(tmp_path / name)
        assert node.take(node.cut(training=20, held_out=10)) == 0
        asked = asked_of(asks.UPDATE, node.catalogue, node.config)
        twice = [node.numbers(asked)[GROUP]["step"] for _ in range(2)]
        np.testing.assert_array_equal(*twice)  # nobody averages the draws away by asking again
        steps.append(twice[0])
    assert (steps[0] != steps[1]).any()


def test_sums_over_answers_are_rounded_and_their_numbers_are_not(tmp_path):
    node = Owned(tmp_path).ready(training=20, held_out=10)
    sums = []
    for kind, names in ((asks.UPDATE, ["loss"]), (asks.VALIDATION, ["error"]), (asks.SCORES, ["scores"])):
        own = node.numbers(asked_of(kind, node.catalogue, node.config))[GROUP]
        sums += [own[name].ravel() for name in names]
    tenths = 10 * np.concatenate(sums)
    np.testing.assert_allclose(tenths, np.rint(tenths), atol=1e-9)
    assert len(np.unique(np.rint(tenths))) > 8


def test_a_message_or_kind_that_nobody_knows_is_refused(tmp_path):
    node = Owned(tmp_path)
    for kind in ("query.answers", "train"):
        with pytest.raises(ValueError, match=r"^No (query|train) function registered with name '(answers|default)'$"):
            node.send(kind)
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert refused(node.ask(asks.Ask("diary"))) == refusals.FAILED


@pytest.mark.parametrize("kind", [kind for kind in asks.KINDS if kind != asks.TERMS])
def test_where_a_roster_is_pinned_nothing_but_sums_leaves(kind, tmp_path):
    node = Owned(tmp_path, f'roster = "{"0" * 64}"').ready(training=20, held_out=10)
    expected = 0 if kind == asks.OWN_SCORES else refusals.ONLY_SUMS
    assert node.code(kind) == expected
    assert node.ledger.releases()[-1].numbers == (2 if kind == asks.OWN_SCORES else 0)


def test_a_sum_without_a_roster_and_a_request_of_another_world_are_refused(tmp_path):
    node = Owned(tmp_path).ready(training=20, held_out=10)
    for task, code in (
        (Task("run", 1, (GROUP, "B", "C")), refusals.NO_ROSTER),
        (Task(request=asks.request_digest(asks.Ask(asks.VOTES), "another")), refusals.OTHER_WORLD),
    ):
        assert refused(node.send(messages.ASK, messages.pack_ask(asks.Ask(asks.VOTES), task))) == code


def test_a_request_has_an_end(tmp_path):
    node = Owned(tmp_path).ready(training=20, held_out=10)
    for count, expected in ((asks.MOST_ANSWERS, 0), (asks.MOST_ANSWERS + 1, refusals.FAILED)):
        answer_JK = np.tile(np.eye(1, node.catalogue.option_QK.shape[1]), (count, 1))
        asked = ScoreRequest(np.zeros(count, dtype=np.int64), answer_JK, ("js",))
        assert refused(node.ask(asked.ask(asks.REWARDS))) == expected


@pytest.mark.parametrize("question_id", ["a\0b", "x" * 1001])
def test_an_id_that_would_spoil_the_ledger_is_refused(question_id, tmp_path):
    node = Owned(tmp_path)
    public = node.cut(training=20, held_out=10)
    first, *others = public.questions
    bad = replace(public, questions=(replace(first, question_id=question_id), *others))
    assert node.take(bad) == refusals.FAILED


# --- scores: how many of a question, and own ones ---


def rewards(node, answer_JK, question_J, *, sides=(asks.TARGET_SIDE,), metrics=("js",)):
    """The reply's rewards by name; the code of a refusal."""
    request = ScoreRequest(np.array(question_J), np.array(answer_JK, dtype=np.float64), metrics, sides)
    asked = request.ask(asks.REWARDS)
    reply = node.ask(asked)
    return refused(reply) or node.numbers(asked)[GROUP]


def shares(node, *rows):
    """Answers (J, K), padded."""
    width = node.catalogue.option_QK.shape[1]
    return [[*row, *[0.0] * (width - len(row))] for row in rows]


def test_scores_against_predictions_end_with_the_allowance(tmp_path):
    node = Owned(tmp_path, "scores-per-question = 2").ready(training=20, held_out=10)
    two = shares(node, [1.0], [0.25, 0.75])
    unreadable = [[np.nan] * len(two[0])]
    for _ in range(2):  # the same answers again are nothing new, and one that nobody can read tells nothing
        assert not isinstance(rewards(node, [*two, *unreadable, two[0]], [0, 0, 0, 0]), int)
    spent = node.ledger.spent(f"scores by targets: {GROUP}")
    first = node.catalogue.questions[0].question_id
    assert spent == {first: 2}
    assert rewards(node, shares(node, [0.5, 0.5], [1.0]), [0, 1]) == refusals.SPENT
    assert node.ledger.spent(f"scores by targets: {GROUP}") == {first: 2}  # what did not leave was not spent
    assert not isinstance(rewards(node, shares(node, [1.0]), [1]), int)  # the other question has some left


def test_against_own_answers_what_has_no_score_left_is_unknown(tmp_path):
    policy = "scores-per-question = 1\nmay-leave = ['rewards', 'truth']"
    node = Owned(tmp_path, policy).ready(training=20, held_out=10)
    known = np.flatnonzero(~np.isnan(node.truth(GROUP)).any(1) & ~node.catalogue.train_Q)[:2]
    asked = shares(node, [1.0], [0.25, 0.75], [1.0])
    left = rewards(node, asked, [known[0], known[0], known[1]], sides=(asks.TRUTH_SIDE,))
    assert left["js truth known"].tolist() == [1.0, 0.0, 1.0]


def own_score(node, answer_JK, question_J):
    asked = ScoreRequest(np.array(question_J), np.array(answer_JK), ("js",)).ask(asks.OWN_SCORES)
    return node.numbers(asked)[GROUP]["js targets"].tolist()


def test_an_own_score_is_a_mean_over_questions_that_can_be_read(tmp_path):
    """Many answers to one question, or unreadable ones beside it, would make it that question's score."""
    node = Owned(tmp_path, "least-answers = 3").ready(training=20, held_out=10)
    corner, even = shares(node, [1.0], [0.5, 0.5])
    nothing = [np.nan] * len(corner)
    assert own_score(node, [corner, even], [0, 1]) == [0.0, 0.0]
    for unreadable in (nothing, [0.5, np.nan, *corner[2:]]):  # all of it, or a part
        assert own_score(node, [corner, unreadable, unreadable], [0, 1, 2]) == [0.0, 0.0]
    many = own_score(node, [*[corner] * 50, even, even], [*[0] * 50, 1, 2])
    single = own_score(node, [corner, even, even], [0, 1, 2])
    assert many == single
    expected = js(np.array([corner, even, even]), node.targets(GROUP)[:3], node.catalogue.option_QK[:3]).mean()
    assert single == [round(float(expected), 2), 1.0]


@pytest.mark.parametrize(("limit", "given"), [(3, [1.0, 1.0, 0.0]), (0, [0.0, 0.0, 0.0])])
def test_own_scores_end_with_the_allowance(limit, given, tmp_path):
    node = Owned(tmp_path, f"least-answers = 3\nown-score = {limit}").ready(training=20, held_out=10)
    first = shares(node, [1.0], [1.0], [1.0])
    own_score(node, first, [0, 1, 2])
    assert own_score(node, first, [0, 1, 2])[1] == given[0]  # sent again it is free
    node.run(2)  # by other weights the same request has another score
    other = ArrayRecord({name: 0.9 * value for name, value in weights(node.config).to_torch_state_dict().items()})
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert node.send(messages.TARGETS, messages.pack_weights(other)).has_content()
    got = [own_score(node, shares(node, [1.0 - n / 10, n / 10], [1.0], [1.0]), [0, 1, 2])[1] for n in range(3)]
    assert got == given
