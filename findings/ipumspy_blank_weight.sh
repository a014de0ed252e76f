#!/usr/bin/env bash
# ipumspy 0.9.0, read_microdata of a fixed-width extract: a blank cell of a column with implied decimals, as weights
# have, is read as 0.0, and one of a column without them as missing. Expected: missing in both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet ipumspy==0.9.0 pandas==3.1.1 pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import warnings
from importlib.metadata import version

from ipumspy import readers

warnings.simplefilter("ignore")
VARIABLE = """<var ID="{0}" name="{0}" dcml="{1}" intrvl="{2}"><location StartPos="{3}" EndPos="{4}" width="{5}"/>
<labl>l</labl><txt>t</txt><concept>c</concept><varFormat type="numeric"/></var>"""
with open("extract.xml", "w") as file:
    file.write(f"""<codeBook xmlns="ddi:codebook:2_5">
<stdyDscr><citation><serStmt><serName abbr="x"/><serInfo>x</serInfo></serStmt></citation>
<dataAccs><useStmt><citReq>x</citReq><conditions>x</conditions></useStmt></dataAccs></stdyDscr>
<fileDscr><fileTxt><fileName>extract.dat</fileName><fileCont>c</fileCont>
<fileStrc type="rectangular"><recGrp recidvar="R" keyvar="K" rectype="P"/></fileStrc>
<fileType charset="UTF-8"/><format>fixed</format><filePlac>p</filePlac></fileTxt></fileDscr>
<dataDscr>{VARIABLE.format("PARTY", 0, "discrete", 1, 1, 1)}{VARIABLE.format("WEIGHT", 2, "contin", 2, 5, 4)}</dataDscr>
</codeBook>""")
with open("extract.dat", "w") as file:
    file.write("10150\n2    \n 0100\n")
cells = readers.read_microdata(readers.read_ipums_ddi("extract.xml"), "extract.dat")
print("ipumspy", version("ipumspy"), cells.to_dict("list"))
assert cells["PARTY"].isna().tolist() == [False, False, True]
assert cells["WEIGHT"].tolist() == [1.5, 0.0, 1.0], "a blank weight is missing: mended"
PY
