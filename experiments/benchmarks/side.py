"""Runs one side of a benchmark in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pydantic import TypeAdapter

import experiments
from appa_flwr.errors import UserError
from experiments.benchmarks.measure import Measured
from experiments.benchmarks.workload import Workload

_ROOT = Path(experiments.__file__).parents[1]
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONPATH": str(_ROOT),
}
CPU_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_side(python: str, module: str, workload: Workload, *, scratch: Path, environment: dict[str, str]) -> Measured:
    """Measure a workload with `own_side` or `trl_side`, in the Python of that side's environment.

    Raises:
        UserError: the side failed; its output has been printed.
    """
    source, result, output = (scratch / f"{module}.{name}" for name in ("workload.json", "result.json", "log"))
    workload.write(source)
    result.unlink(missing_ok=True)
    with output.open("w") as log:
        status = subprocess.run(
            [python, "-m", f"experiments.benchmarks.{module}", str(source), str(result)],
            env={**os.environ, **_QUIET, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if status:
        print(output.read_text(), file=sys.stderr)
        last = next(reversed(output.read_text().splitlines()), "no output")
        raise UserError(f"{module} ended with status {status}: {last}")
    return TypeAdapter(Measured).validate_json(result.read_bytes())
