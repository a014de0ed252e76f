"""The first screen of a report: what was done, whether it worked, how sure that is; and the terms of the page."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.config.keys import to_toml
from appa_flwr.core.text import duration
from appa_flwr.report.frames import method_name
from appa_flwr.run.read import BY, RunReader
from appa_flwr.run.records import LOOK_UPS, PPO

BETTER, WORSE, UNCLEAR = "better than", "worse than", "not clearly different from"
SEEDS = "experiments/seeds.toml"
READABLE = 0.9
"""A policy of which fewer answers can be read has not learned to answer."""

ENOUGH = 30
"""Fewest held-out questions whose intervals can be relied on; samples of fewer are too similar."""

GLOSSARY: Mapping[str, str] = {
    "policy": "the language model that was trained; its answer to a question is a share for each option, or a ranking",
    "survey, predictions": "what answers are scored against: survey = the groups' own survey answers; predictions = "
    "PluralLLM's predictions of them, from which the training rewards come",
    "Avg AS, Min AS": "alignment scores, 0 to 1. A group's score is the mean likeness of the policy's answers to its "
    "own over held-out questions; Avg AS is the mean over groups, Min AS the score of the worst-off group",
    "FI": "Fairness Index: 1 where all groups have the same rewards, also where all are low",
    "Held-out questions": "kept out of all training, to score answers",
    "rule, rules, appa": "how the groups' rewards become one reward: average is their mean; appa, min and mix give "
    "worse-off groups more weight",
    "Base, SFT, PPO": "Base = the model before training; SFT = after supervised training on answers; PPO = after that "
    "and reinforcement learning on the groups' rewards",
    "Uniform answer, Majority answer": "Uniform answer = equal shares; Majority answer = the option that most groups "
    "chose",
    "Look-up": "the groups' mean answers to training questions with the same options, or to the 3 most similar ones",
    "Mean of predictions": "the mean of the groups' predicted answers",
    "Ceiling": "the shared answer to all groups that is best by the predictions, in Avg AS (average) or Min AS (min)",
    "Format, Readable": "Format = how well answers keep to the form; Readable = the share that can be read. An answer "
    "that cannot be read scores 0",
    "JS, JS dist., Was., Cos., Bor.": "metrics of the reward: Jensen-Shannon divergence and distance, Wasserstein, "
    "cosine, Borda; each 1 for equal answers",
    "KL": "how far the policy is from the SFT policy: the mean log-ratio of an answer's probabilities, in nats",
    "PluralLLM": "the network that predicts a group's answer to a question from the group's other answers",
}
"""Terms, separated by commas -> their meaning."""


_TERM = re.compile("|".join(rf"\b{re.escape(term)}\b" for terms in GLOSSARY for term in terms.split(", ")))


def explained(text: str) -> Markup:
    """The text with every term's meaning as the title of its first word."""
    titles = {name: meaning for terms, meaning in GLOSSARY.items() for name in terms.split(", ")}
    parts, end = [], 0
    for term in _TERM.finditer(text):
        if meaning := titles.pop(term[0], ""):
            parts += [escape(text[end : term.start()]), Markup('<abbr title="{}">{}</abbr>').format(meaning, term[0])]
            end = term.end()
    return Markup("").join([*parts, escape(text[end:])])


def glossary(text: str) -> Iterator[tuple[str, str]]:
    """Yield those terms, with their meaning, of which the text has one."""
    for terms, meaning in GLOSSARY.items():
        if re.search("|".join(rf"\b{re.escape(term)}" for term in terms.split(", ")), text):
            yield terms, meaning


def sentences(run: RunReader, intervals: pd.DataFrame) -> Iterator[str]:
    """Yield what was done; for a run with scores of its policy, whether it worked; and how sure that is."""
    config, counts = run.config, run.questions
    deployed, trained = bool(config.run.group_keys), PPO in {*run.summary.get("method", ())}
    source = f"answers from {Path(config.survey).name}"
    if deployed or config.survey == GENERATED_SURVEY:
        source = "answers that stayed with them" if deployed else "invented answers"
    was = "was" if trained else "is to be"
    by = f"once by each of the rules {', '.join(config.rules)}" if len(config.rules) > 1 else f"rule {config.rule}"
    done = {
        "all": f"The model {config.model} {was} trained by reinforcement learning (PPO), {by}, on",
        "pluralllm": "PluralLLM was trained on",
        "serve": "Answers of other trainers were scored by",
    }[config.run.phases]
    asked = f" to {counts.training - counts.unanswered:,} questions" if counts else ""
    asked += f", and on {counts.unanswered:,} questions without answers" if counts and counts.unanswered else ""
    took = f" It took {duration(run.seconds)}." if run.seconds else ""
    yield f"{done} {len(run.groups) or 'the'} groups with {source}{asked}.{took}"
    if config.run.phases == "all" and not run.summary.empty:
        judged = verdict(intervals, run.summary, config.rule, held_out=counts.held_out if counts else None)
        yield judged + fall(run.iterations)
        alone = "This is one run: how far other seeds differ is not known. Five seeds are needed to be sure"
        yield served(run.group_scores) + alone + ("." if deployed else ":")


