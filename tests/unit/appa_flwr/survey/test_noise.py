"""Noise for respondents: sensitivity by hand, moments, the promise by another accountant, an attack.

The noise has no seed. Limits are six standard errors of the draws (three of a fourth of them): once in 1e9 runs.
"""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from small import CASES
from surveys import refused
from typer.testing import CliRunner

from appa_flwr.core.errors import UserError
from appa_flwr.launch.cli import app
from appa_flwr.survey import codebook as codebooks
from appa_flwr.survey import noise, sources, store
from appa_flwr.survey.codebook import Codebook
from appa_flwr.survey.files import read_frame
from appa_flwr.survey.frames import Frame
from appa_flwr.survey.noise import UNITS, Promise, counts, draw, plan
from appa_flwr.survey.sources import convert
from appa_flwr.survey.types import Noise, Question, Survey
from experiments import privacy

ERRORS = 6.0
WEIGHT = {"weight": {"column": "W"}}


def options(*labels, **marks):
    return {"options": [{"code": str(code), "label": label} | marks for code, label in enumerate(labels)]}


def book(questions=2, groups=("North", "South"), columns=1, **more) -> Codebook:
    """A codebook of questions Q0, Q1, ... with the options a, b, c, and of columns of groups G0, G1, ..."""
    items = {f"Q{n}": {"id": f"Q{n}", "text": f"Question {n}?"} | options("a", "b", "c") for n in range(questions)}
    listed = {"weight": {}, "groups": {f"G{n}": options(*groups) for n in range(columns)}, "questions": items}
    return Codebook.model_validate(listed | more)


def cells(rows, codebook, rng, *, missing=0.0):
    """Random answers of respondents, codes as texts."""
    sizes = {name: len(part.options) for name, part in (codebook.groups | codebook.questions).items()}
    table = pd.DataFrame(
        {name: rng.integers(size, size=rows).astype(str) for name, size in sizes.items()}, dtype=object
    )
    return table.mask(rng.random(table.shape) < missing, "")


def distance(table, codebook, cap, row) -> float:
    """L2 distance of all counts with and without a row."""
    both = [counts(Frame("f", part.copy()), codebook, cap) for part in (table, table.drop(index=row))]
    return math.sqrt(sum(((count - both[1][at]) ** 2).sum() for at, count in both[0].items()))


@pytest.mark.parametrize("weighted", [False, True])
def test_no_respondent_moves_the_counts_by_more_than_the_stated_bound_and_one_reaches_it(weighted):
    rng = np.random.default_rng(6)
    codebook = book(questions=3, columns=2, **({"weight": {"column": "W", "unit": 0.5}} if weighted else {}))
    line = plan(codebook, Promise(4.0, cap=2.49 if weighted else 0.0))  # 2.5 in whole 1/64
    # 3 questions, 2 columns of groups: sqrt(6) cells move, each by the cap of 2.5 or by 1
    assert math.isclose(line.sensitivity, (2.5 if weighted else 1.0) * math.sqrt(6.0))
    moved = []
    for _ in range(200):
        table = cells(25, codebook, rng, missing=0.1)
        if weighted:
            table["W"] = rng.lognormal(sigma=1.0, size=25)
            table.loc[0, "W"] = 60.0
        moved.append(distance(table, codebook, line.cap, rng.choice([0, rng.integers(25)])))
    assert max(moved) <= line.sensitivity * UNITS
    assert math.isclose(max(moved), line.sensitivity * UNITS)


def test_counts_by_hand():
    table = pd.DataFrame({"G0": ["0", 1.0, "1", "9", "1"], "Q0": ["2", "0", "0", "0", ""], "W": ["1", 0.5, 60, 1, 1]})
    found = counts(Frame("f", table.astype(object)), book(questions=2, **WEIGHT), 2.0)
    # in 1/64 people: North c 1; South a 0.5 and 2 of 60; no group 9, no answer ""; nobody has a cell of Q1
    assert {at: count.tolist() for at, count in found.items()} == {
        ("G0", "Q0"): [[0, 0, 64], [160, 0, 0]],
        ("G0", "Q1"): [[0, 0, 0], [0, 0, 0]],
    }


