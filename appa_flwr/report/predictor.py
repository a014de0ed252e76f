"""PluralLLM's agreement with the groups' own survey answers, as frames for the page and the terminal."""

import pandas as pd

from appa_flwr.run.records import Card

MEASURES = {"js": "JS", "js_distance": "JS dist. (natural)", "wasserstein": "Was.", "answers": "Answers"}
PREDICTORS = {"pluralllm": "PluralLLM", "nearest-question": "Own nearest question", "uniform": "Uniform answer"}
"""In the order of tables."""
CAPTION = (
    "Agreement with the groups' own survey answers, mean over answers, 0 to 1, higher is better. The groups "
    "computed it, and sent sums alone."
)
STANDS_OUT = 1.5  # distance in units of the round's median group
STEPS_CAPTION = (
    "Distance of a group's step from the mean of the others', in lengths of that mean. A long step or noise stands out "
    f"(over {STANDS_OUT:g} times the median group's distance), flipped answers do not."
)


def scores(card: Card) -> pd.DataFrame:
    """Scores with one row per predictor."""
    wide = pd.DataFrame(card.scores, index=[*MEASURES]).T.filter([*PREDICTORS], axis="index").astype({"answers": int})
    return wide.rename(index=PREDICTORS, columns=MEASURES).rename_axis("Predictor").reset_index()


def by_group(card: Card) -> pd.DataFrame:
    """JS on held-out questions, one row per group and one column per predictor; worst first."""
    js = {group: {name: means["js"] for name, means in own.items()} for group, own in card.groups.items() if own}
    wide = pd.DataFrame(js).T.filter([*PREDICTORS]).rename(columns=PREDICTORS).rename_axis("Group")
    return wide.sort_values(PREDICTORS["pluralllm"], kind="stable").reset_index() if js else pd.DataFrame()


def steps(card: Card) -> pd.DataFrame:
    """How far each group's steps were from the others', and the rounds in which it stood out; farthest first."""
    frame = pd.DataFrame(card.distances, index=range(1, len(card.distances) + 1)).dropna(axis=1, how="all")
    out = frame.gt(STANDS_OUT * frame.median(axis=1), axis=0)
    rounds = {name: ", ".join(map(str, frame.index[column])) for name, column in out.items()}
    wide = pd.DataFrame({"Median": frame.median(), "Largest": frame.max(), "In round": frame.idxmax().astype(str)})
    wide["Stands out in rounds"] = pd.Series(rounds, dtype=object)
    return wide.rename_axis("Group").sort_values("Largest", ascending=False, kind="stable").reset_index()
