#!/usr/bin/env bash
# torchmetrics 1.9.0, BootStrapper(sampling_strategy="multinomial"): it draws within each call of update, so that of 100
# values given one by one the bootstrap error of the mean is 0, and given at once 0.1. Expected: 0.1 both times, as with
# the strategy "poisson".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torchmetrics==1.9.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PY'
import torch
import torchmetrics
from torchmetrics.wrappers import BootStrapper

torch.manual_seed(0)
values = torch.randn(100)


def error(strategy, batch):
    boot = BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=400, sampling_strategy=strategy)
    for part in values.split(batch):
        boot.update(part)
    return round(float(boot.compute()["std"]), 3)


errors = {(strategy, batch): error(strategy, batch) for strategy in ("poisson", "multinomial") for batch in (100, 1)}
print("torchmetrics", torchmetrics.__version__, errors)
assert all(0.08 < found < 0.12 for which, found in errors.items() if which != ("multinomial", 1))
assert errors["multinomial", 1] == 0, "one by one as at once: mended"
PY
