#!/usr/bin/env bash
# readstat-arrow 2026.10.20.0, SPSS: the metadata does not say which column weights the file, and write_sav with what
# read_sav gave loses this and the multiple-response sets, which were read. Expected: a copy that is weighted
# alike and has its sets. Written and read back by pyspssio 0.6.0, which uses SPSS's own library.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet readstat-arrow==2026.10.20.0 pyspssio==0.6.0 pandas==3.1.1 \
  pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import pandas as pd
import pyspssio
import readstat_arrow

media = {"label": "Media", "is_dichotomy": True, "is_numeric": True, "use_category_labels": False, "counted_value": 1}
answers = pd.DataFrame({"paper": [1.0, 0.0, 1.0], "radio": [0.0, 1.0, 1.0], "w": [1.0, 2.0, 3.0]})
sets = {"$media": {**media, "variable_list": ["paper", "radio"]}}
pyspssio.write_sav("f.sav", answers, metadata={"mrsets": sets, "case_weight_var": "w"})
table, metadata = readstat_arrow.read_sav("f.sav")
readstat_arrow.write_sav("copy.sav", table, metadata=metadata)
first, copy = (pyspssio.read_sav(name)[1] for name in ("f.sav", "copy.sav"))
print("readstat-arrow", readstat_arrow.__version__, [bool(found["mrsets"]) for found in (first, copy)], "weighted by",
      [found.get("case_weight_var") for found in (first, copy)])
assert first["mrsets"] and first["case_weight_var"] == "w" and metadata.multiple_response_sets
assert not copy["mrsets"], "sets are kept: mended"
assert not copy.get("case_weight_var") and "weight" not in repr(metadata), "the weight is kept: mended"
PY
