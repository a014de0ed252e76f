"""Checks before anything starts: no app, a survey or groups that do not fit, a run folder in use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import appa_flwr
from appa_flwr.config import GENERATED_SURVEY, TINY_MODEL, Config, check_groups
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import check_cache, lock, writing
from appa_flwr.launch.endings import USER_ERROR, RunFailed
from appa_flwr.run.resume import failed_at_once
from appa_flwr.run.run_files import ERROR_FILE, LOG_FILE, SUPERLINK_LOG, SURVEY_FILE, write_config
from appa_flwr.survey import sources
from appa_flwr.survey.types import Survey

APP_NAME = "appa-flwr"
GIBIBYTE = 2**30
TINY_IS_SMALL = "the tiny policy is for trying a survey out, and some of its answers cannot be read; see preset=smollm2"
LEAST_DISK = 1.0  # GiB
LEAST_GIBIBYTES = {True: 2, False: 6}  # of memory, of a run with the tiny model or SmolLM2 and eight groups


def project_file(app_folder: Path, name: str) -> Path:
    """A file of the project in a checkout, or where the wheel has put it (setup.py)."""
    installed = app_folder / "appa_flwr" / "project" / name
    return installed if installed.exists() else app_folder / name


def find_app_folder(start: Path) -> Path:
    """The folder with the Flower app: the checkout that `start` lies in, or the one where the package is installed.

    Raises:
        UserError: neither is there.
    """
    for folder in (start, *start.parents, Path(appa_flwr.__file__).parent.parent):
        with suppress(OSError, ValueError):
            table = tomllib.loads(project_file(folder, "pyproject.toml").read_text(encoding="utf-8"))
            if table.get("project", {}).get("name") == APP_NAME and "app" in table.get("tool", {}).get("flwr", {}):
                return folder
    raise UserError(f"no checkout of {APP_NAME} in {start} or above: run inside a clone, or pip install one")


def read_survey(config: Config) -> Survey:
    """The survey of a run that begins, or of one that goes on, whose groups fit the keys.

    Raises:
        UserError: it cannot be read, a group has no usable answer, the source has changed since the run began, or the
            keys about groups do not fit those there are.
    """
    survey = sources.kept_survey(config, config.run_folder / SURVEY_FILE) if config.run.resume else None
    survey = survey or sources.read_run(config)
    check_groups(config, survey.groups)
    return survey


def machine_warnings(config: Config) -> Iterator[str]:
    """What of this machine will keep a run waiting or end it: little free memory or disk, and what else it is doing."""
    import psutil  # a group's machine, whose commands come through here too, lacks it

    memory, needed = psutil.virtual_memory().available / GIBIBYTE, LEAST_GIBIBYTES[config.model == TINY_MODEL]
    if memory < needed:
        yield f"{memory:.1f} GiB of memory are free, and a run of model {config.model} takes some {needed} or more"
    output = Path(config.run.output_dir).absolute()
    disk = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.is_dir())).free / GIBIBYTE
    if disk < LEAST_DISK:
        yield f"{disk:.1f} GiB of disk are free in {config.run.output_dir}; a full one ends a run"
    cores, load = os.cpu_count() or 1, psutil.getloadavg()[0]
    if load > cores:
        yield f"this machine is busy (load {load:.1f} on {cores} cores): a run takes longer, and Ray may start too late"


def check_server(config: Config, app_folder: Path) -> None:
    """Warn of what this machine lacks, and have the server look at its model and tracker, as far as there is any.

    Raises:
        UserError: they cannot be used, or the cache cannot be written.
        RunFailed: the server's code cannot be started.
    """
    check_cache()
    for warning in machine_warnings(config):
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    if config.model == TINY_MODEL and config.survey != GENERATED_SURVEY and config.run.phases in ("all", "sft"):
        print(f"WARNING: {TINY_IS_SMALL}", file=sys.stderr, flush=True)
    if config.model == TINY_MODEL and config.run.tracker == "none":
        return
    command = [sys.executable, "-m", "server_app.preflight"]
    # What it does meanwhile, such as a download, goes to stderr and is seen; what is wrong comes on stdout.
    done = subprocess.run(
        command, cwd=app_folder, input=json.dumps(config.flat()), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == USER_ERROR:
        raise UserError(done.stdout.strip())
    if done.returncode:
        raise RunFailed(f"the server's code in {app_folder} cannot be started; what it said stands above")


def claim_run_folder(config: Config) -> Path:
    """Make the run's folder, or take the one of the run that is resumed; from here on the run can be resumed.

    A run that failed before it did anything leaves its name to the next.

    Raises:
        UserError: it holds a run and `run.resume` is not set, another run is writing there, or nothing can be written.
    """
    folder = config.run_folder
    if config.run.resume:
        lock(folder / LOG_FILE).release()
        with writing(folder):
            for name in (ERROR_FILE, SUPERLINK_LOG):
                (folder / name).unlink(missing_ok=True)
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if failed_at_once(folder):
            lock(folder / LOG_FILE).release()  # nobody has taken it up again
            for path in folder.iterdir():
                path.unlink()
        used = any(folder.iterdir())
    except OSError as error:
        raise UserError(f'run.output-dir = "{config.run.output_dir}": cannot write there ({error})') from None
    if used:
        raise UserError(
            f'run-name = "{config.run_name}": {folder} holds a run already; choose another run-name, or go on with it: '
            f"appa run --resume {folder}"
        )
    write_config(folder, config)
    return folder
