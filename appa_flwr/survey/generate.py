"""Generated population with known ground truth, the default survey.

A question combines a template ("How worried are you about ...?") with a topic ("wind power"), like the batteries of
real questionnaires. A held-out question is thus a new pair of known parts, to which a policy can generalise. Groups
form clusters of unequal size that differ in their stance on a few issues. Topics and templates load on these issues,
so similar questions divide the groups similarly, as in real surveys: there, a group's deviations on a question and on
the nearest other one correlate by .25 to .45.

Axis letters: G groups, Q questions, K answer options.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from appa_flwr.config.sections import DataSection
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Question, Survey

CLUSTER_SHARES = (0.6, 0.25, 0.15)
COVERAGE = 0.75
RESPONDENTS = 1000
REFUSAL_OPTION = "Don't know / refused"
NUM_ISSUES = 3
UNASKED = 2  # extra questions without answers, per question with answers
# Loadings of topics and templates on the issues. With these values the best answers for the average group cost the
# worst group .03 or more of the score that it could have, and the ceiling is about .9.
TOPIC_LOADING, TEMPLATE_LOADING = 0.45, 0.45


@dataclass(frozen=True)
class Template:
    """A question's wording, combined with many topics."""

    wording: str  # with {} for the topic
    options: tuple[str, ...]  # (K,), without a refusal
    polarity: float | None = None  # which end of the scale favours the topic, and how strongly; None without a scale
    refusal: bool = False  # whether people may refuse


_DATA = tomllib.loads(resources.files(__package__).joinpath("questionnaire.toml").read_text(encoding="utf-8"))
GROUP_NAMES: tuple[str, ...] = tuple(_DATA["groups"])
TOPICS: tuple[str, ...] = tuple(_DATA["topics"])
TEMPLATES = tuple(Template(**{**template, "options": tuple(template["options"])}) for template in _DATA["frames"])


def population(data: DataSection, seed: int) -> dict[str, Any]:
    """Arguments of `generate` from a run's section [data] and seed."""
    return {"seed": seed, **data.model_dump(include={"num_questions", "num_groups", "disagreement"})}


def generate(*, num_questions: int = 400, num_groups: int = 8, disagreement: float = 1.5, seed: int = 0) -> Survey:
    """Draw a survey from the generated population.

    Args:
        num_questions: Q, from 2 to `len(TOPICS) * len(TEMPLATES)`, else `UserError`.
        num_groups: G >= 2.
        disagreement: scale of the groups' stances around their mean, >= 0; at 0 all groups have the same stance.
        seed: the same seed gives the same survey on every machine.

    Returns:
        A survey in which each group answered about three quarters of the Q questions, with sampling noise. `extra`
        has twice as many questions without answers, or all remaining ones.
    """
    most = len(TOPICS) * len(TEMPLATES)
    if not 2 <= num_questions <= most:
        raise UserError(f"data.num-questions = {num_questions}: the generated survey has from 2 to {most} questions")
    every = min(most, (1 + UNASKED) * num_questions)
    texts, truth = ground_truth(num_questions=every, num_groups=num_groups, disagreement=disagreement, seed=seed)
    questions = texts[:num_questions]
    rng = np.random.default_rng([seed, 1])
    asked_GQ = rng.random((num_groups, num_questions)) < COVERAGE
    asked_GQ[np.arange(num_groups), rng.integers(num_questions, size=num_groups)] = True  # no group without an answer
    nobody_Q = ~asked_GQ.any(axis=0)
    asked_GQ[rng.integers(num_groups, size=num_questions)[nobody_Q], nobody_Q] = True  # no question without one
    answers: dict[str, dict[str, FloatArray]] = {}
    for (group, by_question), asked in zip(truth.items(), asked_GQ, strict=True):
        counts = [rng.multinomial(RESPONDENTS, by_question[q.question_id]) for q in questions]
        answers[group] = {
            q.question_id: count / RESPONDENTS for q, count, was in zip(questions, counts, asked, strict=True) if was
        }
    return Survey(questions, answers, extra=texts[num_questions:])


