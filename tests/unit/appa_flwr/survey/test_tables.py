"""Tables of shares and counts, and OpinionQA's folder."""

import pytest
from surveys import ids, refused, row, shares, write

from appa_flwr.survey.sources import read_survey


@pytest.mark.parametrize("extension", [".csv", ".jsonl", ".parquet"])
def test_our_own_columns_in_every_format(tmp_path, extension):
    rows = [
        row("q1", "A", (0.5, 0.3, 0.2), n=100, ordinal=[1, 2, None]),
        row("q1", "B", (0.25, 0.25, 0.5), n=50, ordinal=[1, 2, None]),
        row("q2", "A", (0.0, 1.0, 0.0), n=7, ordinal=None),
    ]
    survey = read_survey(write(tmp_path / f"x{extension}", rows))
    assert (ids(survey.questions), survey.groups) == (["q1", "q2"], ("A", "B"))
    assert survey.questions[0].ordinal is None  # an option has no place
    assert survey.answers["A"]["q1"].tolist() == [0.5, 0.3, 0.2]
    assert survey.respondents["A"] == {"q1": 100.0, "q2": 7.0}
    dropped = read_survey(write(tmp_path / f"x{extension}", rows), refusals="drop", groups=["B"])
    assert dropped.answers["B"]["q1"].tolist() == [0.5, 0.5]
    assert dropped.questions[0].ordinal == (1.0, 2.0)
    assert ids(dropped.extra) == ["q2"]
    refused("refusal: ", read_survey, tmp_path / f"x{extension}", refusal="drop")


def test_shares_that_are_rounded_sum_to_one_and_an_id_may_be_left_to_a_hash(tmp_path):
    (mine,) = read_survey(
        write(tmp_path / "x.jsonl", [row("q1", "A", (0.49, 0.3, 0.2)), row("", "A")])
    ).answers.values()
    assert len(mine) == 2
    assert mine["q1"].sum() == pytest.approx(1.0, abs=1e-12)


def test_opinionqa_as_published(tmp_path):
    wave = tmp_path / "human_resp" / "American_Trends_Panel_W26"
    wave.mkdir(parents=True)
    (wave / "metadata.csv").write_text("key,options\nPARTY,\"['D', 'R']\"\n")
    (wave / "info.csv").write_text(
        "key,question,references,option_ordinal\n"
        "SAFE,How safe?,\"['Very', 'Not', 'Refused']\",\"[1.0, 2.0]\"\nGONE,?,\"['a', 'b']\",\"[1.0, 2.0]\"\n"
    )
    (wave / "responses.csv").write_text(
        "SAFE,PARTY,WEIGHT_W26\nVery,D,3\nNot,D,1\nRefused,D,4\n,D,9\nNot,R,1\nVery,R,x\nMaybe,R,1\n"
    )
    survey = read_survey(tmp_path, refusals="drop")
    (question,) = survey.questions
    assert (question.text, question.options, question.ordinal) == ("How safe?", ("Very", "Not"), (1.0, 2.0))
    assert shares(survey) == {"D": {"SAFE": [0.75, 0.25]}, "R": {"SAFE": [0.0, 1.0]}}
    assert survey.respondents == {"D": {"SAFE": 2.0}, "R": {"SAFE": 1.0}}
    assert any("no list of the codebook has: 1 of SAFE" in note for note in survey.about.notes)
    refused("has no column WEIGHT_W9", read_survey, tmp_path, weight="WEIGHT_W9")
    head, listed = "key,question,references,option_ordinal\n", "['Very', 'Not', 'Maybe', 'Refused']"
    (wave / "info.csv").write_text(f'{head}SAFE,How safe?,"{listed}","[1.0, 2.0]"\n')
    (question,) = read_survey(tmp_path, refusals="drop").questions
    assert (question.options, question.ordinal) == (("Very", "Not", "Maybe"), None)  # one has no place
    (wave / "info.csv").write_text("key,question,references,option_ordinal\nSAFE,How safe?,Very,[1.0]\n")
    refused("info.csv: row 2: references: not a list", read_survey, tmp_path)
