#!/usr/bin/env bash
# crowd-kit 1.4.2, BradleyTerry: the fit stops at its second step whatever n_iter and tol are, since the last scores are
# compared with themselves. Where A beats B, and B beats C, nine times of ten, the scores are 21 : 7 : 1. Expected: the
# maximum of the likelihood, 81 : 9 : 1, as by choix 0.4.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet crowd-kit==1.4.2 choix==0.4.1
cd "$folder"
venv/bin/python - <<'PY'
import warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
import choix
import numpy as np
import pandas as pd
from crowdkit.aggregation import BradleyTerry

pairs = [("A", "B", winner) for winner in "AAAAAAAAAB"] + [("B", "C", winner) for winner in "BBBBBBBBBC"]
table = pd.DataFrame([("w", *pair) for pair in pairs], columns=["worker", "left", "right", "label"])
fits = [BradleyTerry(n_iter=steps, tol=1e-12).fit(table) for steps in (2, 10_000)]
scores = [[round(float(fit.scores_[name] / fit.scores_["C"]), 3) for name in "ABC"] for fit in fits]
likely = np.exp(choix.ilsr_pairwise(3, [(0, 1)] * 9 + [(1, 0)] + [(1, 2)] * 9 + [(2, 1)]))
likely = (likely / likely[2]).round(3).tolist()
print("crowd-kit", version("crowd-kit"), "after 2 steps and 10,000:", scores, "choix", likely)
assert likely == [81, 9, 1]
assert scores == [[21, 7, 1], [21, 7, 1]], "the scores are those of the maximum: mended"
PY
