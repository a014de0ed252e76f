"""Every message through Flower's own serialisation, and what a server may meet instead of a message.

Axis letters: Q public questions, K options, J scored answers, E features.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import cross_records

from appa_flwr.protocol import wire
from appa_flwr.survey.types import Question

QUESTIONS = (
    Question("q|1", 'Wie "zufrieden" sind Sie?', ("sehr", "gar nicht", "weiß nicht"), (1.0, 2.5, -3.0)),
    Question("q2", "", ("a\n", "b|c")),
)
KEY = f"0|js|{wire.TARGET_SIDE}"


def catalogue() -> wire.Catalogue:
    option_QK = np.array([[True, True, True], [True, True, False]])
    embedding_QKE = np.arange(12, dtype=np.float32).reshape(2, 3, 2) / 7
    return wire.Catalogue(QUESTIONS, np.array([True, False]), embedding_QKE, option_QK, np.array([False, True]))


def bits(value: object) -> object:
    """A message's fields, with type, shape and bits of every array, NaN included."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in vars(value).values()] if type(value).__module__ == wire.__name__ else value


def test_a_catalogue_arrives_as_it_was_sent():
    got = wire.unpack_catalogue(cross_records(wire.pack_catalogue(catalogue())))
    assert bits(got) == bits(catalogue())
    assert not got.held_out_Q.any()


@pytest.mark.parametrize("num_answers", [0, 3])
def test_a_score_request_arrives_as_it_was_sent(num_answers):
    prediction_JK = np.array([[0.1, 0.9, 0.0], [np.nan] * 3, [1 / 3] * 3])[:num_answers]
    sent = wire.ScoreRequest(
        np.array([1, 0, 1])[:num_answers], prediction_JK, ("js", "borda"), (wire.TARGET_SIDE, wire.TRUTH_SIDE), 7
    )
    assert bits(wire.unpack_score_request(cross_records(wire.pack_score_request(sent)))) == bits(sent)


finite = st.floats(allow_nan=True, allow_infinity=True)
names = st.text(max_size=8)


@st.composite
def replies(draw):
    rewards = st.dictionaries(
        st.tuples(st.sampled_from(["js", "wasserstein"]), st.sampled_from([wire.TARGET_SIDE, wire.TRUTH_SIDE])),
        st.lists(finite, max_size=4).map(lambda values: np.array(values, dtype=np.float64)),
    )
    votes = st.none() | st.lists(st.lists(finite, min_size=2, max_size=2), max_size=3).map(
        lambda rows: np.array(rows, dtype=np.float64).reshape(-1, 2)
    )
    counts = st.dictionaries(st.sampled_from(["answered", "known"]), st.integers(0, 2**40))
    measures = st.dictionaries(st.sampled_from(["answers", "js"]), st.floats(0, 1e6), min_size=1)
    parts = st.tuples(st.sampled_from(["held-out", "training"]), st.sampled_from(["pluralllm", "uniform"]))
    fields = names, rewards, votes, counts, st.dictionaries(parts, measures), votes
    return tuple(wire.GroupReply(*map(draw, fields)) for _ in range(draw(st.integers(0, 3))))


@settings(max_examples=50, deadline=None)
@given(replies())
def test_replies_arrive_as_they_were_sent_whatever_the_groups_are_called(sent):
    got = wire.unpack_replies(cross_records(wire.pack_replies(sent)))
    assert list(map(bits, got)) == list(map(bits, sent))


TOTALS = wire.Totals(np.array([[1.5, 0.5], [0.0, 0.0]]), np.array([2, 0]), ("A", "B|1"))


def test_totals_arrive_as_they_were_sent_where_they_were():
    assert bits(wire.unpack_totals(cross_records(wire.pack_totals(TOTALS)))) == bits(TOTALS)
    assert wire.unpack_totals(RecordDict()) is None


