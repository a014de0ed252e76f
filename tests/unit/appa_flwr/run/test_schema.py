"""A run's files read back as they were written; a wrong one is one line that names file, row and key."""

import json
import math
import re

import pytest
from report_runs import CONFIG, COUNTRIES, fake_run, line, row, write_run
from small import cases
from surveys import refused

from appa_flwr.run import schema
from appa_flwr.run.schema import CARD, METRICS_FILE, QUESTIONS, SCHEMA, SUMMARY

USUAL = {"summary": row("ppo", 0.8, 0.7), "metrics": line(1, planned=3, fell_back=None)}
FILES = {"metrics": METRICS_FILE, "summary": SUMMARY, "pluralllm": CARD, "questions": QUESTIONS}


def test_every_file_reads_back_and_is_written_again_to_the_letter(tmp_path):
    fake_run(tmp_path, groups=(*COUNTRIES, "Österreich\u2028\n"), iterations=18)  # in one of which a group is missing
    path = tmp_path / SUMMARY.name
    rows = json.loads(path.read_text())
    rows[0] |= {"fi": math.nan, "min_as": 1e-06, "format_score": None}
    path.write_text(json.dumps(rows, indent=1) + "\n")
    before = path.read_bytes()
    schema.write(path, SUMMARY.read(tmp_path))
    assert path.read_bytes() == before
    before = (tmp_path / METRICS_FILE.name).read_text()
    (tmp_path / METRICS_FILE.name).write_text(before + '{"iteration": 19, "num_it')  # a line that a kill cut short
    assert "".join(schema.dumps(entry) + "\n" for entry in METRICS_FILE.read(tmp_path)) == before
    card = CARD.read(tmp_path)
    schema.write(tmp_path / CARD.name, card)
    assert CARD.read(tmp_path) == card


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"schema": SCHEMA - 1}, "{folder}: another version of appa-flwr wrote this run"),
        ({"schema": SCHEMA, "task": "x"}, '{folder}/config.json: task = "x" is not valid: '),
    ],
)
def test_a_config_that_is_none_of_this_version_is_refused(tmp_path, content, says):
    (tmp_path / "config.json").write_text(json.dumps(content))
    refused(f"^{re.escape(says.format(folder=tmp_path))}", schema.read_config, tmp_path)


@pytest.mark.parametrize(("name", "content", "says"), cases("wrong_inputs")["schema"]["rows"])
def test_a_wrong_value_and_what_is_no_json_are_named_with_their_place(tmp_path, name, content, says):
    if isinstance(content, str):
        (tmp_path / FILES[name].name).write_text(content)
    else:
        write_run(tmp_path, config=CONFIG, **{name: [USUAL[name] | change for change in content]})
    refused(re.escape(says), FILES[name].read, tmp_path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / SUMMARY.name).mkdir()
    refused(r"summary\.json: cannot be read \(Is a directory\)$", SUMMARY.read, tmp_path)


def test_the_launcher_reads_a_line_once_and_when_it_is_whole(tmp_path):
    numbers, file = schema.LineFile("n.jsonl", int), tmp_path / "n.jsonl"
    assert [*numbers.lines(tmp_path)] == []
    file.write_bytes(b"1\n23")
    assert [*numbers.lines(tmp_path)] == [(1, 1)]
    file.write_bytes(b"x\n23\n\n4\n5")  # what stands before is not read again
    assert [*numbers.lines(tmp_path, after=1)] == [(2, 23), (4, 4)]
