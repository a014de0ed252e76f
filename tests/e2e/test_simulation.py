"""The whole loop in a real Flower simulation, by two rules, judged by what it leaves behind.

The second policy's rule is the guide's example of a rule of one's own.

Axis letters: G groups, Q held-out questions, K options.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from real_run import Finished, RealRuns
from small import READABLE
from transformers import AutoModelForCausalLM, AutoTokenizer

from appa_flwr.protocol import formats
from appa_flwr.protocol.rewards import METRICS
from appa_flwr.run.schema import PROGRESS
from appa_flwr.survey import store
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Question, Survey

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
DPA_METRICS = ("js", "js-distance", "wasserstein", "cosine")
NEAR_TIE = 1e-4  # of two logits, of which rounding may put either first
PHASES = ["join", "pluralllm", "targets", "votes", "base", "evaluate base", "sft", "evaluate sft", "baselines"]
SECOND = "my_rules:low"
SIDE_BY_SIDE = {"ppo by appa", "evaluate ppo", f"ppo by {SECOND}", f"evaluate ppo by {SECOND}"}
ITERATIONS = [1, 2, 3]
KEYS = {
    "policy__prompt_style": "counted",
    "data__num_questions": 50,
    "baseline_rules": SECOND,
    "appa__fairness_threshold": 1.1,  # so that the groups' weights are used in every iteration
    "ppo__num_iterations": len(ITERATIONS),
    "ppo__learning_rate": 5e-5,  # answers can still be read
    "pluralllm__rounds": 2,
}


@pytest.fixture(scope="module")
def finished(appa_run: RealRuns) -> Finished:
    here = appa_run.folder / "dpa-here"
    here.mkdir()
    section = (DOCS / "scores.md").read_text().split("## A rule of your own")[1]
    (here / "my_rules.py").write_text(section.split("```")[1].removeprefix("python"))
    return appa_run("dpa", **KEYS)


@pytest.fixture(scope="module")
def survey(finished: Finished) -> Survey:
    """What the groups of the run know."""
    return store.read(finished.folder / "survey.jsonl")


@pytest.fixture(scope="module")
def held_out(survey: Survey) -> list[Question]:
    ids = set(split_questions(survey.questions, test_fraction=0.2, seed=0).test)
    return [question for question in survey.questions if question.question_id in ids]


def test_the_run_completes_says_how_far_it_is_and_leaves_nothing_behind(finished):
    assert finished.code == 0, finished.err + finished.out[-3000:]
    assert all(line.startswith("WARNING: this machine is busy") for line in finished.err.splitlines())
    assert not (finished.folder / "error.txt").exists()
    assert not (finished.folder / "survey.memory").exists()
    assert finished.out.splitlines()[-1] == f"report: {finished.folder / 'report.html'}"
    ends = {line["phase"]: (line["step"], line["of"]) for line in finished.lines("progress.jsonl")}
    assert [phase for phase, (step, of) in ends.items() if step != of] == []
    page = (finished.folder / "report.html").read_text()
    assert f"PPO by {SECOND}" in page
    assert f"<dt>Parameters of {SECOND}</dt><dd>ema_decay = 0.8, share = 0.25</dd>" in page
    (line,) = [line for line in finished.out.splitlines() if line.startswith("[rules 1/1]")]
    assert f"temperature = 0.02, fairness_threshold = 1.1; {SECOND}: ema_decay = 0.8, share = 0.25" in line
    assert "://" not in page.replace("http://www.w3.org", "")  # it fetches nothing
    begun = [step.phase for step in PROGRESS.read(finished.folder) if step.step == 0]
    assert begun[: len(PHASES)] == PHASES
    assert sorted(begun[len(PHASES) :]) == sorted(SIDE_BY_SIDE)
    for iteration in ITERATIONS:  # one line an iteration, with time left before the last
        (line,) = [line for line in finished.out.splitlines() if line.startswith(f"[ppo by appa {iteration}/3]")]
        assert "reward" in line
        assert line.endswith("s left)") == (iteration < ITERATIONS[-1])
    # The search did see the run: Flower's processes and Ray's.
    assert len(finished.seen) > 5, finished.seen
    assert any("raylet" in name for name in finished.seen.values()), finished.seen
    assert finished.left == []
    assert {path.name for path in finished.around} - {"__pycache__"} == {"my_rules.py"}


def survey_rewards(answers: dict[str, np.ndarray | None], survey: Survey, metric: str) -> dict[tuple[str, str], float]:
    """(group, question) -> reward of an answer against the group's own."""
    return {
        (group, question_id): 0.0 if answer is None else float(METRICS[metric](answer, mine[question_id], answer >= 0))
        for group, mine in survey.answers.items()
        for question_id, answer in answers.items()
        if question_id in mine
    }


