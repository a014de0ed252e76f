#!/usr/bin/env bash
# polars 2.1.0 with fastexcel 0.21.0, read_excel: where the first rows of a column are numbers, later texts become null
# without a warning, and in a sheet of one column their rows are gone (1,250 of 1,300). Expected: text, as by
# engine="openpyxl", or an error, as by polars's own read_csv of the same cells.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet polars==2.1.0 fastexcel==0.21.0 openpyxl==3.1.5
cd "$folder"
venv/bin/python - <<'PY'
import openpyxl
import polars as pl

ages = [18 + row % 72 for row in range(1250)] + ["90 or older"] * 50
book = openpyxl.Workbook()
for row in ["age", *ages]:
    book.active.append([row])
book.save("one.xlsx")
book.active.insert_cols(1)
for row in range(len(ages) + 1):
    book.active.cell(row + 1, 1, "id" if row == 0 else row)
book.save("two.xlsx")
one, two = pl.read_excel("one.xlsx"), pl.read_excel("two.xlsx")
text = pl.read_excel("two.xlsx", engine="openpyxl")["age"]
print("polars", pl.__version__, "one column:", one.height, "rows; two:", two.height, two["age"].null_count(), "null")
pl.Series("age", [str(age) for age in ages]).to_frame().write_csv("one.csv")
try:
    pl.read_csv("one.csv")
except pl.exceptions.ComputeError:
    print("read_csv raises")
assert (text == "90 or older").sum() == 50
assert (one.height, two.height, two["age"].null_count()) == (1250, 1300, 50), "late texts are there: mended"
PY