def test_the_noise_has_the_stated_moments_and_is_never_the_same():
    line, size = plan(book(), Promise(2.0)), 40_000
    noisy = draw(np.full(size, 3 * UNITS), line)
    assert abs(noisy.mean() - 3.0) < ERRORS * line.sd / math.sqrt(size)
    assert abs(noisy.var() / line.sd**2 - 1.0) < ERRORS * math.sqrt(2.0 / size)
    assert (draw(np.zeros(100, np.int64), line) != draw(np.zeros(100, np.int64), line)).any()


def spent(about: Noise, *, sd: float) -> float:
    """Epsilon of the worst neighbour, of whom each question and column moves a cell by the cap, by another library."""
    one = pld.from_discrete_gaussian_mechanism(sd * UNITS, int(about.cap * UNITS))
    return one.self_compose(about.questions * about.columns).get_epsilon_for_delta(about.delta)


@pytest.mark.parametrize(("epsilon", "columns", "more", "cap"), [(4.0, 1, {}, 0.0), (1.0, 2, WEIGHT, 2.5)])
def test_a_written_file_keeps_its_promise_by_an_independent_accountant(epsilon, columns, more, cap, tmp_path):
    codebook = book(questions=5, columns=columns, **more)
    table = cells(2000, codebook, np.random.default_rng(1)).assign(W="1")
    written = release(tmp_path, table, codebook, Promise(epsilon, cap=cap))
    about = store.read_about(written).noise
    assert 0.8 * epsilon < spent(about, sd=about.sd) <= epsilon
    assert spent(about, sd=about.sd / 2) > epsilon


def test_noise_that_openDP_does_not_account_for_is_not_drawn():
    line = plan(book(), Promise(4.0))
    for wrong in ({"sd": line.sd / 2}, {"questions": 50}):
        with pytest.raises(RuntimeError, match="promise"):
            draw(np.zeros(4, np.int64), Noise(**vars(line) | wrong))


@pytest.mark.parametrize(("epsilon", "theory"), [(8.0, 0.532), (4.0, 0.307), (2.0, 0.166), (1.0, 0.088)])
def test_whoever_knows_everybody_else_gains_no_more_than_the_theorem_says(epsilon, theory):
    frame, codebook, _ = privacy.invented(50, seed=0, groups=1)
    line, trials = plan(codebook, Promise(epsilon)), 600
    gained = privacy.advantage(frame, codebook, line, trials=trials)
    # hits and false alarms are independent shares, p (1 - theory) / 2 and its mirror image
    error = math.sqrt(2.0 * (1.0 - theory**2) / 4.0 / trials)
    assert abs(gained - theory) < ERRORS * error
    assert privacy.advantage(frame, codebook, None, trials=1) == 1.0


# --- whole files ---------------------------------------------------------------------------------------------------


def release(folder, table, codebook, promise):
    """A file of respondents with its codebook, released."""
    table.to_csv(folder / "f.csv", index=False)
    codebooks.write(codebook, folder / "f.toml")
    made = convert(folder / "f.csv", codebook=folder / "f.toml", promise=promise)
    store.write(made.survey, folder / "f.jsonl")
    return folder / "f.jsonl"


def test_of_two_files_that_differ_in_one_person_everything_is_distributed_alike(tmp_path):
    codebook = book(groups=("North", "South", "East"), **WEIGHT)
    table = cells(400, book(**WEIGHT), np.random.default_rng(2)).assign(W="1").replace({"Q0": {"2": "1"}})
    person = {"G0": ["2"], "Q0": ["2"], "Q1": ["0"], "W": ["60"]}  # alone in East, alone with c, the largest weight
    files, trials, headers, seen = (table, pd.concat([table, pd.DataFrame(person)])), 60, set(), []
    for file in files:
        frequency = Counter()
        for _ in range(trials):
            lines = release(tmp_path, file, codebook, Promise(1.0, cap=1.0)).read_text().splitlines()
            first, *rows = map(json.loads, lines)
            headers.add(json.dumps(first | {"groups": []}))  # those with an answer, as the rows are
            frequency.update(f"{row.get('group')} {row['question_id']} {row['options']}" for row in rows)
            frequency.update(f"{row['group']} c chosen" for row in rows if row.get("distribution", [0.0])[-1] > 0.0)
        seen.append(frequency)
    assert len(headers) == 1
    # .088 by the theorem at epsilon 1, for "c chosen" of two questions, and six standard errors of a difference
    limit = 2 * trials * 0.088 + ERRORS * math.sqrt(2.0 * 0.25 * trials)
    assert limit < trials  # or the test would find nothing
    for key in seen[0] | seen[1]:
        assert abs(seen[0][key] - seen[1][key]) < limit, key


