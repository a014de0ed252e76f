#!/usr/bin/env bash
# diffprivlib 0.6.6, tools.median: on answers with ties, as codes of a scale are, the result is spread over the whole
# scale however sure the median is: 900 of 1,000 people say 3, and at epsilon 1 most draws lie from 1.1 to 3.7. It is
# drawn from the gaps between values, and equal ones leave none. Expected: near 3, as after breaking the ties.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet diffprivlib==0.6.6 scikit-learn==1.5.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import diffprivlib
import numpy as np

answers = np.repeat([1.0, 3.0, 4.0, 5.0], [50, 900, 20, 30])
apart = answers + np.random.default_rng(0).uniform(-0.01, 0.01, answers.size)


def medians(values):
    draws = [diffprivlib.tools.median(values, 1.0, bounds=(0.9, 5.1), random_state=seed) for seed in range(200)]
    return np.quantile(draws, [0.05, 0.95]).round(2)


ties, no_ties = medians(answers), medians(apart)
print("diffprivlib", diffprivlib.__version__, "true 3; 90 % of the draws:", ties.tolist(), "ties broken:", no_ties)
assert no_ties.min() > 2.98 and no_ties.max() < 3.02
assert ties.min() < 1.5 and ties.max() > 3.5, "the draws are near the median: mended"
PY
