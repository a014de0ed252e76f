import pytest
from small import cases
from surveys import refused

from appa_flwr.survey.nonanswers import WORDS, Missing, classify, code_text, in_context, looks_missing

TABLE = cases("nonanswers")


@pytest.mark.parametrize("case", TABLE["labels"], ids=lambda case: f"{case['kind']} {case['doubtful']}")
def test_labels(case):
    kinds = {label: classify(label) for label in case["labels"].split("|")}
    assert {label: found for label, (found, _) in kinds.items()} == dict.fromkeys(kinds, case["kind"])
    assert sorted({is_doubtful for _, is_doubtful in kinds.values()}) == case["doubtful"]


def test_the_end_of_a_scale_is_an_answer():
    scale = dict(enumerate(("Trifft voll zu", "Trifft eher zu", "Trifft nicht zu", "Weiß ich nicht")))
    assert [kind for kind, _ in in_context(scale).values()] == ["answer", "answer", "answer", "refusal"]


@pytest.mark.parametrize(("codes", "expected"), [*WORDS["codebooks"].values(), *TABLE["codes"].items()])
def test_codes_that_look_missing(codes, expected):
    assert looks_missing({code: code for code in codes.split()}) == expected.split()
    negative = [code for code in expected.split() if code[0] == "-" and "-2 -1" not in codes]
    assert looks_missing({code: "a label" for code in codes.split()}) == negative


def test_a_negative_number_is_no_answer_whatever_its_label_but_in_a_scale_with_two_halves():
    for codes, expected in (("1 2 -6", ["-6"]), ("-1 0 1", []), ("-2 -1 0", [])):
        assert looks_missing({code: f"label {code}" for code in codes.split()}) == expected


def test_the_key():
    missing = Missing("98,99,-5..-1;polintr=7,8,9;TRUST=none;Q1=Skipped once")
    holds = {
        ("any", "98"): True, ("any", "-3"): True, ("any", "-6"): False, ("any", "7"): False,
        ("polintr", "8"): True, ("polintr", "98"): False, ("TRUST", "99"): False,
    }  # fmt: skip
    assert {pair: missing.lists(*pair, pair[1]) for pair in holds} == holds
    assert missing.lists("Q1", "5", "Skipped once")
    codes = {"1": "1", "2": "2", "8": "8"}
    for decided in (missing, Missing("none")):
        decided.check("x", {"polintr": codes, "TRUST": codes})
    refused('data.missing="any=8"', missing.check, "x", {"any": codes, "TRUST": codes})
    # 8 is an answer beyond doubt to C: by column.
    scale = {code: code for code in map(str, range(10))}
    refused('data.missing="A=8;B=8"', Missing("").check, "x", {"A": codes, "B": codes, "C": scale})
    for wrong in ("=7", "A=", "A=1;A=2", "98;99"):
        refused("data.missing", Missing, wrong)


def test_codes_as_text():
    assert [*map(code_text, (3.0, "3.0", 3, " 3 ", 3.5, None, float("nan"), "Yes"))] == [
        "3", "3", "3", "3", "3.5", "", "", "Yes",
    ]  # fmt: skip
