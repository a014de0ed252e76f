"""What SPSS's and Stata's files declare: missing codes, dates, the weight; and codes of any size."""

import resource
import struct
import subprocess
import sys

import pandas as pd
import pyreadstat
import pytest
from small import cases
from surveys import shares

from appa_flwr.survey import codebook as codebooks
from appa_flwr.survey.sources import convert, read_survey

GIGABYTE = 10**9


def test_a_declared_missing_code_that_the_owner_moves_to_the_options_counts(tmp_path):
    table = pd.DataFrame({"g": [1, 2] * 4, "q": [1, 2, 9, 9, 1, 2, 9, 1]})
    labels = {"g": {1: "A", 2: "B"}, "q": {1: "Yes", 2: "No", 9: "Refused"}}
    pyreadstat.write_sav(table, str(tmp_path / "f.sav"), variable_value_labels=labels, missing_ranges={"q": [9]})
    made = convert(tmp_path / "f.sav", group_by="g")
    assert shares(made.survey) == {"A": {"q": [1, 0]}, "B": {"q": [1 / 3, 2 / 3]}}
    codebooks.write(made.codebook, book := tmp_path / "f.toml")
    refused_line = '  { code = "9", label = "Refused" },\n'
    text = book.read_text().replace(
        f"]\nno-answers = [\n{refused_line}", refused_line.replace(" }", ", refusal = true }")
    )
    book.write_text(text)
    # A: 1, 9, 1, 9; B: 2, 9, 2, 1
    assert shares(read_survey(tmp_path / "f.sav", codebook=book)) == {
        "A": {"q": [0.5, 0, 0.5]},
        "B": {"q": [0.25, 0.5, 0.25]},
    }


def test_a_stray_code_is_named_and_makes_no_scale(tmp_path):
    # kin is a nominal list with a stray code; glad is a scale whose ends alone have words
    table = pd.DataFrame({"g": [1, 2] * 6, "kin": [0, 1, 2, 3, 5, 9] * 2, "glad": [1, 2, 3, 4, 5, 3] * 2})
    kin = {0: "None", 1: "One", 2: "Two", 3: "More", 9: "It varies"}
    labels = {"g": {1: "A", 2: "B"}, "kin": kin, "glad": {1: "Not at all", 5: "Very"}}
    measures = dict.fromkeys(("kin", "glad"), "unknown")
    pyreadstat.write_sav(table, str(tmp_path / "f.sav"), variable_value_labels=labels, variable_measure=measures)
    read = convert(tmp_path / "f.sav", group_by="g").codebook.questions
    assert (read["kin"].ordinal, read["kin"].guessed) == (False, "options without a label: 5")
    assert (read["glad"].ordinal, "ends alone have words" in read["glad"].guessed) == (True, True)


@pytest.mark.parametrize(("name", "size", "places"), [("f.sav", 20, 3), ("f.zsav", 20, 3), ("f.sav", 600, 2 * 32 + 12)])
def test_the_weight_of_the_header_counts(tmp_path, name, size, places):
    """Its place counts three for a text of 20 bytes, and 32 for each 252 bytes of a very long one."""
    table = pd.DataFrame({"g": ["A", "B" * size] * 4, "q": [1, 2, 2, 2] * 2, "w_1": [1.0] * 8, "x": [3.0, 1.0] * 4})
    labels, file = {"q": {1: "Yes", 2: "No"}}, tmp_path / name
    options = {"column_labels": {"q": "Is it?"}, "missing_ranges": {"q": [8, 9]}, "compress": name == "f.zsav"}
    pyreadstat.write_sav(table, str(file), variable_value_labels=labels, **options)
    content = bytearray(file.read_bytes())
    # A: weights 3 (Yes), 3 (No), 3 (Yes), 3 (No); as the file says, no guess
    for place, weight in ((places + 1, None), (places + 2, "w_1"), (places + 3, "x")):
        content[76:80] = struct.pack("<i", place)
        file.write_bytes(content)
        made = convert(file, group_by="g", weight="" if weight else "none")
        assert made.codebook.weight.column == (weight or "none")
        assert made.codebook.weight.guessed == ""


@pytest.mark.parametrize(
    ("suffix", "kind", "number", "text"), [(s, k, *row) for s, of in cases("dates").items() for k, row in of.items()]
)
def test_a_date_is_a_group_and_no_question(tmp_path, suffix, kind, number, text):
    table = pd.DataFrame({"d": [number, None] * 6, "g": [1, 1, 2, 2] * 3, "q": [1, 2, 3] * 4})
    write = getattr(pyreadstat, f"write_{suffix}")
    write(table, str(file := tmp_path / f"f.{suffix}"), variable_format={"d": kind})
    made = convert(file, group_by="g")
    assert made.codebook.left_out == {"d": "a date or time, as the file says"}
    assert "left out, a date or time, as the file says: d" in made.survey.about.notes
    assert read_survey(file, group_by="d").groups == (text,)


def test_codes_of_64_bits_take_a_second_and_little_memory(tmp_path):
    codes = [-(2**63), -999_999_999, 2**31 - 26, 2**62]
    rows = "".join(f"{'NS'[n % 2]},{code},{n % 3}\n" for n in range(12) for code in codes)
    (tmp_path / "f.csv").write_text(f"g,q,z\n{rows}")
    program = (
        "from appa_flwr.survey.sources import read_survey\n"
        "import pandas, sys\n"
        "try: read_survey(sys.argv[1], group_by='g')\n"
        "except Exception as error: print(error)"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (GIGABYTE, GIGABYTE))  # noqa: E731
    command = [sys.executable, "-c", program, str(tmp_path / "f.csv")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, preexec_fn=limit).stdout
    assert all(str(code) in said for code in codes[:3])
    assert "data.missing" in said