def verdict(intervals: pd.DataFrame, summary: pd.DataFrame, rule: str, *, held_out: int | None = None) -> str:
    """Whether PPO's answers can be read, and PPO's Min AS beside others'; with few held-out questions, that they are.

    The others are the uniform answer, the best look-up, SFT, and PPO by the first of `baseline-rules`.
    """
    known = intervals[intervals["value"].notna()]  # NaN if no group has a score
    of_ppo = known[(known["method"] == PPO) & (known["measure"] == "Min AS") & (known["less"] != "")]
    if of_ppo.empty:
        return "Whether it worked is not known: the policy after PPO has no scores that it can be compared with."
    readable = float(summary.loc[summary["method"] == PPO, "readable"].iloc[0])
    can = f"{readable:.0%} of the policy's answers can be read"
    if readable < READABLE:
        return f"It did not work: {can}, and others score 0."
    against = of_ppo["against"].iloc[0]
    of_ppo = of_ppo[of_ppo["against"] == against].set_index("less")
    best = of_ppo[of_ppo.index.isin(LOOK_UPS)]["value"].nsmallest(1).index  # PPO's smallest gain is over the best
    by_rule = [less for less in of_ppo.index if less.startswith(PPO + BY)][:1]
    others = [less for less in ("uniform", *best, "sft", *by_rule) if less in of_ppo.index]
    compared = {less: _compared(of_ppo.loc[less]) for less in others}
    verdicts = {compared[less][0] for less in ("uniform", *best) if less in compared}
    worked = "It did not work" if WORSE in verdicts else "It is uncertain whether it worked"
    if BETTER in verdicts:
        worked = "It worked" if verdicts == {BETTER} else "It worked in part"
    if held_out is not None and held_out < ENOUGH:
        worked = f"{held_out} held-out questions are too few to say whether it worked ({ENOUGH} are enough)"
    parts = ", ".join(f"{better} {method_name(less)} ({gain})" for less, (better, gain) in compared.items())
    place = f"For the worst-off group (Min AS against {against}, 95 % intervals of paired differences)"
    return f"{worked}. {place} {method_name(PPO, rule)} is: {parts}. {can}."


def served(group_scores: pd.DataFrame) -> str:
    """A sentence, with a space, on the groups that PPO's policy serves worst and best; empty if it serves all alike."""
    by_method = group_scores.groupby("method").head(1).droplevel("against")  # by the first kind of target
    ranked = by_method.reindex([PPO, "sft"]).T.dropna(subset=[PPO]).sort_values(PPO, kind="stable")
    if ranked[PPO].nunique() <= 1:
        return ""
    worst, best = (
        f"{name} ({own:.3f}" + (f"; after SFT {sft:.3f})" if np.isfinite(sft) else ")")
        for name, own, sft in ranked.iloc[[0, -1]].itertuples()
    )
    return f"The policy serves {worst} worst and {best} best. "


def fall(iterations: pd.DataFrame) -> str:
    """A sentence, after a space, on a policy that an update threw back in training; empty if none did."""
    jumped = iterations[iterations["kl_jumped"]] if "kl_jumped" in iterations else iterations
    if jumped.empty:
        return ""
    first, rewards = jumped.iloc[0], iterations["group_reward"]
    low, last = rewards[jumped.index[0] :].min(), rewards.iloc[-1]
    return (
        f" In training an update threw the policy back: in iteration {first['iteration']} its KL to the SFT policy "
        f"jumped to {first['kl']:.1f}; the groups' mean reward was {rewards.iloc[0]:.3f} at first, {low:.3f} at the "
        f"lowest and {last:.3f} at the end."
    )


def _compared(row: pd.Series) -> tuple[str, str]:
    """Verdict of a difference's interval, and the interval as text."""
    value, low, high = row[["value", "low", "high"]].astype(float)
    better = BETTER if low > 0 else WORSE if high < 0 else UNCLEAR
    return better, f"{value:+.3f}, " + (f"{low:+.3f} to {high:+.3f}" if np.isfinite(low) else "no interval")


def command(config: Config) -> str:
    """Command that repeats the run in a simulation, under another name."""
    return shlex.join(["appa", "serve" if config.run.phases == "serve" else "run", *_words(config)])


def five_seeds(config: Config) -> str:
    """Command that repeats the run with five seeds and combines their scores; empty if its groups are deployed."""
    if config.run.group_keys:
        return ""
    # A checkpoint of one seed fits no other.
    words = _words(config, "seed", "pluralllm.checkpoint")
    # A rule of one's own is imported from the folder where the command is given, which is not the clone.
    own, clone = any(":" in name for name in config.rules), "CLONE/"
    repeated = shlex.join(["python", "-m", "experiments.grid", clone * own + SEEDS, *words])
    return f"PYTHONPATH={clone} {repeated}" if own else repeated


def _words(config: Config, *apart: str) -> list[str]:
    """The keys that differ from the default, but for the run's place and those `apart`, as on a command line."""
    default, apart = Config.load({}).flat(), ("run-name", "run.output-dir", "run.resume", *apart)
    set_here = {key: value for key, value in config.flat().items() if value != default[key] and key not in apart}
    return [f"{key}={value if isinstance(value, str) else to_toml(value)}" for key, value in set_here.items()]
