"""The machine and the version of a run, for its first line: without the libraries of the policy, which take seconds."""

import os
import shutil
from pathlib import Path

import psutil
import torch

from appa_flwr import __version__
from appa_flwr.core.code_version import code_version
from appa_flwr.run.schema import MACHINE, PROGRESS

GIBIBYTE = 2**30


def machine(folder: Path) -> str:
    """Text about version, cores and their load, free memory, free disk under `folder`, and GPUs (the first is used).

    If another version of appa-flwr or torch began the run in `folder`, the text says so.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(folder).free
    free = f"{memory / GIBIBYTE:.1f} GiB of memory and {disk / GIBIBYTE:.1f} GiB of disk free"
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    version = f"appa-flwr {__version__} (code {code_version()}), torch {torch.__version__}, "
    first = next((line.message for line in PROGRESS.read(folder) if line.phase == MACHINE), version)
    other = "" if first.startswith(version) else f"; ANOTHER VERSION BEGAN THE RUN: {first}"
    return f"{version}{cores} cores (load {psutil.getloadavg()[0]:.1f}), {free}, {', '.join(gpus) or 'no GPU'}{other}"