def scores_of(run: Finished, method: str, metric: str) -> dict[tuple[str, str], float]:
    """(group, question) -> reward against the group's own answer, as the run wrote it."""
    rows = pd.read_parquet(run.folder / "scores.parquet").query("against == 'survey'")
    rows = rows[(rows["method"] == method) & (rows["metric"] == metric)]
    return rows.set_index(["group", "question"])["reward"].to_dict()


@pytest.mark.parametrize("metric", DPA_METRICS)
def test_scores_against_the_survey_can_be_had_without_the_federation(finished, survey, held_out, metric):
    """The uniform answer, scored on the survey the groups hold, and means of the single scores."""
    uniform = {q.question_id: np.full(len(q.options), 1 / len(q.options)) for q in held_out}
    assert scores_of(finished, "uniform", metric) == pytest.approx(survey_rewards(uniform, survey, metric), abs=1e-9)
    for method in ("uniform", "sft", "ppo"):
        of_group = pd.Series(scores_of(finished, method, metric)).groupby(level=0).mean()
        at = {"method": method, "metric": metric, "against": "survey"}
        (row,) = [row for row in finished.json("summary.json") if at.items() <= row.items()]
        assert row["per_group"] == pytest.approx(of_group.to_dict(), abs=1e-9)


def test_the_policy_loads_with_transformers_and_answers_a_prompt(finished, survey, held_out):
    """Greedy decoding of the saved policy gives the answers that were scored, but for a near tie on the way."""
    tokenizer = AutoTokenizer.from_pretrained(finished.folder / "policy")
    model = AutoModelForCausalLM.from_pretrained(finished.folder / "policy").eval()
    answers, tied = {}, set()
    for question in held_out:
        prompt = tokenizer(formats.prompt("dpa", question.text, question.options, style="counted"), return_tensors="pt")
        made = model.generate(
            **prompt,
            do_sample=False,
            max_new_tokens=READABLE["ppo.response-length"],
            output_logits=True,
            return_dict_in_generate=True,
        )
        text = tokenizer.decode(made.sequences[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        answers[question.question_id] = formats.parse("dpa", text, len(question.options)).prediction
        if min(float(-logits[0].topk(2).values.diff()) for logits in made.logits) < NEAR_TIE:
            tied.add(question.question_id)
    expected, scored = survey_rewards(answers, survey, "js"), scores_of(finished, "ppo", "js")
    assert expected.keys() == scored.keys()
    for (group, question_id), reward in scored.items():
        assert question_id in tied or reward == pytest.approx(expected[group, question_id], abs=1e-9)
    assert len(tied) < len(held_out)


def test_the_notebook_runs_from_top_to_bottom_on_a_run_that_is_there(finished, monkeypatch, capsys):
    monkeypatch.setenv("APPA_RUN", str(finished.folder))
    names: dict[str, Any] = {}
    for cell in json.loads((DOCS / "first_run.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first_run.ipynb", "exec"), names)
    said = capsys.readouterr().out
    assert str(finished.folder / "report.html") in said
    for other, measure in product(("sft", "uniform"), ("Avg AS", "Min AS", "FI")):
        assert f"ppo - {other}, {measure}: " in said
    assert "appa-printed" in said
    assert isinstance(names["answer"].text, str)
