#!/usr/bin/env bash
# pysdmx 1.21.0, read_sdmx of SDMX-CSV: codes of dimensions pass through numbers. "01" comes as "1", and with "1E2" in
# the column as "1.0", "1E2" and "100" both as "100.0". Expected: the codes as they stand, since a code list is text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "pysdmx[data]==1.21.0" pandas==3.1.1
cd "$folder"
venv/bin/python - <<'PY'
from importlib.metadata import version

from pysdmx.io import read_sdmx


def regions(*codes):
    with open("f.csv", "w") as file:
        file.write("STRUCTURE,STRUCTURE_ID,ACTION,REGION,TIME_PERIOD,OBS_VALUE\n")
        file.writelines(f"dataflow,EX:DF(1.0),I,{code},2024,{place}.5\n" for place, code in enumerate(codes))
    return read_sdmx("f.csv", validate=False).data[0].data["REGION"].tolist()


print("pysdmx", version("pysdmx"), regions("01", "02"), regions("01", "1E2", "100"), regions("01", "A2"))
assert regions("01", "A2") == ["01", "A2"]
assert regions("01", "02") == ["1", "2"], "leading zeros stay: mended"
assert regions("01", "1E2", "100") == ["1.0", "100.0", "100.0"], "codes stay apart: mended"
PY
