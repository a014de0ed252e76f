#!/usr/bin/env bash
# microdf-python 1.5.12: a group's mean is weighted by groupby(...).mean() and .agg("mean"), and not by
# .agg({"n": "mean"}) or .agg(k=("n", "mean")); value_counts(normalize=True) ignores the weights too.
# Expected: one mean, and weighted shares.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet microdf-python==1.5.12 pandas==3.0.6
cd "$folder"
venv/bin/python - <<'PY'
import warnings
from importlib.metadata import version

import microdf

warnings.simplefilter("ignore")
people = microdf.MicroDataFrame({"party": ["R", "R", "B"], "n": [3, 1, 2]}, weights=[1.0, 3.0, 6.0])
parties = people.groupby("party")
means = {
    "mean()": float(parties.n.mean()["R"]),
    'agg("mean")': float(parties.agg("mean")["n"]["R"]),
    'agg({"n": "mean"})': float(parties.agg({"n": "mean"})["n"]["R"]),
    'agg(k=("n", "mean"))': float(parties.agg(k=("n", "mean"))["k"]["R"]),
}
share = people.party.value_counts(normalize=True)["R"]
print("microdf", version("microdf-python"), means, "share of R", round(share, 3), "weighted", 4 / 10)
assert means["mean()"] == means['agg("mean")'] == (3 * 1 + 1 * 3) / 4
assert means['agg({"n": "mean"})'] == means['agg(k=("n", "mean"))'] == 2, "one mean: mended"
assert abs(share - 2 / 3) < 1e-9, "weighted shares: mended"
PY
