"""`appa run` killed in the middle of PPO, and `appa run --resume`: a real Flower simulation, judged by its numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_run import APPA, TINY_RUN, _belonging_to

pytestmark = pytest.mark.slow

CHANGES = {
    "data.num-questions": 40,
    "pluralllm.rounds": 2,
    "sft.steps": 40,
    "ppo.num-iterations": 6,
    "run.checkpoint-every": 2,
    "eval.ceilings": "false",
    "appa.fairness-threshold": 1.1,
}
KILL_AFTER = 3  # iterations
LIMIT_SECONDS = 240.0
ENDED_SECONDS = 20.0  # asked to end, a process has five before it is killed


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path for what a run keeps beside its folder, by which its processes are found."""
    folder = Path(tempfile.mkdtemp(prefix="e2e"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start(arguments: list[str], *, here: Path, temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*APPA, "run", *arguments],
        cwd=here,
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def whole(arguments: list[str], *, here: Path, temporary: Path) -> str:
    """A run to its end; what it said."""
    with start(arguments, here=here, temporary=temporary) as launcher:
        try:
            said, _ = launcher.communicate(timeout=LIMIT_SECONDS)
        finally:
            launcher.terminate()
    assert launcher.returncode == 0, said
    return said


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text.splitlines()]


def keys(tmp_path: Path, name: str) -> list[str]:
    given = (
        TINY_RUN
        | CHANGES
        | {"run-name": name, "run.output-dir": tmp_path / "runs", "run.cache-dir": tmp_path / "cache"}
    )
    return [part for key, value in given.items() for part in ("-c", f"{key}={value}")]


def test_a_run_killed_in_ppo_ends_with_the_numbers_of_an_unbroken_one(tmp_path, temporary):
    unbroken, broken = tmp_path / "runs" / "unbroken", tmp_path / "runs" / "broken"
    whole(keys(tmp_path, "unbroken"), here=tmp_path, temporary=temporary)

    with start(keys(tmp_path, "broken"), here=tmp_path, temporary=temporary) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if line.startswith(f"[ppo {KILL_AFTER}/"):
                break
        assert len(_belonging_to(temporary)) > 5  # the search does see the run
        launcher.kill()
    deadline = time.monotonic() + ENDED_SECONDS
    while (left := _belonging_to(temporary)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == {}
    assert not list(temporary.glob("appa-*"))
    assert KILL_AFTER <= len(lines(broken)) < CHANGES["ppo.num-iterations"]

    said = whole(["--resume", str(broken)], here=tmp_path, temporary=temporary)
    assert "resumed at iteration" in said
    assert "[pluralllm 2/" not in said
    assert lines(broken) == lines(unbroken)
    for name in ("summary.json", "examples.json", "pluralllm.json"):
        assert json.loads((broken / name).read_text()) == json.loads((unbroken / name).read_text())
    assert (broken / "policy" / "model.safetensors").read_bytes() == (
        unbroken / "policy" / "model.safetensors"
    ).read_bytes()
    assert (broken / "report.html").exists()
