#!/usr/bin/env bash
# dictances 1.5.3, total_variation: the sum of the absolute differences, 1.6 for shares of .9, .1 and .1, .9.
# Expected: half of it, 0.8, as a total variation distance is a difference of probabilities and at most 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet dictances==1.5.3 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
from importlib.metadata import version

import dictances

pairs = [({"a": 0.9, "b": 0.1}, {"a": 0.1, "b": 0.9}), ({"a": 1.0}, {"b": 1.0})]
# the definition: the largest difference of the probabilities of any event
right = [max(abs(p.get("a", 0) - q.get("a", 0)), abs(p.get("b", 0) - q.get("b", 0))) for p, q in pairs]
theirs = [round(dictances.total_variation(p, q), 6) for p, q in pairs]
print("dictances", version("dictances"), theirs, "by definition", right, "manhattan", dictances.manhattan(*pairs[0]))
assert right == [0.8, 1.0]
assert theirs == [1.6, 2.0], "at most 1: mended"
PY
