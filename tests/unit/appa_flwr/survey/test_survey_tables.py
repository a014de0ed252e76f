"""Survey files in every format: what is read of them, what costs a row, and what is a user's mistake."""

from __future__ import annotations

import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from surveys import YES_NO, bits, ids, read_group, reasons, refused, row, shares, write

from appa_flwr.survey import read, tables
from appa_flwr.survey.cells import Reason
from appa_flwr.survey.tables import MAX_LINE_CHARS
from appa_flwr.survey.types import Question


def test_every_format_gives_the_same_survey(tmp_path, extension):
    scale, words = (1.0, 2.0, 3.0), ("Ja, é", 'It\'s "no"')
    rows = [
        row("q1", "A", [0.5, 0.3, 0.2], ordinal=scale),
        row("q1", "B", [0.1, 0.1, 0.8], ordinal=scale),
        row("q2", "B", [0.26, 0.76], options=words, ordinal=None),
        row("q2", "A", [0.9, 0.9], options=words, ordinal=None),
    ]
    path = write(tmp_path / f"survey{extension}", rows)
    survey = read.read_survey(path)
    assert survey.questions == (
        Question("q1", "Text of q1?", tuple(YES_NO), scale),
        Question("q2", "Text of q2?", words),
    )
    two_K = pytest.approx([0.26 / 1.02, 0.76 / 1.02])
    assert shares(survey) == {"A": {"q1": [0.5, 0.3, 0.2]}, "B": {"q1": [0.1, 0.1, 0.8], "q2": two_K}}
    # The fourth row: line 5 under a CSV header, line 4 of JSON lines, row 4 of Parquet.
    assert reasons(survey) == [(5 if extension == ".csv" else 4, Reason.SUM)]
    assert survey.rejections[0].source == str(path)
    assert (survey.rejections[0].question_id, survey.rejections[0].group) == ("q2", "A")
    assert read.read_questions(path) == survey.questions
    assert read.group_names(path) == ("A", "B")
    assert bits(read_group(path, "B")) == bits(survey.answers["B"])


def test_parquet_that_is_not_utf8_is_a_users_mistake_in_the_text_and_costs_its_cell_in_the_answers(tmp_path):
    texts = {"Estland": "[1, 0, 0]", "Lettland": "[0, 1, 0.00]"}
    rows = [row("q1", name) | {"options": str(YES_NO), "distribution": text} for name, text in texts.items()]
    path = write(tmp_path / "survey.parquet", rows)
    good = path.read_bytes()
    assert read.read_survey(path).questions[0].options == tuple(YES_NO)  # lists may be text
    path.write_bytes(good.replace(b"Lettland", b"Lettl\xe4nd"))
    for reader in (read.read_survey, read.read_questions, read.group_names):
        refused(r"survey\.parquet: not a readable Parquet file \(.*utf-8", reader, path)
    path.write_bytes(good.replace(b"[0, 1, 0.00]", b"[0, 1, 0.0\xff]"))
    survey = read.read_survey(path)
    assert survey.groups == ("Estland",)
    assert reasons(survey) == [(2, Reason.BAD_DISTRIBUTION)]


def test_csv_counts_lines_and_rejects_ragged_rows_one_by_one(tmp_path):
    path = tmp_path / "survey.csv"
    path.write_text(
        "\ufeffquestion_id,question,options,group,distribution\n"  # a spreadsheet's byte order mark
        'q1,"two\nlines","[""a"", ""b""]",A,"[0.5, 0.5]"\n'  # lines 2 and 3
        "\n"
        "q2,text,['a', 'b'],A,[0.5, 0.5]\n"  # line 5: unquoted commas make too many cells
        "q3,text\n"  # line 6
        f"q4,{'x' * 200_000},\"['a', 'b']\",A,\"[0.5, 0.5]\"\n"  # line 7
        "q5,text,\"['a', 'b']\",A,\"[0.5, 0.5]\"\n",
        encoding="utf-8",
    )
    survey = read.read_survey(path)
    assert ids(survey.questions) == ["q1", "q5"]
    assert survey.questions[0].text == "two\nlines"
    assert reasons(survey) == [(5, Reason.WRONG_CELLS), (6, Reason.WRONG_CELLS), (7, Reason.TOO_LONG)]


@pytest.mark.timeout(60)  # an unclosed string scanned anew from each of its quotes would take far longer
def test_json_lines_that_are_none_are_rejected_one_by_one(jsonl):
    good = json.dumps(row())
    bad = (
        "not json", "[1, 2]", good[:-1], good + "x", '{"question_id": "q", "distribution": [[1}', "[" * 50_000,
        '{"options": ' + "[" * 50_000 + "}", '{"distribution": ["' + '\\"' * 400_000, '{"a"}', '{"a": }', '{"a": 1,}',
        "{,}", '{"a": 1 "b": 2}', "{a: 1}", "{",
    )  # fmt: skip
    path = jsonl("", "{}", '{"question": "' + "x" * MAX_LINE_CHARS + '"}', *bad, good)
    path.write_bytes(path.read_bytes() + good.encode().replace(b"q1", b"q\xe9"))  # not UTF-8
    survey = read.read_survey(path)
    bad_lines = [(line, Reason.BAD_LINE) for line, _ in enumerate(bad, start=4)]
    last = (5 + len(bad), Reason.NOT_UNICODE)
    assert reasons(survey) == [(2, Reason.EMPTY_ID), (3, Reason.TOO_LONG), *bad_lines, last]
    assert set(survey.answers["A"]) == {"q1"}