@pytest.mark.parametrize(("key", "value"), [("answer", np.ones(2)), ("count", np.ones(2)), ("names", [1])])
def test_totals_of_another_kind_are_no_part_of_the_protocol(key, value):
    content = wire.pack_totals(TOTALS)
    content["within" if key == "names" else "totals"][key] = value if key == "names" else Array(value)
    with pytest.raises(ValueError, match="does not follow the protocol"):
        wire.unpack_totals(content)


WEIGHTS = {
    "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "none": np.zeros((0, 3), np.float32),
    "bias": np.array([7, 8], np.float32),
    "share": np.array(9, np.float32),
}
SHAPES = {name: value.shape for name, value in WEIGHTS.items()}


def test_weights_arrive_as_they_were_sent_in_one_array_in_the_order_of_their_names():
    backwards = wire.arrays_record({name: WEIGHTS[name] for name in reversed(WEIGHTS)})
    got = wire.unpack_weights(cross_records(wire.pack_weights(backwards)))
    assert [array.numpy().tolist() for array in got.values()] == [[7, 8, 0, 1, 2, 3, 4, 5, 9]]
    arrays = wire.numpy_arrays(wire.split_weights(got, SHAPES))
    assert list(bits(arrays).items()) == list(bits(WEIGHTS).items())


def test_weights_of_another_number_or_kind_are_no_part_of_the_protocol():
    joined = wire.join_weights(wire.arrays_record(WEIGHTS))
    for shapes in ({**SHAPES, "bias": (3,)}, {**SHAPES, "more": (1,)}, {"bias": (2,)}):
        with pytest.raises(ValueError, match="a message with weights does not follow the protocol"):
            wire.split_weights(joined, shapes)
    for other in ({"v": np.zeros(9, np.float32)}, {"weights": np.zeros(9)}, {"weights": np.zeros((3, 3), np.float32)}):
        with pytest.raises(ValueError, match="a message with weights does not follow the protocol"):
            wire.split_weights(wire.arrays_record(other), SHAPES)
    with pytest.raises(TypeError):  # numbers that would be rounded
        wire.join_weights(wire.arrays_record({"w": np.zeros(2)}))


def test_what_does_not_belong_to_the_protocol_stays_outside():
    content = wire.pack_replies([wire.GroupReply("A", {("js", wire.TARGET_SIDE): np.array([0.5])})])
    content["diary"] = ConfigRecord({"dear": "diary"})
    content["more"] = ArrayRecord({"0": Array(np.ones(3))})
    (reply,) = wire.unpack_replies(cross_records(content))
    assert (reply.group, list(reply.rewards), reply.votes_QK, reply.counts) == (
        "A",
        [("js", wire.TARGET_SIDE)],
        None,
        {},
    )


def raw(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array("float64", (3,), stype, data)


def numpy_header(shape: tuple[int, ...], descr: str) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.ones(3))
    return file.getvalue()


