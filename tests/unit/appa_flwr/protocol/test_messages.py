"""Messages cross as bytes and come back as they were; whatever else a party sends is a ValueError that quotes nothing.

Axis letters: Q questions, J answers, K options, N numbers.
"""

import dataclasses
import io
import json

import numpy as np
import pytest
from fakes import catalogue_of
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import cross_records
from small import cases

from appa_flwr.config import Config
from appa_flwr.protocol import messages, queries
from appa_flwr.protocol.queries import Layout, Query, RewardQuery
from appa_flwr.survey.types import MAX_OPTIONS

# Two features of each question's text, and two of each option's; the first and the last question have the same text.
FEATURES = np.zeros((3, 3, 4))
FEATURES[..., :2] = np.array([[0.5, -0.0], [1 / 3, 2], [0.5, -0.0]])[:, None]
FEATURES[..., 2:] = np.array([[1, 0.0], [-0.0, 3], [-1, 4]])
FEATURES[0, 2] = 0
PUBLIC = catalogue_of([2, 3, 3], train=[True, True, False], embedding_QKE=FEATURES)
ANSWERS = RewardQuery(np.array([1, 0, 1]), np.array([[0.1, 0.9, 0.0], [np.nan] * 3, [1 / 3] * 3]), ("js", "cosine"))
NO_PROTOCOL = "does not follow the protocol"
WRONG = cases("wrong_messages")


DRAWN = np.where(PUBLIC.option_QK[..., None], np.random.default_rng(0).normal(size=(3, 3, 4)), 0.0)
ONE_DIFFERS = np.ones((3, 3, 1)) * PUBLIC.option_QK[..., None]
ONE_DIFFERS[2, 1] += 1
BY_SIGN = np.zeros((3, 3, 1))
BY_SIGN[1, 1] = -0.0


@pytest.mark.parametrize(
    ("value_QKE", "questions", "options"),
    [
        (FEATURES, (2, 2), (3, 2)),  # one vector for each text
        (DRAWN, (1, 0), (8, 4)),
        (ONE_DIFFERS, (1, 0), (2, 1)),
        (BY_SIGN, (1, 0), (2, 1)),
        (np.zeros((3, 3, 4)), (1, 4), (1, 0)),
    ],
    ids=["by text", "nothing in common", "the last question's options differ", "a zero's sign", "all the same"],
)
def test_a_catalogue_arrives_as_it_was_sent_each_vector_once(value_QKE, questions, options):
    public = catalogue_of([2, 3, 3], train=[True, True, False], embedding_QKE=value_QKE)
    records = cross_records(messages.pack_catalogue(public))
    got = messages.unpack_catalogue(records)
    assert got.questions == public.questions
    for name in ("train_Q", "option_QK", "unanswered_Q", "held_out_Q"):
        np.testing.assert_array_equal(getattr(got, name), getattr(public, name))
    np.testing.assert_array_equal(got.embedding_QKE.view(np.int32), public.embedding_QKE.view(np.int32))
    sent = records.array_records["arrays"]
    assert (sent["question_features"].shape, sent["option_features"].shape) == (questions, options)


@pytest.mark.parametrize(
    "query",
    [
        Query(queries.VOTES),
        ANSWERS.query(),
        Query(queries.UPDATE, {"weights": np.array([1.5, np.inf], np.float32)}, {"round": 3}),
    ],
)
def test_a_request_arrives_as_it_was_sent_and_so_does_its_hash(query):
    got, beside = messages.unpack_query(cross_records(messages.pack_query(query, "ab" * 32)))
    assert beside == "ab" * 32
    assert got.digest == query.digest
    if query.kind == queries.REWARDS:
        again = RewardQuery.of(got)
        np.testing.assert_array_equal(again.prediction_JK, ANSWERS.prediction_JK)
        assert (again.metrics, again.references, again.context_seed) == (("js", "cosine"), ("targets",), 0)


def test_requests_that_differ_in_anything_have_other_hashes():
    zeros = np.zeros(3)
    several = [
        Query(queries.REWARDS),
        Query(queries.VOTES),
        *(Query(queries.REWARDS, settings={"more": value}) for value in (1, 1.0)),
        *(Query(queries.REWARDS, {"more": value}) for value in (zeros, zeros[:, None], zeros.astype(np.float32))),
        Query(queries.REWARDS, {"other": zeros}),
    ]
    assert len({query.digest for query in several}) == len(several)
    assert len({queries.query_digest(several[0], context) for context in ("a", "b")}) == 2


