import pytest
from surveys import refused

from appa_flwr.survey.nonanswers import WORDS, Missing, classify, code_text, in_context, looks_missing


@pytest.mark.parametrize(
    ("kind", "doubtful", "labels"),
    [
        (
            *("refusal", {False}),
            "DK|Don't know|Don’t know|DON`T KNOW.|Don't know/Refused|DK / Refused (VOL.)|(98) Refused|99. Refused"
            "|-1 Don't know|[DK]|<Refusal>|Refusal*|No answer|.n:  No answer|No answer, refused|Don't know [DNR]"
            "|Weiß nicht|keine Angabe|No sabe / No contesta|Ne sait pas|Não sabe|Weet niet|DK (SPONTANEOUS)"
            "|затрудняюсь ответить|不知道|わからない|VOL. Don't know|Refused (VOL.)|7. VOLUNTEERED: REFUSED",
        ),
        (
            *("refusal", {True}),
            "I don't know|Decline to answer|Decline to state|Keine Angaben|RF|Not stated"
            "|Weiß ich nicht|No contestó|Je ne sais pas|No sé",
        ),
        ("refusal", {False, True}, "Refused or don't know|Don't know (DO NOT READ)|Refused/Not applicable"),
        (
            *("none", {False}),
            "Inap. (not 1 or 2 in qa1a_1)|NAP (code 2 in v1)|INAP: No internet|Missing; Unknown|.x: Moved|IAP"
            "|.i:  Inapplicable|.s:  Skipped on Web|#NULL!|NA|n/a|Not asked|Not asked in country|Not applicable"
            "|Missing|Missing; Not asked|Other missing; Multiple answers Mail (EVS)|System missing|No aplica"
            "|-4 Not asked in survey|-5 Missing: other|.x: Not available in this release"
            "|-2. Missing, other specify not coded|-4. NAP; not in this country",
        ),
        (
            *("none", {True}),
            "Valid skip|No aplicable|Not in universe|Not in this wave|N.A.|Interview terminated|Data error"
            "|Interview breakoff (partial)|N.v.t.|Left blank|Trifft nicht zu",
        ),
        (
            *("answer", {False}),
            "Not sure|Don't know anyone|Don't know him|No opinion|None|No|Agree|Other|0|98|10 Completely|A great deal"
            "|Never|Neither/nor|Refused entry|Refused to pay|Unknown soldier|Nothing|Missing persons should be found"
            "|All applicable laws|Never skip|Not missing|Rather not|Filter coffee",
        ),
    ],
)
def test_labels(kind, doubtful, labels):
    kinds = {label: classify(label) for label in labels.split("|")}
    assert {label: found for label, (found, _) in kinds.items()} == dict.fromkeys(kinds, kind)
    assert {is_doubtful for _, is_doubtful in kinds.values()} == doubtful


def test_the_end_of_a_scale_is_an_answer():
    scale = dict(enumerate(("Trifft voll zu", "Trifft eher zu", "Trifft nicht zu", "Weiß ich nicht")))
    assert [kind for kind, _ in in_context(scale).values()] == ["answer", "answer", "answer", "refusal"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        *WORDS["codebooks"].values(),
        ("1 2 3 4 5 6 7 9", "9"),
        ("1 2 3 998 999", "998 999"),
        ("1 2 3 4 66", "66"),
        ("-2 -1 1 2", "-2 -1"),
        ("1 2 .a .b", ".a .b"),
        ("18 30 45 60", ""),
        ("Yes No", ""),
        ("10 20 30 40 50 60 70 80 90 100", ""),
    ],
)
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
