"""Run folders of made-up numbers, and what the tests read off a report's page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from appa_flwr.report import build
from appa_flwr.report.artifacts import read_run
from appa_flwr.report.page import page
from appa_flwr.run.files import SCHEMA, SCHEMA_KEY
from appa_flwr.run.records import Card

POLICIES = ("base", "sft", "ppo", "uniform", "majority", "ceiling-average", "ceiling-min")
COUNTRIES = ("Nigeria", "Argentina", "Egypt", "Australia", "United States", "Canada", "Germany", "India")
SIZES = ["1", "2", "4", "8", "16", "32", "64"]
PNG_START = b"\x89PNG\r\n\x1a\n"


def row(policy: str, avg_as: float, min_as: float, *, metric: str = "js", survey: bool = True) -> dict[str, Any]:
    """A summary row over two groups that really have this mean and minimum: a = min, b = 2 avg - min."""
    per_group = {"a": min_as, "b": 2 * avg_as - min_as}
    scores = {"fi": 0.9876, "avg_as": avg_as, "min_as": min_as, "per_group": per_group}
    truth = {**scores, "avg_as": avg_as - 0.1, "min_as": min_as - 0.1} if survey else None
    form = 0.95 if policy in ("base", "sft", "ppo") else None
    return {"policy": policy, "metric": metric, **scores, "format_score": form, "survey": truth}


def predictor_scores(js: float, cells: float = 240.0) -> dict[str, float]:
    return {"js": js, "js_distance": js - 0.15, "wasserstein": js - 0.05, "cells": cells}


def predictor_card(groups: tuple[str, ...] = COUNTRIES, **changed: object) -> dict[str, Any]:
    """A pluralllm.json: the mean of the others is known for all 240 answers of the seen groups, and for 180 of the
    unseen one's; of 30 rounds each fifth is validated, the 20th was kept."""
    card = {
        "network": {"embedding_dim": 8, "hidden_dim": 8, "num_blocks": 1, "num_heads": 2, "population": False},
        "episodes": dict.fromkeys(("num_context", "num_targets", "num_episodes"), 4)
        | dict.fromkeys(("embedding_noise", "population_dropout"), 0.2),
        "embedding": {"kind": "ngrams", "model": "", "dim": 8, "probe": [0.5]},
        "survey": dict.fromkeys(("num_questions", "num_held_out", "split_seed"), 7)
        | {"table": "", "training": [], "test_fraction": 0.2, "groups": {}, "unseen_groups": {}},
        "training": {},
        "rounds": [
            {
                "round": r,
                "loss": 0.6 * float(np.exp(-r / 8)) + 0.05,
                "validation": 0.25 + 0.0004 * (r - 20) ** 2 if r % 5 == 0 else None,
            }
            for r in range(1, 31)
        ],
        "chosen": 20,
        "population": {"prior": False, "min_groups": 3, "training": 0, "held_out": 36},
        "scores": {
            "seen/held-out": {
                "uniform": predictor_scores(0.79),
                "pluralllm": predictor_scores(0.93),
                "nearest-question": predictor_scores(0.88),
                "mean-of-others": predictor_scores(0.94),
                "pluralllm-shared": predictor_scores(0.93),
            },
            "unseen/held-out": {
                "pluralllm": predictor_scores(0.71),
                "uniform": predictor_scores(0.69),
                "mean-of-others": predictor_scores(0.76, 180),
                "pluralllm-shared": predictor_scores(0.72, 180),
            },
        },
        "groups": {
            group: {f"{'unseen' if g == 0 else 'seen'}/held-out": {"pluralllm": predictor_scores(0.9 - 0.01 * g)}}
            for g, group in enumerate(groups)
        },
        "calibration": {"seen/held-out": {"spread": 0.0421, "rank_correlation": 0.31}},
        "by_context": {
            "seen/held-out": {str(2**i): predictor_scores(0.80 + 0.02 * i) for i in range(7)},
            "unseen/held-out": {str(2**i): predictor_scores(0.70 + 0.01 * i, 240 - i) for i in (4, 0, 1, 3)},
        },
    }
    return card | changed


