#!/usr/bin/env bash
# rdata 1.1.0, write_rds of a pandas column of ordered categories: R's file holds an unordered factor, and a missing
# cell as code 0, which rdata reads back as the last category and pyreadr 0.5.8 as missing. Expected: class ordered, NA.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet rdata==1.1.0 pyreadr==0.5.8 pandas==3.1.1
cd "$folder"
venv/bin/python - <<'PY'
import pandas as pd
import pyreadr
import rdata

trust = pd.Categorical(["low", "high", None, "mid"], categories=["low", "mid", "high"], ordered=True)
rdata.write_rds("f.rds", pd.DataFrame({"trust": trust}))
stored = rdata.parser.parse_file("f.rds").object.value[0]
back, other = rdata.read_rds("f.rds").trust, pyreadr.read_r("f.rds")[None].trust
print("rdata", rdata.__version__, "codes", stored.value.tolist(), "read", back.tolist(), "pyreadr", other.tolist())
pyreadr.write_rds("g.rds", pd.DataFrame({"trust": trust}))
assert rdata.read_rds("g.rds").trust.isna().tolist() == [False, False, True, False]
assert not back.cat.ordered, "ordered: mended"
assert stored.value.tolist() == [1, 3, 0, 2] and back.tolist() == ["low", "high", "high", "mid"], "missing: mended"
PY