def test_the_context_is_what_a_groups_numbers_rest_on():
    def context(**changes: object) -> str:
        return queries.context_hash(
            Config.load({key.replace("__", "."): value for key, value in changes.items()}), "c", "t"
        )

    assert context() == context(**{"run.output-dir": "elsewhere", "ppo.epochs": 3})
    different = [context(), context(seed=1), context(metric="cosine"), context(**{"appa.temperature": 0.5})]
    different += [queries.context_hash(Config.load({}), *digests) for digests in (("c", ""), ("", "t"))]
    assert len(set(different)) == len(different)
    assert context(**{"sft.target": "majority"}) != context(**{"sft.target": "votes"})


WEIGHTS = {
    "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "none": np.zeros((0, 3), np.float32),
    "bias": np.array([7, 8], np.float32),
    "share": np.array(9, np.float32),
}
SHAPES = {name: value.shape for name, value in WEIGHTS.items()}


def test_weights_arrive_as_they_were_sent_in_one_array_in_the_order_of_their_names():
    backwards = messages.arrays_record({name: WEIGHTS[name] for name in reversed(WEIGHTS)})
    got = messages.unpack_weights(cross_records(messages.pack_weights(backwards)))
    assert got.tolist() == [7, 8, 0, 1, 2, 3, 4, 5, 9]
    arrays = {name: array.numpy() for name, array in messages.split_weights(got, SHAPES).items()}
    assert list(arrays) == list(WEIGHTS)
    assert all((arrays[name] == WEIGHTS[name]).all() and arrays[name].shape == SHAPES[name] for name in WEIGHTS)
    for shapes in ({**SHAPES, "bias": (3,)}, {**SHAPES, "more": (1,)}, {"bias": (2,)}):
        with pytest.raises(ValueError, match="number of weights"):
            messages.split_weights(got, shapes)
    with pytest.raises(TypeError):  # numbers that would be rounded
        messages.join_weights(messages.arrays_record({"w": np.zeros(2)}))


# --- numbers ------------------------------------------------------------------------------------------------------


def test_names_shapes_and_bounds_follow_from_the_request():
    # two training questions and a held-out one, of at most three options
    weights = {"weights": np.zeros(5, np.float32)}
    assert queries.layouts_of(Query(queries.VOTES), PUBLIC) == {"votes": Layout((3, 3), 0.0, 3.0)}
    update = queries.layouts_of(Query(queries.UPDATE, weights), PUBLIC)
    assert (update["step"], update["answers"]) == (Layout((5,), -32.0, 32.0), Layout((1,), 0.0, 2))
    assert queries.layouts_of(Query(queries.SCORES, {}, {"size": 8}), PUBLIC) == {"scores": Layout((8,), 0.0, 3.0)}
    both = dataclasses.replace(ANSWERS, metrics=("js",), references=(queries.TARGET_REFERENCE, queries.TRUTH_REFERENCE))
    names = ("js targets reward", "js truth reward", "js truth known")  # all answers have targets
    assert queries.layouts_of(both.query(), PUBLIC) == dict.fromkeys(names, Layout((3,), 0.0, 1.0))
    for bad in (Query(queries.UPDATE), Query(queries.SCORES, {}, {"size": 10**9}), Query(queries.REWARDS)):
        with pytest.raises(ValueError, match="must be"):
            queries.layouts_of(bad, PUBLIC)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=7, max_size=7))
def test_what_is_flattened_comes_back_or_is_out_of_bounds(values):
    shapes = {"a": Layout((2, 3), -1.0, 2.0), "b": Layout((1,), 0.0, 1.0)}
    arrays = {"a": np.array(values[:6]).reshape(2, 3), "b": np.array(values[6:])}
    inside = all(-1 <= x <= 2 for x in values[:6]) and 0 <= values[6] <= 1
    if inside:
        back = queries.split(np.stack([queries.flatten(arrays, shapes)] * 2), shapes)
        assert all((back[name] == array).all() for name, array in arrays.items())
    else:
        with pytest.raises(ValueError, match="outside"):
            queries.flatten(arrays, shapes)


def test_other_names_or_shapes_are_no_answer():
    shapes = {"a": Layout((2,), 0.0, 1.0)}
    for values in ({}, {"b": [0, 0]}, {"a": [0]}, {"a": [0, 0], "b": [0]}):
        with pytest.raises(ValueError, match=r"numbers|shape"):
            queries.flatten(values, shapes)
    with pytest.raises(ValueError, match="3 numbers; the request asks for 2"):
        queries.split(np.zeros(3), shapes)


