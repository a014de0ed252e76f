"""What a run shows of its config: what it wrote and sent, and which functions its keys' values reach."""

import gc
import hashlib
import json
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from audit import asked_for
from nodes import SimulatedGrid, cross, simulated
from runs import Killed, looped, read_every_answer
from small import SMALLEST

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages
from appa_flwr.run.schema import write_config
from server_app.federation.grid import OverlapGrid
from server_app.policy import tiny
from server_app.run_writer import RunWriter

REPEATS = ("config.json", "run.log", "README.md", "checkpoint.pt", ".lock", "error.txt")
"""Files that repeat the keys, or hold times."""
UNTIMED = ("seconds", "traffic", "seconds_left")
TIMES = re.compile(r"[0-9.]+ (s|min)\b|/tmp/\S+")
Trace = Mapping[str, str]


def content(path: Path) -> str:
    """A file without times and without the keys that it repeats."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path).to_csv()
    if path.suffix == ".jsonl":
        lines = (json.loads(line) for line in path.read_text().splitlines())
        return TIMES.sub("", str([{k: v for k, v in line.items() if k not in UNTIMED} for line in lines]))
    if path.name == "pluralllm.json":
        return str({key: value for key, value in json.loads(path.read_text()).items() if key != "training"})
    return hashlib.sha256(path.read_bytes()).hexdigest()


def trace(config: Config, grid: SimulatedGrid, error: str) -> dict[str, str]:
    """Every file of a run, the messages of each kind to and from the groups, and its error, each as a text."""
    shown, folder = defaultdict(str, error=error), config.run_folder
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(REPEATS)):
        shown["files"] += f"{path.relative_to(folder)} "
        shown[str(path.relative_to(folder))] = content(path)
    progress = folder / "progress.jsonl"
    for step in map(json.loads, progress.read_text().splitlines() if progress.exists() else ()):
        shown[f"log of {step['phase']}"] += TIMES.sub("", f"{step['step']}/{step['of']} {step['message']}; ")
    for asked, replied in zip(grid.requests, grid.replies, strict=True):
        kind = asked_for(asked)
        shown[f"to groups: {kind}"] += messages.digest(asked.message.content)
        shown[f"from groups: {kind}"] += messages.digest(replied.message.content)
    return shown


class Stages:
    """Runs of one survey, of which a later stage goes on from the folder of the smallest run.

    `places` are the files of {NAME} in values of keys.
    """

    def __init__(self, folder: Path, places: Mapping[str, object]) -> None:
        self.folder, self.places = folder, places
        self._traces, self._count = dict[str, Trace](), 0

    def keys(self, given: Mapping[str, object]) -> dict[str, object]:
        return {k: v.format(**self.places) if isinstance(v, str) else v for k, v in given.items()}

    def run(self, given: Mapping[str, object], *, since: str = "", until: str = "") -> Trace:
        """The trace of a run with these keys, since a phase of the run without them, until before another phase."""
        if since:
            self.once({}, since="", until=since)
        self._count += 1
        root = self.folder / str(self._count)
        config = Config.load({**SMALLEST, "run.output-dir": str(root), "run-name": "r", **self.keys(given)})
        if since:
            shutil.copytree(self.folder / since, config.run_folder)
            write_config(config.run_folder, config)
            config = Config.load({**config.flat(), "run.resume": True})
        begin, send, error, waits = RunWriter.phase, OverlapGrid.send_and_receive, "", defaultdict[str, str](str)

        def phase(own: RunWriter, name: str, **rest: int) -> object:
            if name == until:
                raise Killed
            return begin(own, name, **rest)

        def sent(grid, messages, *, timeout=None):
            outgoing = list(messages)
            waits.update({f"patience: {asked_for(cross(message))}": str(timeout) for message in outgoing})
            return send(grid, outgoing, timeout=timeout)

        with pytest.MonkeyPatch.context() as patched:
            read_every_answer(patched)
            patched.setattr(gc, "collect", lambda *_: 0)  # half of the seconds
            patched.setattr(RunWriter, "phase", phase)
            patched.setattr(OverlapGrid, "send_and_receive", sent)
            for steps in ("STEPS", "COUNTED_STEPS"):
                patched.setattr(tiny, steps, 2)
            grid = SimulatedGrid({})
            try:
                grid = SimulatedGrid(simulated(config, 2))
                looped(config, grid)
            except Killed:
                pass
            except UserError as raised:
                error = TIMES.sub("", str(raised))
        folders = str(sorted(path.parent.relative_to(root) for path in root.rglob("config.json")))
        return defaultdict(str, {**trace(config, grid, error), **waits, "folders": folders})

    def once(self, given: Mapping[str, object], *, since: str, until: str) -> Trace:
        """The same, run once a session; the folder of the smallest run is kept."""
        name = json.dumps([dict(given), since, until])
        if name not in self._traces:
            self._traces[name] = self.run(given, since=since, until=until)
            if not (given or since):
                shutil.copytree(self.folder / str(self._count) / "r", self.folder / until)
        return self._traces[name]


FOLLOWED = ("appa_flwr.", "pluralllm.", "server_app.", "client_app.", "experiments.", "trl.trainer.sft_config")
"""Modules of the functions that are looked at."""


@contextmanager
def arrivals(values: Mapping[object, str]) -> Iterator[set[str]]:
    """Within the block, collect "NAME: CALLER > FUNCTION PARAMETER" wherever one function passes the value of NAME on.

    What `child_seed` makes of a value is followed too, as "NAME for PURPOSE". The config's own code is left out.
    """
    reached, names = set[str](), dict(values)

    def place(frame) -> str:
        # A comprehension is a frame of its own before Python 3.12.
        name = re.sub(r"\.<locals>\.<(list|dict|set)comp>", "", frame.f_code.co_qualname)
        return f"{frame.f_globals.get('__name__', '').rpartition('.')[2]}.{name}"

    def called(frame, event: str, result: object) -> None:
        code, module, given = frame.f_code, frame.f_globals.get("__name__", ""), frame.f_locals
        if event not in ("call", "return") or not module.startswith(FOLLOWED) or module.startswith("appa_flwr.config"):
            return
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if event == "call" else ()
        for parameter in parameters:
            value = given.get(parameter)
            if type(value) in (int, float, str) and value in names:
                purpose = f" {given['names'][0]}" if code.co_name == "child_seed" else ""
                reached.add(f"{names[value]}: {place(frame.f_back)} > {place(frame)} {parameter}{purpose}")
        if code.co_name == "child_seed" and event == "return" and given["seed"] in names:
            names[result] = f"{names[given['seed']]} for {given['names'][0]}"

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield reached
    finally:
        sys.setprofile(before)