def test_shares_and_n_come_from_the_noisy_counts(tmp_path):
    # by hand: -1, 2, 5 sum to 6; without the first, 2 and 5 are lowered by .5 each: 1.5 and 4.5
    assert noise.people(np.array([-1.0, 2.0, 5.0]), 1.0).tolist() == [0.0, 1.5, 4.5]
    assert noise.people(np.array([1.0, 1.0, 1.4]), 1.0) is None  # under 2 sqrt(3) = 3.46
    assert noise.people(np.array([1.0, 1.0, 1.5]), 1.0) is not None
    codebook = book(questions=1)
    survey = store.read(release(tmp_path, cells(4000, codebook, np.random.default_rng(3)), codebook, Promise(8.0)))
    for group in ("North", "South"):
        # sd .69 at epsilon 8 and one question; 2,000 +- 32 people, a third +- .011
        assert abs(survey.respondents[group]["Q0"] - 2000) < 300
        assert abs(survey.answers[group]["Q0"] - 1 / 3).max() < 0.1
    assert survey.about.notes == ()
    assert "4000" not in survey.about.sentence()


def test_one_person_makes_no_column_and_no_header(tmp_path, monkeypatch):
    """A question that one row alone has in JSON lines; a first row that its like at the end would make no header."""
    counted, real = [], noise.release
    monkeypatch.setattr(noise, "release", lambda frame, *rest: counted.append(len(frame.cells)) or real(frame, *rest))
    rows = cells(200, book(), np.random.default_rng(7)).to_dict("records")
    lines = [json.dumps(row) for row in (*rows, rows[0] | {"Q2": "1"})]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    (tmp_path / "none.jsonl").write_text("\n".join(lines[:-1]))
    long = dict.fromkeys(rows[0], "I would rather not say at all")
    pd.DataFrame([long, *rows]).to_csv(tmp_path / "first.csv", index=False)
    assert len(read_frame(str(tmp_path / "first.csv")).cells) == 200  # as a header of texts
    for name in ("one.jsonl", "none.jsonl", "first.csv"):
        codebooks.write(book(questions=3), tmp_path / "f.toml")
        survey = convert(tmp_path / name, codebook=tmp_path / "f.toml", promise=Promise(4.0)).survey
        assert {question.question_id for question in (*survey.questions, *survey.extra)} == {"Q0", "Q1", "Q2"}
    assert counted == [201, 200, 201]


def test_dropped_refusals_do_not_make_an_answer_that_the_noise_outweighs_usable():
    entries = [{"code": "0", "label": "a"}, {"code": "1", "label": "b"}]
    entries += [{"code": "2", "label": "Refused", "refusal": True}]
    items = {"Q0": {"id": "Q0", "text": "?", "options": entries}, "Q1": {"id": "Q1", "text": "!", "options": entries}}
    codebook = book(questions=0, refusals="drop", **WEIGHT).model_dump() | {"questions": items}
    # Q0: 1,000 refusals and 2.8 answers, under 2 sqrt(2) = 2.83; Q1: 2.9 answers, and sums of weights are no numbers
    noisy = {("G0", "Q0"): np.array([[2.0, 0.8, 1000.0]]), ("G0", "Q1"): np.array([[2.0, 0.9, 1000.0]])}
    codebook["groups"]["G0"]["options"] = codebook["groups"]["G0"]["options"][:1]
    answers = [raw for raw in noise._raw_answers(Codebook.model_validate(codebook), noisy, 1.0) if raw.group]
    found = {raw.question_id: (bool(raw.problem), len(raw.people)) for raw in answers}
    assert found == {"Q0": (True, 0), "Q1": (False, 0)}


