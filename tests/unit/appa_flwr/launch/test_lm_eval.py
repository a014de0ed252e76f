"""The task for lm-evaluation-harness: what is in it, and that its scores are ours."""

import importlib.util
import json

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.config import Config
from appa_flwr.launch.lm_eval import export_task
from appa_flwr.protocol import formats, rewards
from appa_flwr.survey.generate import generate
from appa_flwr.survey.split import split_questions

SURVEY = generate(num_questions=30, num_groups=3, seed=0)
CONFIG = Config.load({"data.num-questions": 30, "data.num-groups": 3, "ppo.response-length": 44})


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = export_task(SURVEY, CONFIG, tmp_path_factory.mktemp("task") / "deep")
    assert (path.parent / "questions.jsonl").stat().st_mode & 0o077 == 0  # it holds the groups' answers
    spec = importlib.util.spec_from_file_location("metrics", path.parent / "metrics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = (path.parent / "questions.jsonl").read_text().splitlines()
    content = yaml.safe_load(path.read_text().replace("!function", "function"))  # the harness's own tag
    return content, module, [json.loads(line) for line in lines]


def test_the_task_holds_the_held_out_questions_with_every_group_s_answers(task):
    content, module, docs = task
    assert [doc["question_id"] for doc in docs] == list(split_questions(SURVEY.questions, seed=0).test)
    for doc in docs:
        expected = {g: a[doc["question_id"]].tolist() for g, a in SURVEY.answers.items() if doc["question_id"] in a}
        assert doc["answers"] == expected
        question = next(q for q in SURVEY.questions if q.question_id == doc["question_id"])
        assert doc["prompt"] == formats.prompt("dpa", question.text, question.options, style="compact")
    assert content["task"] == "appa_generated_dpa"
    assert content["dataset_kwargs"]["data_files"]["test"].endswith("deep/questions.jsonl")
    assert content["generation_kwargs"]["max_gen_toks"] == 44
    assert content["process_results"] == "function metrics.process_results"
    measures = {entry["metric"]: entry["aggregation"] for entry in content["metric_list"]}
    assert set(measures) == set(module.process_results(docs[0], ["0.5"]))
    assert all(callable(getattr(module, name)) for name in measures if measures[name] != "mean")


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_scores_are_those_of_a_run(task, seed):
    _, module, docs = task
    rng, items = np.random.default_rng(seed), []
    reward_GQ = np.full((3, len(docs)), np.nan)
    for q, doc in enumerate(docs):
        size = len(doc["options"])
        text = "what?" if rng.random() < 0.2 else formats.answer("dpa", rng.dirichlet(np.ones(size)))
        given_doc = {**doc, "answers": {name: doc["answers"].get(name) for name in SURVEY.groups}}  # as a table has it
        items.append(module.process_results(given_doc, [text]))
        prediction = formats.parse("dpa", text, size).prediction
        for g, name in enumerate(SURVEY.groups):
            if name in doc["answers"]:
                real = np.ones(size, bool)
                reward_GQ[g, q] = 0 if prediction is None else rewards.js(prediction, doc["answers"][name], real)
    expected = alignment_scores(reward_GQ)
    assert module.avg_as([item["avg_as"] for item in items]) == pytest.approx(expected.avg_as)
    assert module.min_as([item["min_as"] for item in items]) == pytest.approx(expected.min_as)
    assert module.fi([item["fi"] for item in items]) == pytest.approx(expected.fairness_index)
