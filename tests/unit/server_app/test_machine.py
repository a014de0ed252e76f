"""The line about the machine of a run."""

from __future__ import annotations

import re

from appa_flwr import __version__
from server_app import machine


def test_it_has_what_decides_whether_a_run_fits(tmp_path, monkeypatch):
    free = r"\d+\.\d GiB of memory and \d+\.\d GiB of disk free"
    known = rf"appa-flwr {__version__}, torch \S+, \d+ cores \(load \d+\.\d\), {free}"
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 0)
    assert re.fullmatch(f"{known}, no GPU", machine.described(tmp_path))
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine.torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    assert re.fullmatch(f"{known}, GPU 0, GPU 1", machine.described(tmp_path))
