#!/usr/bin/env bash
# pyreadstat 1.3.7, read_dta(user_missing=True): in a whole-number column of Stata that holds a lettered missing value
# such as .a, the plain missing value "." comes as a number that stands in no cell (0 here; in other files and processes
# 16384, 65534, or a code of the question). Without user_missing, or in a column without letters, "." comes as NaN.
# So one reading gives the letters, another the cells (appa_flwr/survey/labelled.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet pyreadstat==1.3.7 pandas==3.1.1
cd "$folder"
venv/bin/python - <<'PY'
import pandas as pd
import pyreadstat

answers = pd.DataFrame({"lettered": [1, 2, "a", None, 1, None], "plain": [1, 2, 2, None, 1, None]}, dtype=object)
pyreadstat.write_dta(answers, "f.dta", missing_user_values={"lettered": ["a"]})
print("pyreadstat", pyreadstat.__version__)
read = {keep: pyreadstat.read_dta("f.dta", user_missing=keep)[0] for keep in (False, True)}
for keep, cells in read.items():
    print(f"user_missing={keep}:", {name: cells[name].tolist() for name in cells})
assert read[False]["lettered"].isna().tolist() == [False, False, True, True, False, True]
assert read[True]["plain"].isna().tolist() == [False, False, False, True, False, True]
assert read[True]["lettered"].isna().sum() == 0, "the missing values are missing: mended"
PY
