#!/usr/bin/env bash
# dp-accounting 0.6.0: of Gaussian noise with one noise multiplier, "replace one" costs 4.89 by PLDAccountant, which
# doubles the sensitivity, and 2.42 by RdpAccountant, which does not; "add or remove one" 2.25 and 2.42. Expected: RDP
# is never below the PLD account of the same event and relation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet dp-accounting==0.6.0
cd "$folder"
venv/bin/python - <<'PY'
from importlib.metadata import version

import dp_accounting as dp

noise, costs = dp.GaussianDpEvent(2.0), {}
for relation in (dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_ONE):
    accountants = dp.pld.PLDAccountant(relation), dp.rdp.RdpAccountant(neighboring_relation=relation)
    costs[relation.name] = [round(float(each.compose(noise).get_epsilon(1e-6)), 2) for each in accountants]
print("dp-accounting", version("dp-accounting"), "epsilon by PLD and RDP", costs)
assert costs["ADD_OR_REMOVE_ONE"] == [2.25, 2.42]
assert costs["REPLACE_ONE"] == [4.89, 2.42], "the accountants agree: mended"
PY
