"""Run folders of made-up numbers, and what the tests read off a report's page."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appa_flwr.config import TASK_METRICS
from appa_flwr.report import frames
from appa_flwr.report.page import page
from appa_flwr.run.read import RunReader, read_run
from appa_flwr.run.records import Iteration
from appa_flwr.run.schema import SCHEMA, SCHEMA_KEY

COUNTRIES = ("Nigeria", "Argentina", "Egypt", "Australia", "United States", "Canada", "Germany", "India")


def row(
    method: str,
    avg_as: float,
    min_as: float,
    *,
    metric: str = "js",
    against: str = "predictions",
    groups: Sequence[str] = "ab",
    readable: float = 1.0,
) -> dict[str, Any]:
    """A summary row over groups that really have this mean and minimum: the first is worst off."""
    others = (len(groups) * avg_as - min_as) / (len(groups) - 1)
    per_group = dict.fromkeys(groups, others) | {groups[0]: min_as}
    scores = {"fi": 0.9876, "avg_as": avg_as, "min_as": min_as, "per_group": per_group, "fi_readable": 0.8765}
    form = 0.95 if method in ("base", "sft", "ppo") else None
    return {
        "method": method,
        "metric": metric,
        "against": against,
        **scores,
        "format_score": form,
        "readable": readable,
    }


def rows(method: str, avg_as: float, min_as: float, **named: Any) -> list[dict[str, Any]]:
    """A method's rows against survey answers, by which it scores 0.1 less, and against predictions."""
    survey = row(method, avg_as, min_as, against="survey", **named) | {"avg_as": avg_as - 0.1, "min_as": min_as - 0.1}
    return [survey, row(method, avg_as, min_as, **named)]


def predictor_scores(js: float, answers: float = 240.0) -> dict[str, float]:
    return {"js": js, "js_distance": js - 0.15, "wasserstein": js - 0.05, "answers": answers}


def predictor_card(groups: Sequence[str] = COUNTRIES, **changed: object) -> dict[str, Any]:
    """A pluralllm.json of 240 answers and 30 rounds."""
    card = {
        "embedding": {"encoder": "ngrams", "probe": [0.5]},
        "survey": dict.fromkeys(("num_questions", "split_seed"), 7)
        | {"table": "", "training": [], "test_fraction": 0.2, "groups": {}},
        "training": {},
        "losses": [0.05 + 0.5 / r for r in range(1, 31)],
        "scores": {
            "uniform": predictor_scores(0.79),
            "pluralllm": predictor_scores(0.93),
            "nearest-question": predictor_scores(0.88),
        },
        "groups": {group: {"pluralllm": predictor_scores(0.9 - 0.01 * g)} for g, group in enumerate(groups)},
    }
    return card | changed


def write_run(folder: Path, **files: Any) -> Path:
    """A run folder with the given files; keys are file names without suffix, metrics is a list of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name == "metrics":
            text = "".join(json.dumps(line) + "\n" for line in content)
            (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        else:
            if name == "config":
                content = {SCHEMA_KEY: SCHEMA} | dict(content)
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def progressed(folder: Path, phase: str, message: str = "") -> None:
    """The folder's progress is this phase."""
    step = {"phase": phase, "step": 1, "of": 2, "message": message, "seconds_left": None}
    (folder / "progress.jsonl").write_text(json.dumps(step) + "\n")


def line(iteration: int, *, planned: int, fell_back: bool | None, groups: Sequence[str] = "ab") -> dict[str, Any]:
    losses = ("policy_loss", "value_loss", "clip_fraction", "approximate_kl", "kl")
    return {
        "iteration": iteration,
        "fairness_index": 0.98,
        "fell_back": fell_back,
        "weights": dict.fromkeys(groups, 1 / len(groups)),
        "history": dict.fromkeys(groups, 0.5),
        "rewards": dict.fromkeys(groups, 0.7),
        "group_reward": 0.7,
        "reward": 0.7,
        "format_score": 0.7,
        "missing_groups": [],
        "num_iterations": planned,
        **dict.fromkeys(losses, 0.7),
        "kl_jumped": False,
        **dict.fromkeys(("entropy", "response_length"), 0.7),
        "seconds": {"rollout": 1.0, "federation_wait": 0.5, "reference": 0.25, "update": 2.25},
        "traffic": {"messages_sent": 2, "bytes_sent": 900},
        "held_out": {},
    }


def iteration(number: int, **changes: object) -> Iteration:
    """A line of metrics.jsonl, read."""
    return Iteration(**{**line(number, planned=2, fell_back=None), **changes})


def fake_run(folder: Path, *, groups: tuple[str, ...], iterations: int) -> Path:
    """A whole run of made-up numbers; a group is missing in every 17th iteration."""
    lines = []
    for number in range(1, iterations + 1):
        lines.append(line(number, planned=iterations, fell_back=number % 3 == 0, groups=groups))
        if number % 17 == 0:
            lines[-1]["missing_groups"] = [groups[0]]
            lines[-1]["rewards"][groups[0]] = None
    return write_run(
        folder,
        config=CONFIG | {"ppo.num-iterations": iterations, "baseline-rules": ""},
        metrics=lines,
        summary=[
            scores
            for metric in TASK_METRICS["dpa"]
            for method, both in GOOD.items()
            for scores in rows(method, *both, metric=metric, groups=groups)
        ],
        pluralllm=predictor_card(groups),
    )


CONFIG = {"task": "dpa", "metric": "js", "rule": "appa", "seed": 7, "appa.fairness-threshold": 0.99}
# Avg / Min: PPO .860/.800 is above base .700/.600, uniform .790/.750, look-ups .820/.775 and SFT .810/.770; ceilings
# .900, .840.
GOOD = {
    "base": (0.700, 0.600),
    "sft": (0.810, 0.770),
    "ppo": (0.860, 0.800),
    "uniform": (0.790, 0.750),
    "majority": (0.650, 0.550),
    "option-list": (0.820, 0.760),
    "nearest-questions": (0.815, 0.775),
    "mean-prediction": (0.895, 0.815),
    "ceiling-average": (0.900, 0.820),
    "ceiling-min": (0.880, 0.840),
}


def summary(scores: Mapping[str, float | tuple[float, float]] = GOOD) -> list[dict[str, Any]]:
    """Rows of methods, from their Avg and Min AS, or from the one number that is both."""
    both = {name: scores if isinstance(scores, tuple) else (scores, scores) for name, scores in scores.items()}
    return [scores for name, avg_and_min in both.items() for scores in rows(name, *avg_and_min)]


def scored_run(folder: Path, **changed: tuple[float, float]) -> Path:
    """A run of which only config and results are known; keywords replace a method's Avg and Min AS."""
    return write_run(folder, config=CONFIG, summary=summary(GOOD | changed))


def read(folder: Path, **files: Any) -> RunReader:
    """What is read of a run folder with these files."""
    return read_run(write_run(folder, **{"config": CONFIG, **files}))


def page_of(folder: Path) -> str:
    """The page without its pictures, which take a second to draw and hold no text."""
    run = read_run(folder)
    return page(run, frames.of_run(run), {}).replace("\xa0", " ")


def cells(page: str, first: str) -> list[str]:
    """The texts of the cells of the first table row that starts with that text."""
    for found in re.findall(r"<tr[^>]*>(.*?)</tr>", page, flags=re.DOTALL):
        texts = [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", found)]
        if texts[0] == first:
            return texts
    raise AssertionError(f"no row starts with {first!r}")