def test_an_endless_line_of_csv_costs_its_row_and_is_not_held(tmp_path):
    good = '"[""a"", ""b""]",A,"[0.5, 0.5]"\n'
    path = tmp_path / "survey.csv"
    for hostile in ("x" * 20_000_000, "x," * 10_000_000):
        path.write_text(
            f"question_id,question,options,group,distribution\nq1,One?,{good}q2,{hostile}\nq3,Three?,{good}"
        )
        tracemalloc.start()
        try:
            survey = read.read_survey(path)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert reasons(survey) == [(3, Reason.TOO_LONG)]
        assert ids(survey.questions) == ["q1", "q3"]
        assert held < 10 * MAX_LINE_CHARS


@pytest.mark.parametrize(("count", "size"), [(300, 100_000), (50_000, 10)], ids=["bytes", "cells"])
def test_a_small_parquet_file_that_unpacks_to_much_is_refused_before_it_is(tmp_path, monkeypatch, count, size):
    """One text, said to come a thousand times, is stored once; limits as the real ones, a hundredth or less of them."""
    monkeypatch.setattr(tables, "MAX_PARQUET_BYTES", 10_000_000)
    monkeypatch.setattr(tables, "MAX_PARQUET_CELLS", 20_000)
    monkeypatch.setattr(tables, "_PART_BYTES", 1_000_000)
    path = write(tmp_path / "survey.parquet", [row("q1", question="y" * size)] * count)
    assert path.stat().st_size < 400_000
    usual = pa.default_memory_pool()
    pa.set_memory_pool(counted := pa.proxy_memory_pool(usual))
    try:
        refused(r"survey\.parquet: unpacks to more than 9 MB, or 20000 cells in a column", read.read_survey, path)
    finally:
        pa.set_memory_pool(usual)
    assert counted.max_memory() < 10_000_000


@pytest.mark.parametrize("as_category", [False, True])
def test_parquet_read_in_parts_is_what_it_is_at_once(tmp_path, monkeypatch, as_category):
    rows = [row(f"q{place % 7}", f"G{place}", attribute="a") for place in range(50)]
    path = write(tmp_path / "survey.parquet", rows)
    if as_category:
        table = pq.read_table(path)
        place = table.schema.get_field_index("group")
        pq.write_table(table.set_column(place, "group", table["group"].dictionary_encode()), path)
    whole = tables.read_table(path)
    monkeypatch.setattr(tables, "_PART_ROWS", 7)
    assert tables.read_table(path) == whole
    assert [line.number for line in whole.rows] == list(range(1, 51))


def test_a_bad_name_costs_its_row_with_the_reason_and_is_not_repeated(tmp_path, extension):
    """A semicolon stands between the groups that a node or a run names: "A;B" would be split into two."""
    bad = "Land\x1b[2J\n" * 100
    rows = [row("q1", "A"), row("q1", bad), row(bad, "A"), row("q2", "A", attribute=bad), row("<script>", "A")]
    rows += [row("q\x00", "A"), row("q1", "A;B"), row("q1", "B", attribute="x;y")]
    path = write(tmp_path / f"survey{extension}", [{"attribute": ""} | cells for cells in rows])
    survey = read.read_survey(path)
    assert survey.groups == read.group_names(path) == ("A",)
    assert ids(survey.questions) == ["q1", "<script>"]  # what it may be read as is the page's affair, which escapes it
    assert [reason for _, reason in reasons(survey)] == [Reason.BAD_NAME] * 4 + [Reason.BAD_GROUP] * 2
    assert survey.questions == read.read_questions(path)
    assert list(read_group(path, "A")) == ["q1", "<script>"]
    assert not any(bad in rejection.question_id + rejection.group for rejection in survey.rejections)


HEADER = "question_id,question,options,group,distribution\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "no such survey file"),
        ("survey.ods", "x", r"unknown survey format '\.ods'; use \.csv, \.tsv, \.jsonl, \.parquet, \.xlsx"),
        ("empty.csv", "", "holds no survey rows"),
        ("empty.jsonl", "\n\n", "holds no survey rows"),
        ("text.jsonl", "hello\n", "no line is a JSON object"),
        ("text.parquet", "hello", "not a readable Parquet file"),
        ("columns.csv", "question_id,group\nq,A\n", "missing column question, options, distribution"),
        ("columns.jsonl", '{"a": 1}\n', "missing column .*none of ours"),
        ("twice.csv", HEADER.replace("group", "group,group"), "column group occurs twice"),
        ("latin.csv", HEADER.encode() + b"q,\xe9,x,y,z\n", "not UTF-8 text"),
        ("x" * 5000, None, r"^x+: cannot be read \(File name too long\)$"),
        (".", None, "is a folder"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_unusable_files_are_named_in_one_line(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert name in refused(message, read.read_survey, name)