@pytest.mark.parametrize(
    ("unit", "cap", "named", "shares"),
    [
        # North: 77 No of mean 1210.94, 73 Yes of 10476.90, so .891; with 5700 for each Yes .817, which is .074 less
        (5700, 3, "0.15842 to 2.1028; of 300 weights the cap of 3 cuts 0, .* 0 ", (0.8913, 0.8835)),
        (5700, 1, "0.15842 to 2.1028; of 300 weights the cap of 1 cuts 143, .* 0 ", (0.8169, 0.8045)),
        (1, 3, "903 to 11986; of 300 weights the cap of 3 cuts 300, .* unit = NUMBER", None),
        (1e6, 3, "0.000903 to 0.011986; of 300 weights .* cuts 0, .* spoil 300 .* unit = NUMBER", None),
    ],
)
def test_weights_that_are_far_from_1_are_scaled_or_refused(unit, cap, named, shares, tmp_path):
    case, file, out = CASES / "population_weights.csv", tmp_path / "f.toml", tmp_path / "f.jsonl"
    file.write_text(case.with_suffix(".codebook.toml").read_text().replace("[weight]", f"[weight]\nunit = {unit}"))
    words = ("survey", case, "--codebook", file, "--epsilon", "4", "--weight-cap", cap)
    (code, text), (written, told) = run(*words), run(*words, "--write", out)
    assert [bool(re.search(named, said)) for said in (text, told)] == [True, True]
    assert (code, written, len(codebooks.read(file).releases)) == ((0, 0, 1) if shares else (1, 1, 0))
    if shares:
        assert " 7.4 " in text or cap == 3  # points that the cap costs
        noisy = [answers["q1"][1] for answers in store.read(out).answers.values()]
        assert abs(np.array(noisy) - shares).max() < ERRORS * 0.0238  # 3.80 people, sqrt(.89^2 + .11^2), of 147 people


def run(*arguments) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def test_what_is_refused_and_why(tmp_path, monkeypatch):
    codebook, four = book(), Promise(4.0)
    marked = [
        {"groups": {"G0": options("North", "South", seen=True)}},
        {"groups": {"G0": options("North", "South", guessed="why")}},
        {"questions": {"Q0": {"id": "Q0", "text": "?", "guessed": "a scale"} | options("a", "b")}},
        {"weight": {"guessed": "no column looks like a weight"}},
    ]
    for more in marked:
        refused("not confirmed", plan, Codebook.model_validate(codebook.model_dump() | more), four)
    refused("--weight-cap: want", plan, book(**WEIGHT), four)
    refused("has no weight", plan, codebook, Promise(4.0, cap=2.0))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "opendp.prelude", None)
        refused("pip install", noise._opendp)
    refused("--codebook", convert, tmp_path / "f.csv", promise=four)
    codebooks.write(codebook, tmp_path / "f.toml")
    (tmp_path / "f.csv").write_bytes("G0,Q0,Q1,TEXT\n0,1,1,\u00e9\n".encode("cp1252"))
    refused("UTF-8", convert, tmp_path / "f.csv", codebook=tmp_path / "f.toml", promise=four)
    (tmp_path / "f.csv").write_text("G0,Q0,Q1\n0,1,1\n")
    words = ("survey", tmp_path / "f.csv", "--codebook", tmp_path / "f.toml", "--epsilon", "4")
    with monkeypatch.context() as careless:
        careless.setattr(sources, "convert", lambda *a, **by: convert(*a, **by | {"promise": None}))
        for more in (("--write", tmp_path / "x.jsonl"), ("--out", tmp_path / "x")):
            assert "do not keep epsilon 4" in run(*words, *more)[1]
    assert not [*tmp_path.rglob("*.jsonl")]
    assert codebooks.read(tmp_path / "f.toml").releases == ()
    refused("no question", plan, book(questions=0), four)
    (tmp_path / "r.toml").write_text("releases = []\n" + (tmp_path / "f.toml").read_text())
    refused("releases", codebooks.add_release, tmp_path / "r.toml", plan(codebook, four))
    assert codebooks.read(tmp_path / "r.toml") == codebook


