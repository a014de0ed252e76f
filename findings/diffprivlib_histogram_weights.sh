#!/usr/bin/env bash
# diffprivlib 0.6.6, tools.histogram(weights=...): the noise is the same whatever the weights, though one person of
# weight 100 moves a count by 100, and weighted counts lose their fractions. Expected: noise for the largest weight, or
# an error, and counts such as 45.67.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet diffprivlib==0.6.6 scikit-learn==1.5.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import diffprivlib
import numpy as np

answers = np.repeat([1, 2, 3], [100, 300, 200])


def noise(weight, epsilon, draws=300):
    plain = np.array([100, 300, 200]) * weight
    options = {"bins": 3, "range": (0.5, 3.5), "weights": np.full(600, weight)}
    counts = [diffprivlib.tools.histogram(answers, epsilon, random_state=s, **options)[0] for s in range(draws)]
    return np.array(counts) - plain


spread = {weight: round(float(noise(weight, epsilon=1.0).std()), 2) for weight in (1.0, 100.0)}
fractions = noise(0.4567, epsilon=1000.0, draws=3)
print("diffprivlib", diffprivlib.__version__, "standard deviation by weight", spread, "lost", fractions[0].round(2))
assert spread[1.0] == spread[100.0] < 2, "noise follows the weights: mended"
assert np.allclose(fractions, -np.array([0.67, 0.01, 0.34])), "fractions are kept: mended"
PY
