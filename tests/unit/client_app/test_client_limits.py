"""What a deployed node keeps to in a run: one catalogue, one table of predictions, requests that have an end."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from nodes import asked_of, weights
from owned import GROUP, Owned, refused

from appa_flwr.protocol import messages, queries, refusals
from appa_flwr.protocol.queries import RewardQuery
from client_app.memory import memory_of
from client_app.node import LEAST_HELD_OUT, Node
from pluralllm.prediction import GroupPredictor


def other_weights(node):
    return ArrayRecord({name: 0.9 * value for name, value in weights(node.config).to_torch_state_dict().items()})


def test_few_held_out_answers_count_as_none(tmp_path):
    for run, held_out in enumerate((LEAST_HELD_OUT - 1, LEAST_HELD_OUT)):
        node = Owned(tmp_path / str(run)).ready(training=12, held_out=held_out)
        enough = held_out == LEAST_HELD_OUT
        score_L = node.numbers(asked_of(queries.SCORES, node.catalogue, node.config))[GROUP]["scores"]
        assert score_L.max() == LEAST_HELD_OUT * enough


@pytest.mark.parametrize("held_out", [0, 10])
def test_a_group_that_has_answered_no_training_question_takes_no_part(held_out, tmp_path):
    node = Owned(tmp_path)
    assert node.take(node.cut(training=0, held_out=held_out)) == refusals.NO_ANSWERS
    assert node.ledger.releases()[-1].refused == refusals.REFUSALS[refusals.NO_ANSWERS]


def test_target_tables_are_made_once_in_a_run(tmp_path):
    node = Owned(tmp_path).ready(training=12, held_out=10)
    table_QK = node.targets(GROUP)
    assert node.send(messages.TARGETS, messages.pack_weights(other_weights(node))).has_content()
    np.testing.assert_array_equal(node.targets(GROUP), table_QK)
    node.run(2)
    assert node.take(node.cut(training=12, held_out=10)) == 0
    assert node.send(messages.TARGETS, messages.pack_weights(other_weights(node))).has_content()
    assert not np.array_equal(node.targets(GROUP), table_QK)


def test_of_two_weights_at_the_same_time_the_table_is_by_one(tmp_path, monkeypatch):
    """The second message arrives while the table by the first one is computed, and its own after that."""
    node = Owned(tmp_path)
    assert node.take(node.cut(training=12, held_out=10)) == 0
    first = messages.pack_weights(weights(node.config))
    compute, sent = GroupPredictor.targets, []

    def meanwhile(*args):
        if not sent:
            sent.append(node.send(messages.TARGETS, messages.pack_weights(other_weights(node))))
        return compute(*args)

    monkeypatch.setattr(GroupPredictor, "targets", meanwhile)
    assert node.send(messages.TARGETS, first).has_content()
    assert memory_of(node.context)["targets"].decode() == messages.digest(first)
    table_QK = node.targets(GROUP)
    alone = Owned(tmp_path / "alone").ready(training=12, held_out=10)
    np.testing.assert_array_equal(table_QK, alone.targets(GROUP))


def test_weights_that_do_not_fit_are_not_kept(tmp_path):
    node = Owned(tmp_path)
    assert node.take(node.cut(training=12, held_out=10)) == 0
    wrong = messages.pack_weights(messages.arrays_record({"w": np.zeros(3, np.float32)}))
    assert refused(node.send(messages.TARGETS, wrong)) == refusals.FAILED
    assert node.send(messages.TARGETS, messages.pack_weights(weights(node.config))).has_content()


def test_a_run_has_one_catalogue(tmp_path):
    node = Owned(tmp_path)
    first, other = node.cut(training=12, held_out=10), node.cut(training=30, held_out=10)
    assert node.take(first) == 0
    assert node.take(first) == 0  # sent again after a restart
    again, swapped = replace(first, embedding_QKE=first.embedding_QKE + 1), replace(first, train_Q=~first.train_Q)
    for changed in (other, again, swapped):
        assert node.take(changed) == refusals.OTHER_CATALOGUE
    node.run(2)
    assert node.take(node.cut(training=12, held_out=9)) == 0


@pytest.mark.parametrize(
    ("limit", "most", "more"),
    [
        ("MOST_BYTES", messages.MOST_BYTES, {"junk": ConfigRecord({"x": 1})}),
        ("MOST_BYTES", 1000, {}),
        ("MOST_FEATURES", 1000, {}),
    ],
)
def test_a_catalogue_beyond_the_protocol_is_not_stored_and_the_log_says_what_it_cost(
    limit, most, more, tmp_path, monkeypatch, caplog
):
    node = Owned(tmp_path)
    content = RecordDict({**messages.pack_catalogue(node.cut(training=12, held_out=10)), **more})
    monkeypatch.setattr(messages, limit, most)
    assert refused(node.send(messages.CATALOGUE, content)) == refusals.FAILED
    assert len(node.memory) == 0
    assert "catalogue cost 0." in caplog.text


def test_of_two_catalogues_at_the_same_time_a_run_has_one(tmp_path, monkeypatch):
    node = Owned(tmp_path)
    first, other = node.cut(training=12, held_out=10), node.cut(training=30, held_out=10)
    read, codes = Node.answers, []

    def meanwhile(*args):
        if not codes:
            codes.append(node.take(other))
        return read(*args)

    monkeypatch.setattr(Node, "answers", meanwhile)
    assert node.take(first) == 0
    assert codes == [refusals.OTHER_CATALOGUE]
    assert len(node.catalogue.questions) == len(first.questions)
    assert len(node.context_of(GROUP)) == 12


def test_a_message_or_kind_that_nobody_knows_is_refused(tmp_path):
    node = Owned(tmp_path)
    for kind in ("query.answers", "query.open", "train"):
        with pytest.raises(ValueError, match=r"^No (query|train) function registered with name '\w+'$"):
            node.send(kind)
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert refused(node.ask(queries.Query("diary"))) == refusals.FAILED


def test_a_request_of_another_catalogue_or_config_is_refused(tmp_path):
    node = Owned(tmp_path).ready(training=20, held_out=10)
    digest = queries.query_digest(queries.Query(queries.VOTES), "another world")
    assert (
        refused(node.send(messages.ASK, messages.pack_query(queries.Query(queries.VOTES), digest)))
        == refusals.OTHER_CONTEXT
    )


def test_votes_and_rewards_need_neither_texts_nor_features(tmp_path):
    node = Owned(tmp_path, "may-leave = ['votes', 'training', 'rewards', 'truth']").ready(training=20, held_out=10)
    references = (queries.TARGET_REFERENCE, queries.TRUTH_REFERENCE)
    asked = [asked_of(kind, node.catalogue, node.config, references=references) for kind in queries.QUERY_KINDS]
    del node.memory["public"]
    assert {ask.kind for ask in asked if node.ask(ask).has_content()} == {queries.VOTES, queries.REWARDS}


def test_a_request_has_an_end(tmp_path):
    node = Owned(tmp_path).ready(training=20, held_out=10)
    for count, expected in ((queries.MOST_ANSWERS, 0), (queries.MOST_ANSWERS + 1, refusals.FAILED)):
        answer_JK = np.tile(np.eye(1, node.catalogue.option_QK.shape[1]), (count, 1))
        asked = RewardQuery(np.zeros(count, dtype=np.int64), answer_JK, ("js",))
        assert refused(node.ask(asked.query())) == expected


@pytest.mark.parametrize("question_id", ["a\0b", "x" * 1001])
def test_an_id_that_would_spoil_a_log_is_refused(question_id, tmp_path):
    node = Owned(tmp_path)
    public = node.cut(training=20, held_out=10)
    first, *others = public.questions
    bad = replace(public, questions=(replace(first, question_id=question_id), *others))
    assert node.take(bad) == refusals.FAILED