@pytest.mark.parametrize(("option", "name"), [("--write", ""), ("--out", "groups/south.jsonl")])
def test_releases_stand_in_the_codebook_one_at_a_time_and_add_up(option, name, tmp_path, monkeypatch):
    codebook = book()
    file = tmp_path / "f.toml"
    cells(300, codebook, np.random.default_rng(4)).to_csv(tmp_path / "f.csv", index=False)
    codebooks.write(codebook, file)
    file.write_text("# my own words\n" + file.read_text())
    words = ("survey", tmp_path / "f.csv", "--codebook", file, "--epsilon", "4")
    code, text = run(*words)  # the costs, which spend nothing
    assert code == 0
    assert all(f"epsilon {value}" in text for value in (1, 2, 4, 8))
    needed = re.search(r"(\d+) respondents a question", run(*words[:-1], "0.5")[1])
    sd = plan(codebook, Promise(0.5)).sd
    assert abs(int(needed[1]) / (3 * sd**2) - 1.0) < 0.1  # three equal shares: n = K sd^2
    assert codebooks.read(file) == codebook

    def meanwhile(*given):
        monkeypatch.undo()
        refused("another run", convert, tmp_path / "f.csv", codebook=file, promise=Promise(4.0))
        return noise.release(*given)

    monkeypatch.setattr(noise, "release", meanwhile)
    words += (option, place := tmp_path / "f.jsonl")
    assert run(*words)[0] == 0
    assert "holds a release" in run(*words)[1]
    assert "holds a release" in run(*words[:-2], "--out", nowhere := tmp_path / "nowhere")[1]
    assert not nowhere.exists()
    assert run(*words[:-2])[0] == 0  # the costs, which release nothing
    code, text = run(*words, "--again")
    assert (code, "epsilon 5.911 a respondent" in text) == (0, True)  # measured: two of 4 cost 5.9
    releases = codebooks.read(file).releases
    assert releases == (first := plan(codebook, Promise(4.0)), replace(first, total=releases[1].spent))
    about = store.read_about(place / name)
    assert (about.noise, about.sha256, about.notes) == (releases[1], "", ())
    assert file.read_text().startswith("# my own words\n")
    assert math.isclose(noise.composed(releases[:1], 1e-6), 4.0)
    codebooks.write(codebooks.read(file), tmp_path / "again.toml")
    assert codebooks.read(tmp_path / "again.toml").releases == releases


def test_an_error_that_no_share_can_have_is_not_shown(tmp_path):
    codebook = book()
    codebooks.write(codebook, file := tmp_path / "f.toml")
    cells(12, codebook, np.random.default_rng(4)).to_csv(tmp_path / "f.csv", index=False)
    code, text = run("survey", tmp_path / "f.csv", "--codebook", file, "--epsilon", "4")
    assert code == 0
    assert "over 50" in text


def test_costs_by_hand():
    shares = {"q": np.full(4, 0.25), "p": np.array([0.9, 0.1])}
    questions = (Question("q", "?", tuple("abcd")), Question("p", "?", tuple("ab")))
    survey = Survey(questions, {"A": shares}, {"A": {"q": 100.0, "p": 100.0}})
    (cost,) = noise.costs(survey, Survey(questions, {"A": {"q": np.array([0.35, 0.15, 0.25, 0.25])}}), 2.0)
    # q: sampling sqrt(.25 .75 / 100) = .0433, noise of one person sqrt(3/4) / 200 = .00433, cap sqrt(.02 / 4) = .0707
    # p: sampling sqrt(.9 .1 / 100) = .03, noise sqrt(.9^2 + .1^2) / 200 = .00453, cap (no answer) sqrt(.82 / 2) = .640
    assert cost[:2] == ("A", 100.0)
    assert np.allclose(cost[2:], [(4.330 + 3.0) / 2, (7.07 + 64.03) / 2, (0.4330 + 0.4528) / 2], atol=0.001)


@pytest.mark.parametrize(
    "change",
    [{"appa-survey": 99}, {"noise": {"delta": None}}, {"noise": {"sd": -1.0}}, {"noise": {"mechanism": "none"}}],
)
def test_a_first_line_that_this_version_cannot_read_is_an_error(change, tmp_path):
    codebook = book()
    file = release(tmp_path, cells(300, codebook, np.random.default_rng(5)), codebook, Promise(4.0))
    assert store.read(file).about.precision == store.read_about(file).noise.sentence()
    first, rest = file.read_text().split("\n", 1)
    header = json.loads(first)
    wrong = {**header, **change} if "appa-survey" in change else {**header, "noise": header["noise"] | change["noise"]}
    file.write_text(json.dumps(wrong) + "\n" + rest)
    for read in (store.read, store.read_about):
        assert "line 1" in refused("version 99|noise", read, file)
    with pytest.raises(UserError, match="line 1"):
        convert(file)
