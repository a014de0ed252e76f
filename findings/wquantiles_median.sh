#!/usr/bin/env bash
# wquantiles 0.6, median: whole weights are not numbers of people. The median of 1 once and 2 nine times is 1.9 by
# weights and 2 by ten values, of 1, 1, 2, 3 it is 1.67 and 1.5. Expected: the same, as by weightedstats 0.4.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet wquantiles==0.6 weightedstats==0.4.1 numpy==1.26.4
cd "$folder"
venv/bin/python - <<'PY'
from importlib.metadata import version

import numpy as np
import weightedstats
import wquantiles

medians = {}
for values, counts in (([1, 2], [1, 9]), ([1, 2, 3], [2, 1, 1])):
    each = np.repeat(np.array(values, float), counts)
    medians[f"{values} by {counts}"] = (
        round(float(wquantiles.median(np.array(values, float), np.array(counts, float))), 3),
        float(wquantiles.median(each, np.ones(each.size))),
        float(weightedstats.weighted_median(values, counts)),
    )
print("wquantiles", version("wquantiles"), medians)
assert [of_each == right for _, of_each, right in medians.values()] == [True, True]
assert [by_weight for by_weight, _, _ in medians.values()] == [1.9, 1.667], "weights are numbers of people: mended"
PY
