#!/usr/bin/env bash
# torchmetrics 1.9.0: of three equal scores, retrieval_normalized_dcg is the mean over the orders, and the average
# precision and the reciprocal rank go by the order of the rows (1/3 or 1). Expected: none depends on the order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torchmetrics==1.9.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PY'
import torch
import torchmetrics
from torchmetrics.functional import retrieval

scores = torch.full((3,), 0.5)
measured = {
    name: [round(float(getattr(retrieval, name)(scores, torch.tensor(right))), 3) for right in ([1, 0, 0], [0, 0, 1])]
    for name in ("retrieval_normalized_dcg", "retrieval_average_precision", "retrieval_reciprocal_rank")
}
print("torchmetrics", torchmetrics.__version__, "right one first and last:", measured)
assert measured["retrieval_normalized_dcg"] == [0.71, 0.71]
assert measured["retrieval_average_precision"] == [1.0, 0.333], "ties count alike: mended"
assert measured["retrieval_reciprocal_rank"] == [1.0, 0.333], "ties count alike: mended"
PY
