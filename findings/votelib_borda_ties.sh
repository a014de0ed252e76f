#!/usr/bin/env bash
# votelib 0.4.0, Borda of ballots with shared ranks: each of two options that share places 2 and 3 gets the points of
# place 2, so such a ballot gives out 7 points and others 6, and who is first at whalrus 0.4.6 and pref_voting 1.18.2 is
# last here. Expected: the mean of the shared places, as there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet votelib==0.4.0 whalrus==0.4.6 pref_voting==1.18.2
cd "$folder"
venv/bin/python - <<'PY'
import logging
from importlib.metadata import version

import whalrus
from pref_voting.profiles_with_ties import ProfileWithTies
from pref_voting.scoring_methods import symmetric_borda_scores
from votelib.component.rankscore import Borda
from votelib.convert import RankedToPositionalVotes

logging.disable(logging.CRITICAL)
ballots = {("A", frozenset("BC")): 5, ("B", "C", "A"): 2, ("C", "B", "A"): 2}
points = RankedToPositionalVotes(Borda()).convert(ballots)
weights = [*ballots.values()]
theirs = whalrus.RuleBorda(["A > B ~ C", "B > C > A", "C > B > A"], weights=weights).gross_scores_
ranks = [{"A": 1, "B": 2, "C": 2}, {"B": 1, "C": 2, "A": 3}, {"C": 1, "B": 2, "A": 3}]
others = symmetric_borda_scores(ProfileWithTies(ranks, weights, candidates=["A", "B", "C"]))
print("votelib", version("votelib"), points, "whalrus", {name: float(score) for name, score in theirs.items()}, others)
assert max(theirs, key=theirs.get) == max(others, key=others.get) == "A"
assert points == {"A": 19, "B": 20, "C": 20}, "A leads: mended"
PY