def write_run(folder: Path, **files: object) -> Path:
    """A run folder with the given files; keys are file names without suffix, metrics is a list of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name == "metrics":
            assert isinstance(content, list)
            text = "".join(json.dumps(line) + "\n" for line in content)
            (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        else:
            if name == "config":
                content = {SCHEMA_KEY: SCHEMA} | dict(content)
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def line(
    iteration: int, *, planned: int, fell_back: bool | None, groups: tuple[str, ...] = ("a", "b")
) -> dict[str, Any]:
    measures = ("policy_loss", "value_loss", "clip_fraction", "approximate_kl", "kl", "entropy", "response_length")
    return {
        "iteration": iteration,
        "num_iterations": planned,
        "fairness_index": 0.98,
        "fell_back": fell_back,
        "weights": dict.fromkeys(groups, 1 / len(groups)),
        "history": dict.fromkeys(groups, 0.5),
        "rewards": dict.fromkeys(groups, 0.7),
        **dict.fromkeys(("reward", "format_score", *measures), 0.7),
        "missing_groups": [],
        "seconds": {"rollout": 1.0, "federation_wait": 0.5, "reference": 0.25, "update": 2.25},
    }


def fake_run(folder: Path, *, groups: tuple[str, ...], iterations: int, seed: int = 0) -> Path:
    """A whole run of made-up but plausible numbers, for the eye and for tests of size."""
    rng = np.random.default_rng(seed)
    level_G, history_G = rng.normal(0, 0.02, len(groups)), np.zeros(len(groups))

    def of(values_G: np.ndarray) -> dict[str, float]:
        return dict(zip(groups, values_G.tolist(), strict=True))

    lines = []
    for number in range(1, iterations + 1):
        progress = 1 - np.exp(-3 * number / iterations)
        reward_G = 0.72 + 0.11 * progress + level_G + rng.normal(0, 0.008) + rng.normal(0, 0.003, len(groups))
        absent = [groups[int(rng.integers(len(groups)))]] if number % 17 == 0 else []
        weights_G = np.exp(-history_G / 0.1)
        history_G = 0.8 * history_G + 0.2 * reward_G
        fairness = 0.975 + 0.018 * progress + rng.normal(0, 0.001)
        lines.append(
            line(number, planned=iterations, fell_back=bool(fairness >= 0.99), groups=groups)
            | {name: 0.1 + 0.7 * progress + rng.normal(0, 0.02) for name in ("format_score", "kl", "entropy")}
            | {name: rng.normal(0.05, 0.01) for name in ("policy_loss", "value_loss", "clip_fraction")}
            | {"fairness_index": fairness, "missing_groups": absent, "reward": reward_G.mean()}
            | {"weights": of(weights_G / weights_G.sum()), "history": of(history_G)}
            | {"rewards": of(reward_G) | dict.fromkeys(absent)}
        )
    middle = dict(zip(POLICIES, (0.738, 0.776, 0.834, 0.79, 0.71, 0.954, 0.943), strict=True))

    def scores(policy: str, shift: float) -> dict[str, Any]:
        flat = 0.3 if policy == "ceiling-min" else 1.0
        score_G = np.clip(middle[policy] - shift + flat * level_G + rng.normal(0, 0.006, len(groups)), 0, 1)
        fairness = 0.97 + 0.01 * rng.random()
        return {"fi": fairness, "avg_as": score_G.mean(), "min_as": score_G.min(), "per_group": of(score_G)}

    summary = [
        row(policy, 0.0, 0.0, metric=metric) | scores(policy, shift) | {"survey": scores(policy, shift + 0.03)}
        for metric, shift in (("js", 0.0), ("js-distance", 0.25), ("wasserstein", -0.04), ("cosine", 0.05))
        for policy in POLICIES
    ]
    phases = {"policy": 80.2, "pluralllm": 22.0, "sft": 31.0, "ppo": 170.5, "evaluation": 6.4}
    example = {"question": "How much do you trust the courts?", "options": ["A lot", "Somewhat", "Not at all"]}
    return write_run(
        folder,
        config=CONFIG | {"ppo.num-iterations": iterations},
        metrics=lines,
        summary=summary,
        phases=[{"phase": phase, "seconds": seconds} for phase, seconds in phases.items()],
        pluralllm=predictor_card(groups),
        examples=[example | {"sft": "0.60, 0.30, 0.10", "ppo": "0.45, 0.35, 0.20", "mean_reward": 0.912}],
    )


CONFIG = {"task": "dpa", "metric": "js", "rule": "appa", "seed": 7, "appa.fairness-threshold": 0.99}
# Avg / Min: PPO .860/.800 is above base .700/.600, uniform .790/.750 and SFT .810/.770; ceilings .900, .840.
GOOD = {
    "base": (0.700, 0.600),
    "sft": (0.810, 0.770),
    "ppo": (0.860, 0.800),
    "uniform": (0.790, 0.750),
    "majority": (0.650, 0.550),
    "ceiling-average": (0.900, 0.820),
    "ceiling-min": (0.880, 0.840),
}


def scored_run(folder: Path, **changed: tuple[float, float]) -> Path:
    """A run of which only config and results are known; keywords replace a policy's Avg and Min AS."""
    summary = [row(policy, *values) for policy, values in (GOOD | changed).items()]
    return write_run(folder, config=CONFIG, summary=summary)


def page_of(folder: Path) -> str:
    """The page without its pictures, which take a second to draw and hold no text."""
    return page(read_run(folder), {})


def built_page(folder: Path) -> str:
    return build(folder).read_text(encoding="utf-8")


def cells(page: str, first: str) -> list[str]:
    """The texts of the cells of the first table row that starts with that text."""
    for found in re.findall(r"<tr[^>]*>(.*?)</tr>", page, flags=re.DOTALL):
        texts = [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", found)]
        if texts[0] == first:
            return texts
    raise AssertionError(f"no row starts with {first!r}")


def found_predictor(folder: Path, **changed: object) -> Card:
    found = read_run(write_run(folder, config=CONFIG, pluralllm=predictor_card(**changed))).pluralllm
    assert found is not None
    return found
