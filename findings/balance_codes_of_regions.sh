#!/usr/bin/env bash
# balance 0.23.0, adjust(method="poststratify") by one column of region codes: codes of whole numbers are cut into
# quantiles first, and of more than some twenty regions also codes of text are lumped, so that regions keep a weighted
# share twice their target. Expected: the target of each region, which is what post-stratification is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet balance==0.23.0 pandas==3.0.6
cd "$folder"
venv/bin/python - <<'PY'
import logging
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from importlib.metadata import version

import numpy as np
import pandas as pd
from balance import Sample


def farthest(regions, kind):
    """Largest ratio of a region's weighted share to its share of the target."""
    codes = np.arange(1, regions + 1)
    target = pd.Series(np.where(codes % 2, 10, 30), index=codes)
    frames = [pd.DataFrame({"region": np.repeat(codes, n).astype(kind)}) for n in (20, target)]
    sample, wanted = (Sample.from_frame(f.assign(id=f.index.astype(str)), id_column="id") for f in frames)
    people = sample.set_target(wanted).adjust(method="poststratify").df
    weight = people["weight"].astype(float).groupby(people["region"].astype(int)).sum()
    return round(float((weight / weight.sum() / (target / target.sum())).max()), 2)


found = {(kind.__name__, regions): farthest(regions, kind) for kind in (int, str) for regions in (8, 30)}
print("balance", version("balance"), found)
assert found["str", 8] == 1
assert found["int", 8] == found["int", 30] == found["str", 30] == 2, "targets are met: mended"
PY
