"""Export of a survey's held-out questions as a task for lm-evaluation-harness, and the metrics of the task.

The harness needs appa-flwr in its environment, since the metrics are functions of this module.

Legend: G groups, K options.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from appa_flwr.analysis.alignment import Scores, alignment_scores
from appa_flwr.config import Config
from appa_flwr.core.files import replace_file
from appa_flwr.protocol import formats
from appa_flwr.protocol.rewards import find
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Survey

_TASK = """# {questions} held-out questions of {survey}, answered by {groups} groups; written by `appa export lm-eval`.
# Run it where appa-flwr is installed too.
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: generate_until
doc_to_text: prompt
doc_to_target: ""
target_delimiter: ""
generation_kwargs:
  do_sample: false
  max_gen_toks: {tokens}
  until: ["\\n\\n"]
process_results: !function metrics.process_results
metric_list:
  - {{metric: avg_as, aggregation: !function metrics.avg_as, higher_is_better: true}}
  - {{metric: min_as, aggregation: !function metrics.min_as, higher_is_better: true}}
  - {{metric: fi, aggregation: !function metrics.fi, higher_is_better: true}}
  - {{metric: format_score, aggregation: mean, higher_is_better: true}}
metadata:
  version: 1.0
"""


def export_task(survey: Survey, config: Config, folder: Path) -> Path:
    """Write a task (YAML file, questions with every group's answers, metrics), and return the YAML's path.

    Prompts are the policy's training prompts without a chat template; the harness has `--apply_chat_template`.

    Raises:
        UserError: too few questions for a split, or the folder cannot be written.
    """
    held_out = split_questions(survey.questions, test_fraction=config.data.test_fraction, seed=config.seed).test
    rows = []
    for question in survey.questions:
        if (key := question.question_id) not in held_out:
            continue
        prompt = formats.prompt(config.task, question.text, question.options, style=config.prompt_style)
        answers = {group: mine[key].tolist() for group, mine in survey.answers.items() if key in mine}
        own = {"question_id": key, "prompt": prompt, "options": question.options, "answers": answers}
        rows.append({"task": config.task, "metric": config.reward_metric, **own})
    name = f"appa_{Path(config.survey).stem}_{config.task}".lower().replace("-", "_")
    questions = folder.absolute() / "questions.jsonl"
    content = "".join(json.dumps(row) + "\n" for row in rows)
    replace_file(questions, content.encode(), parents=True, mode=0o600)  # the groups' answers
    # The harness imports functions only from files beside a task.
    metrics = b"from appa_flwr.launch.lm_eval import avg_as, fi, min_as, process_results  # noqa: F401\n"
    replace_file(folder / "metrics.py", metrics)
    path = folder / f"{name}.yaml"
    text = _TASK.format(
        name=name,
        questions=len(rows),
        survey=Path(config.survey).name,
        groups=len(survey.groups),
        path=json.dumps(str(questions)),
        tokens=config.ppo.response_length,
    )
    replace_file(path, text.encode())
    return path


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, object]:
    """Score one answer: the reward by each group that was asked, under the name of every measure, and the format."""
    parsed, metric = formats.parse(doc["task"], results[0], len(doc["options"])), find(doc["metric"])
    real_K = np.ones(len(doc["options"]), dtype=bool)
    rewards = {
        name: 0.0 if parsed.prediction is None else float(metric(parsed.prediction, shares, real_K))
        for name, shares in doc["answers"].items()
        if shares is not None  # the harness adds None for groups that occur only in other rows
    }
    return {"avg_as": rewards, "min_as": rewards, "fi": rewards, "format_score": parsed.format_score}


def avg_as(items: Sequence[Mapping[str, float]]) -> float:
    """Mean over the groups' scores."""
    return _scores(items).avg_as


def min_as(items: Sequence[Mapping[str, float]]) -> float:
    """The worst group's score."""
    return _scores(items).min_as


def fi(items: Sequence[Mapping[str, float]]) -> float:
    """Fairness Index over the questions that two groups or more were asked."""
    return _scores(items).fairness_index


def _scores(items: Sequence[Mapping[str, float]]) -> Scores:
    groups = sorted({name for rewards in items for name in rewards})
    return alignment_scores([[rewards.get(name, np.nan) for rewards in items] for name in groups])
