#!/usr/bin/env bash
# dit 2.3, earth_movers_distance of distributions over numbers: the table of distances is transposed, so that where
# the two have different outcomes the result is wrong (1.8). Expected: 2.2, as by hand and by scipy 1.17.1.
# Over equal outcomes the table is symmetric and the result right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet dit==2.3 scipy==1.17.1
cd "$folder"
venv/bin/python - <<'PY'
import dit
import scipy
from dit.divergences import earth_movers_distance

low, high = {0: 0.4, 1: 0.6}, {2: 0.2, 3: 0.8}
theirs = earth_movers_distance(*(dit.Distribution([*shares], [*shares.values()]) for shares in (low, high)))
right = scipy.stats.wasserstein_distance([*low], [*high], [*low.values()], [*high.values()])
# by hand: all mass moves up, from the mean 0.6 to the mean 2.8
print("dit", dit.__version__, round(theirs, 6), "scipy", round(right, 6), "by hand 2.2")
assert abs(right - 2.2) < 1e-9
assert abs(theirs - 1.8) < 1e-6, "the distance is right: mended"
PY