# --- other parties ------------------------------------------------------------------------------------------------


def raw(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array("float64", (3,), stype, data)


def numpy_header(shape: tuple[int, ...], descr: str) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


BAD_ARRAYS = {
    "nothing": raw(b""),
    "no array": raw(b"junk"),
    "a broken archive": raw(b"PK\x03\x04" + bytes(50)),
    "cut short": raw(Array(np.ones(3)).data[:-1]),
    "more than any memory": raw(numpy_header((10**13,), "<f8")),
    "pickled": raw(numpy_header((1,), "|O") + bytes(8)),
    "another library's": raw(Array(np.ones(3)).data, stype="torch"),
    "text": Array(np.array(["0.5", "x"])),
    "whole numbers": Array(np.ones((1, 3), dtype=int)),
    "one axis": Array(np.ones(3)),
    "two rows": Array(np.ones((2, 3))),
}
BAD_REPLIES = {
    **{name: ("arrays", ArrayRecord({"numbers": bad})) for name, bad in BAD_ARRAYS.items()},
    "no numbers": ("arrays", None),
    "no head": ("head", None),
    "metrics for a head": ("head", MetricRecord({"groups": 1})),
    "a record more": ("junk", ConfigRecord()),
    "an array more": ("arrays", ArrayRecord({name: Array(np.ones((1, 3))) for name in ("numbers", "junk")})),
    "a field more": ("head", ConfigRecord({"groups": ["Secretland"], "junk": 1})),
    **{f"groups {groups}": ("head", ConfigRecord({"groups": groups})) for groups in ("A", [1], ["A", "A"])},
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_reply_that_breaks_the_protocol_is_a_value_error_that_quotes_nothing(kind):
    content = messages.pack_reply(["Secretland"], np.ones((1, 3)))
    assert messages.unpack_reply(content, numbers=True).groups == ("Secretland",)
    name, record = BAD_REPLIES[kind]
    content.pop(name, None)
    if record is not None:
        content[name] = record
    with pytest.raises(ValueError, match=r"^a reply does not follow the protocol \([\w :;,]+\)$") as caught:
        messages.unpack_reply(content, numbers=True)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def of_dtype(value: object) -> object:
    """The array of {dtype: numbers}; other values are what they are."""
    if not isinstance(value, dict):
        return value
    ((dtype, numbers),) = value.items()
    return np.array(numbers, dtype)


@pytest.mark.parametrize("case", WRONG["records"])
def test_a_broken_catalogue_or_request_is_a_value_error(case):
    kind, name, value = case["message"], case["name"], case["value"]
    content = messages.pack_catalogue(PUBLIC) if kind == "catalogue" else messages.pack_query(ANSWERS.query(), "ab")
    content[case["record"]].pop(name, None)
    if value == {"junk": []}:
        content[case["record"]][name] = raw(b"junk")
    elif value is not None:
        content[case["record"]][name] = Array(of_dtype(value)) if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=NO_PROTOCOL):
        getattr(messages, f"unpack_{kind}")(content)


@pytest.mark.parametrize("sizes", [(1, 3), (2, MAX_OPTIONS + 1), (2, 3, 2, 2)], ids=["few", "many", "unused"])
def test_a_scale_of_too_few_or_many_options_or_more_scales_than_questions_are_a_value_error(sizes):
    content = messages.pack_catalogue(PUBLIC)
    content["head"]["scales"] = json.dumps([[[str(k) for k in range(size)], None] for size in sizes])
    content["arrays"]["option"] = Array(np.zeros(sum(sizes), np.int32))
    with pytest.raises(ValueError, match=NO_PROTOCOL):
        messages.unpack_catalogue(content)


@pytest.mark.parametrize("case", WRONG["answers"])
def test_a_request_for_scores_of_no_answers_is_a_value_error(case):
    query = ANSWERS.query()
    getattr(query, case["part"])[case["name"]] = of_dtype(case["value"])
    with pytest.raises(ValueError, match=case["says"]):
        RewardQuery.of(query)


@pytest.mark.parametrize("kind", ["query", "hello", "catalogue", "weights", "reply"])
def test_an_empty_message_is_a_value_error(kind):
    with pytest.raises(ValueError, match=NO_PROTOCOL):
        getattr(messages, f"unpack_{kind}")(RecordDict())