def ground_truth(
    *, num_questions: int, num_groups: int, disagreement: float = 1.5, seed: int
) -> tuple[tuple[Question, ...], Mapping[str, Mapping[str, FloatArray]]]:
    """The questions from which `generate` samples with the same arguments, and every group's exact distributions.

    The latter are group name -> question id -> distribution (K,).
    """
    rng = np.random.default_rng([seed, 0])
    pairs = rng.permutation(len(TOPICS) * len(TEMPLATES))[:num_questions]
    rounds = (divmod(g, len(GROUP_NAMES)) for g in range(num_groups))
    names = [f"{GROUP_NAMES[k]} {again + 1}" if again else GROUP_NAMES[k] for again, k in rounds]
    cluster_G = np.searchsorted(np.cumsum(CLUSTER_SHARES)[:-1], (np.arange(num_groups) + 0.5) / num_groups)
    stance_CI = rng.normal(size=(len(CLUSTER_SHARES), NUM_ISSUES))
    stance_CI /= np.linalg.norm(stance_CI, axis=1, keepdims=True)
    stance_CI[1:] -= stance_CI[:1] * 1.2  # the minorities differ from the majority, not only from each other
    stance_GI = stance_CI[cluster_G] + 0.15 * rng.normal(size=(num_groups, NUM_ISSUES))
    stance_GI += (disagreement - 1.0) * (stance_GI - stance_GI.mean(0))

    favour_T = rng.normal(size=len(TOPICS))  # how the whole population leans on a topic
    loading_TI = TOPIC_LOADING * rng.normal(size=(len(TOPICS), NUM_ISSUES))
    loading_FI = TEMPLATE_LOADING * rng.normal(size=(len(TEMPLATES), NUM_ISSUES))
    lean_F = 1.1 * rng.normal(size=len(TEMPLATES))
    logits_FK = [1.6 * rng.normal(size=len(f.options)) for f in TEMPLATES]
    topic_logits = 0.5 * rng.normal(size=(len(TOPICS), max(len(f.options) for f in TEMPLATES)))
    width_F = rng.uniform(0.11, 0.2, size=len(TEMPLATES))
    refusal_GF = rng.uniform(0.01, 0.08, size=(num_groups, len(TEMPLATES)))

    questions: list[Question] = []
    truth: dict[str, dict[str, FloatArray]] = {name: {} for name in names}
    for pair in pairs:
        topic, f = divmod(int(pair), len(TEMPLATES))
        template = TEMPLATES[f]
        text = template.wording.format(TOPICS[topic])
        options = template.options + ((REFUSAL_OPTION,) if template.refusal else ())
        has_scale = template.polarity is not None and not template.refusal
        ordinal = tuple(map(float, range(len(options)))) if has_scale else None
        question = Question(f"T{topic:02d}F{f:02d}", text[0].upper() + text[1:], options, ordinal)
        questions.append(question)
        noise = 0.15 * rng.normal()
        for g, name in enumerate(names):
            pull = (loading_TI[topic] + loading_FI[f]) @ stance_GI[g]
            if template.polarity is not None:
                lean = lean_F[f] + template.polarity * (0.6 * favour_T[topic] + 1.1 * pull) + noise
                centre = 1.0 / (1.0 + np.exp(1.3 * lean))  # 0: the first option's end of the scale
                scale_K = (np.arange(len(template.options)) + 0.5) / len(template.options)
                logits_K = -0.5 * ((scale_K - centre) / width_F[f]) ** 2
            else:
                tilt = np.cos(np.arange(len(template.options)) * np.pi / 2.0)
                logits_K = logits_FK[f] + topic_logits[topic, : len(template.options)] + 1.4 * pull * tilt
            share_K = np.exp(logits_K - logits_K.max())
            share_K = 0.98 * share_K / share_K.sum() + 0.02 / len(share_K)  # every option has a positive share
            if template.refusal:
                share_K = np.append(share_K * (1.0 - refusal_GF[g, f]), refusal_GF[g, f])
            truth[name][question.question_id] = share_K
    return tuple(questions), truth
