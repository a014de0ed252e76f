#!/usr/bin/env bash
# samplics 0.6.1, TaylorEstimator: with a missing answer, not removed, a mean is NaN, while proportions come as numbers
# that sum to less than 1 (.6 and .2), as the missing answer counts in the whole and is no level. Expected: NaN or an
# error, as for the mean, or a level for what is missing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet samplics==0.6.1
cd "$folder"
venv/bin/python - <<'PY'
import warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
import numpy as np
from samplics import PopParam, TaylorEstimator

answers, weights = np.array([1, 1, 2, 2, np.nan, 1]), np.array([1.0, 3, 1, 1, 2, 2])


def estimate(what, **options):
    estimator = TaylorEstimator(what)
    estimator.estimate(y=answers, samp_weight=weights, **options)
    return estimator.point_est


shares, removed = (estimate(PopParam.prop, **options) for options in ({}, {"remove_nan": True}))
shares, removed = ({int(k): round(float(share), 3) for k, share in found.items()} for found in (shares, removed))
print("samplics", version("samplics"), "mean", estimate(PopParam.mean), "shares", shares, "removed", removed)
assert np.isnan(estimate(PopParam.mean)) and removed == {1: 0.75, 2: 0.25}
assert shares == {1: 0.6, 2: 0.2}, "what is missing is said: mended"
PY
