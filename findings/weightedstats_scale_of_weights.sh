#!/usr/bin/env bash
# weightedstats 0.4.1, weighted_median: the median depends on the unit of the weights. Where half of the weight lies on
# either side it is the mean of the two middle values, but by weights of tenths rounding hides this: 2 for 2.5.
# Expected: the same for weights of 1, 2, 2, 1 and of .1, .2, .2, .1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet weightedstats==0.4.1
cd "$folder"
venv/bin/python - <<'PY'
from importlib.metadata import version

from weightedstats import weighted_median

medians = [weighted_median([1, 2, 3, 4], [unit * 1, unit * 2, unit * 2, unit * 1]) for unit in (1, 0.5, 0.25, 0.1)]
print("weightedstats", version("weightedstats"), dict(zip((1, 0.5, 0.25, 0.1), medians)))
assert medians[:3] == [2.5, 2.5, 2.5]
assert medians[3] == 2, "the unit does not count: mended"
PY
