"""PluralLLM's agreement with the groups' own survey answers, as frames for the page and the terminal."""

from collections.abc import Iterator, Mapping

import pandas as pd

from appa_flwr.run.cards import Card
from appa_flwr.run.records import Means

MEASURES = {"js": "JS", "js_distance": "JS dist. (natural)", "wasserstein": "Was."}
PREDICTORS = {
    "pluralllm": "PluralLLM",
    "nearest-question": "Own nearest question",
    "uniform": "Uniform answer",
}
"""In the order of tables."""
CAPTION = (
    "Agreement with the groups' own survey answers, mean over answers, 0 to 1, higher is better. Groups computed it "
    "themselves and sent sums."
)


def scores(card: Card) -> pd.DataFrame:
    """Scores with one row per predictor."""
    rows = [
        {"Predictor": name}
        | {shown: means[measure] for measure, shown in MEASURES.items()}
        | {"Answers": f"{means['answers']:.0f}"}
        for name, means in _ordered(card.scores)
    ]
    return pd.DataFrame(rows)


def by_group(card: Card) -> pd.DataFrame:
    """JS on held-out questions, one row per group and one column per predictor; worst first."""
    rows = [
        {"Group": group} | {name: means["js"] for name, means in _ordered(predictors)}
        for group, predictors in card.groups.items()
        if predictors
    ]
    return pd.DataFrame(rows).sort_values(PREDICTORS["pluralllm"], kind="stable") if rows else pd.DataFrame()


def _ordered(predictors: Mapping[str, Means]) -> Iterator[tuple[str, Means]]:
    """Names and scores in the order of tables."""
    for name in dict.fromkeys((*PREDICTORS, *predictors)):
        if name in predictors:
            yield PREDICTORS.get(name, name), predictors[name]
