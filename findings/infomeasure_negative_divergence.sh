#!/usr/bin/env bash
# infomeasure 0.6.3, kld(approach="discrete"): where the second sample lacks a value of the first, its term is left out,
# so that the divergence can be negative (-0.69). Expected: infinity, as by scipy 1.17.1, or an error, as by divergence
# 1.1.0; never below 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet infomeasure==0.6.3 scipy==1.17.1 divergence==1.1.0
cd "$folder"
venv/bin/python - <<'PY'
from importlib.metadata import version

import infomeasure
import numpy as np
from divergence import discrete_relative_entropy
from scipy.stats import entropy

both, one = [1, 1, 2, 2], [1, 1, 1, 1]
theirs = float(infomeasure.kld(both, one, approach="discrete"))
right = float(entropy([0.5, 0.5], [1.0, 0.0]))
print("infomeasure", version("infomeasure"), round(theirs, 4), "scipy", right)
try:
    discrete_relative_entropy(np.array(both), np.array(one), 2.0)
except ValueError as error:
    print("divergence raises:", error)
assert right == np.inf
assert abs(theirs + np.log(2)) < 1e-9, "no divergence is negative: mended"
PY
