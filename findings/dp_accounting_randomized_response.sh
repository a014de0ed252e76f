#!/usr/bin/env bash
# dp-accounting 0.6.0, PLDAccountant: randomized response that is composed ten times, by count or SelfComposedDpEvent,
# costs what one costs (epsilon 1.61); as ten events of a ComposedDpEvent, and by RdpAccountant, it costs 16.1.
# Expected: 16.1 for all, as Gaussian noise costs the same by count and by list.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet dp-accounting==0.6.0
cd "$folder"
venv/bin/python - <<'PY'
import functools
from importlib.metadata import version

import dp_accounting as dp

REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def spent(accountant, event, count=1):
    return accountant.compose(event, count).get_epsilon(1e-6)


for name, once in (("response", dp.RandomizedResponseDpEvent(0.5, 4)), ("Gaussian", dp.GaussianDpEvent(2.0))):
    pld = functools.partial(dp.pld.PLDAccountant, REPLACE_ONE)
    costs = {
        "once": spent(pld(), once),
        "count": spent(pld(), once, 10),
        "self": spent(pld(), dp.SelfComposedDpEvent(once, 10)),
        "list": spent(pld(), dp.ComposedDpEvent([once] * 10)),
        "rdp, count": spent(dp.rdp.RdpAccountant(neighboring_relation=REPLACE_ONE), once, 10),
    }
    print("dp-accounting", version("dp-accounting"), name, {way: round(float(cost), 2) for way, cost in costs.items()})
    if name == "response":
        assert costs["list"] > 16 and costs["rdp, count"] > 16
        assert costs["once"] == costs["count"] == costs["self"], "ten cost more than one: mended"
    else:
        assert costs["count"] == costs["self"] and abs(costs["count"] / costs["list"] - 1) < 1e-3
PY
