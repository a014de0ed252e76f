"""The version and the machine of a run's server, in a line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import torch

from appa_flwr import __version__

GIBIBYTE = 2**30


def described(folder: Path) -> str:
    """Version, cores and how busy they are, free memory, free disk under `folder`, and GPUs; the first is used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(folder).free
    free = f"{memory / GIBIBYTE:.1f} GiB of memory and {disk / GIBIBYTE:.1f} GiB of disk free"
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    made_by = f"appa-flwr {__version__}, torch {torch.__version__}"
    return f"{made_by}, {cores} cores (load {psutil.getloadavg()[0]:.1f}), {free}, {', '.join(gpus) or 'no GPU'}"
