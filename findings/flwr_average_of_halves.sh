#!/usr/bin/env bash
# flwr 1.41.0: FedAvg of flwr.server averages arrays of float16 by multiplying them with the numbers of examples first,
# so that 100 of a client with 1,000 examples is infinite. Expected: 100, the mean of equal arrays, as by FedAvg of
# flwr.serverapp, which multiplies with shares.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet flwr==1.41.0
cd "$folder"
venv/bin/python - <<'PY'
import warnings

warnings.simplefilter("ignore")
import flwr
import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords


def means(kind):
    arrays = np.array([100.0], kind)
    (old,) = aggregate([([arrays], 1000), ([arrays], 3000)])
    replies = [RecordDict({"a": ArrayRecord([arrays]), "m": MetricRecord({"n": n})}) for n in (1000, 3000)]
    (new,) = aggregate_arrayrecords(replies, "n").to_numpy_ndarrays()
    return old.item(), new.item()


found = {kind: means(kind) for kind in ("float16", "float32")}
print("flwr", flwr.__version__, "flwr.server, flwr.serverapp:", found)
assert found["float32"] == (100, 100) and found["float16"][1] == 100
assert found["float16"][0] == np.inf, "halves are averaged: mended"
PY