BAD_ARRAYS = {
    "nothing": raw(b""),
    "no array": raw(b"junk"),
    "a broken archive": raw(b"PK\x03\x04" + bytes(50)),
    "an archive": raw(npz()),
    "cut short": raw(Array(np.ones(3)).data[:-1]),
    "more than any memory": raw(numpy_header((10**13,), "<f8")),
    "pickled": raw(numpy_header((1,), "|O") + bytes(8)),
    "another library's": raw(Array(np.ones(3)).data, stype="torch"),
    "text": Array(np.array(["0.5", "x"])),
    "complex": Array(np.ones(3, dtype=complex)),
    "whole numbers": Array(np.ones(3, dtype=int)),
    "a number": Array(np.array(0.5)),
    "three axes": Array(np.ones((1, 1, 1))),
}
BAD_REPLIES = {
    **{f"rewards: {name}": ("rewards", ArrayRecord({KEY: bad})) for name, bad in BAD_ARRAYS.items()},
    **{f"{of}: junk": (of, ArrayRecord({"0": BAD_ARRAYS["no array"]})) for of in ("votes", "held-out")},
    "no names": ("groups", None),
    "no record of names": ("groups", MetricRecord({"names": 1})),
    **{f"names {names}": ("groups", ConfigRecord(names)) for names in ({}, {"names": "A"}, {"names": [1]})},
    # Python would take place -1 for the last group
    **{
        f"rewards of {key}": ("rewards", ArrayRecord({key: Array(np.ones(2))}))
        for key in ("1|js|targets", "-1|js|targets", "A|js|targets", "0|js", "0|js|targets|more")
    },
    **{f"votes of {key!r}": ("votes", ArrayRecord({key: Array(np.eye(2))})) for key in ("1", "-1", "")},
    **{f"counts {count}": ("counts", MetricRecord({"0|answered": count})) for count in (0.5, [1, 2], float("nan"))},
    **{f"counts of {key}": ("counts", MetricRecord({key: 1})) for key in ("1|answered", "-1|answered", "answered")},
    **{
        f"sums of {key}": ("sums", MetricRecord({key: 1.0}))
        for key in ("1|held-out|uniform|js", "-1|held-out|uniform|js", "0|held-out|js", "js")
    },
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_reply_that_breaks_the_protocol_is_a_value_error_that_quotes_nothing(kind):
    content = wire.pack_replies([wire.GroupReply("Secretland", votes_QK=np.eye(2), counts={"known": 3})])
    assert wire.unpack_replies(content)[0].counts == {"known": 3}
    name, record = BAD_REPLIES[kind]
    content.pop(name, None)
    if record is not None:
        content[name] = record
    with pytest.raises(ValueError, match=r"^a reply does not follow the protocol \(\w+\)$") as caught:
        wire.unpack_replies(content)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        *(("catalogue", name, None) for name in ("train", "embedding", "option")),
        ("catalogue", "train", np.ones(3, dtype=bool)),  # three questions, elsewhere two
        ("catalogue", "train", np.ones(2)),
        ("catalogue", "embedding", np.ones((2, 2, 2), dtype=np.float32)),  # two options, elsewhere three
        ("catalogue", "option", np.ones((1, 3), dtype=bool)),
        ("catalogue", "option", np.ones(2, dtype=bool)),
        ("catalogue", "unanswered", np.ones(2, dtype=bool)),  # of a training question too
        *(("questions", "json", text) for text in ("", "[1, 2]", '[["a", "b", 3, null], ["a", "b", ["c"], null]]')),
        *(("questions", "json", text) for text in ('[["a", "b", ["c"], null]]', "{}")),
        ("answers", "question", np.array([0.0, 1.0])),
        ("answers", "question", np.array([0, 1, 1])),  # three questions for two answers
        ("answers", "question", np.array([[0, 1]])),
        *(("answers", "prediction", value) for value in (np.ones(2), np.ones((2, 3), dtype=np.float32))),
        *(("settings", "metrics", value) for value in ("js", [1])),
        ("settings", "sides", ["elsewhere"]),
        *(("settings", "draw", value) for value in ("x", 0.5)),
    ],
)
def test_a_broken_catalogue_or_score_request_is_a_value_error(record, name, value):
    request = wire.ScoreRequest(np.array([0, 1]), np.ones((2, 3)), ("js",))
    content, unpack, what = wire.pack_score_request(request), wire.unpack_score_request, "score request"
    if record in ("catalogue", "questions"):
        content, unpack, what = wire.pack_catalogue(catalogue()), wire.unpack_catalogue, "catalogue"
    del content[record][name]
    if value is not None:
        content[record][name] = Array(value) if isinstance(value, np.ndarray) else value
    with pytest.raises(ValueError, match=f"a {what} does not follow the protocol"):
        unpack(content)


@pytest.mark.parametrize(
    "unpack", [wire.unpack_replies, wire.unpack_score_request, wire.unpack_catalogue, wire.unpack_weights]
)
def test_an_empty_message_is_a_value_error(unpack):
    with pytest.raises(ValueError, match="does not follow the protocol"):
        unpack(RecordDict())
