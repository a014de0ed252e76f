"""A whole deployment on this machine: server, a node a group and a submitter, each its own process and folder.

TLS, node keys and the owners' policies are those of real sites (`sites`); only the network is a loopback.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from appa_flwr.config import Config
from appa_flwr.launch.checks import claim_run_folder, participants, read_survey
from appa_flwr.launch.flower import LOOPBACK, Flower, followed, free_port, sent_files
from appa_flwr.launch.processes import flower_home
from appa_flwr.launch.sites import CONNECTION, GROUP_KEYS_FILE, STATE_FILE, Sites, prepare
from appa_flwr.run.files import SUPERLINK_LOG
from appa_flwr.survey.export import QUESTIONS_FILE

_ENVIRONMENT = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}  # seconds; one by default
SERVER, SUBMITTER = "(server)", "(submitter)"
_OWN_KEYS = ("survey", "groups", "run.output-dir", "run.cache-dir", "federation.group-keys")


def submitted(config: Config) -> dict[str, bool | int | float | str]:
    """The keys of a run that its submitter sends; where things lie is the server's own affair."""
    return {key: value for key, value in config.flat().items() if key not in _OWN_KEYS}


def make_sites(config: Config, root: Path, *, host: str, port: int) -> Sites:
    """Write the parties' folders of a run with this config; see `sites.prepare`."""
    survey = read_survey(config, participants(config))
    return prepare(survey, root.resolve(), host=host, port=port, keys=submitted(config))


def deploy_local(config: Config, root: Path, *, app_folder: Path, verbose: bool = False) -> Path:
    """Write the parties' folders, start them all, run, and end all that was started; the run's folder.

    Args:
        config: with absolute paths; its survey is split over the groups' folders.
        root: folder of the parties' folders; what an earlier deployment left there is used again.
        app_folder: see `checks.find_app_folder`.
        verbose: copy Flower's log to standard output too.

    Raises:
        UserError: before anything is started: see `checks.participants`, `sites.prepare`, `checks.claim_run_folder`.
        RunFailed: a party did not start, or Flower did not report the run as completed.
        Stopped: SIGINT, SIGTERM or SIGHUP came; all that was started has been ended.
    """
    config = config.named(datetime.now())
    sites = make_sites(config, root, host=LOOPBACK, port=free_port())
    own = {"survey": sites.server / QUESTIONS_FILE, "run.output-dir": sites.server / "runs"}
    own["federation.group-keys"] = sites.server / GROUP_KEYS_FILE
    placed = {**config.flat(), "groups": "; ".join(sites.groups), **{key: str(path) for key, path in own.items()}}
    config = Config.load(placed)
    folder = claim_run_folder(config)
    with flower_home() as home:
        started = start(sites, home)
        print(f"parties' folders: {root}\nrun folder: {folder}", flush=True)
        command = ["flwr", "run", str(sent_files(app_folder, home)), CONNECTION]
        followed(config, started.parties[SUBMITTER], command, superlink=started.superlink, verbose=verbose)
    return folder


@dataclass(frozen=True)
class Started:
    """What runs here: each party's Flower by its name, the server's SuperLink, and each group's node."""

    parties: Mapping[str, Flower]
    superlink: subprocess.Popen[bytes]
    nodes: dict[str, subprocess.Popen[bytes]]

    def start_node(self, sites: Sites, name: str) -> None:
        """Start a group's node, for the first time or again."""
        command = sites.group_command(name, port=free_port())
        self.nodes[name] = self.parties[name].start(command, log=sites.group(name) / "supernode.log")


def start(sites: Sites, home: Path) -> Started:
    """Start the server, register the groups' keys, and start their nodes; their Flower homes are below `home`.

    Raises:
        RunFailed: the server did not start, or took no key.
    """
    folders = {SERVER: sites.server, SUBMITTER: sites.submitter, **{name: sites.group(name) for name in sites.groups}}
    parties = {
        name: Flower(home / str(number), sites.port, folder=folder, connection=CONNECTION, more=_ENVIRONMENT)
        for number, (name, folder) in enumerate(folders.items())
    }
    for party in parties.values():
        party.home.mkdir(parents=True)
    (parties[SUBMITTER].home / "config.toml").write_text(sites.connection(str(sites.submitter / "ca.crt")))
    command = sites.server_command(listen=LOOPBACK)
    command[command.index(STATE_FILE)] = str(home / STATE_FILE)  # of this start alone
    log, authority = sites.server / SUPERLINK_LOG, sites.server / "ca.crt"
    superlink = parties[SERVER].start_superlink(command, log=log, authority=authority)
    for slug in sites.groups.values():
        parties[SUBMITTER].call(["flwr", "supernode", "register", f"nodes/{slug}.pub", CONNECTION])
    started = Started(parties, superlink, {})
    for name in sites.groups:
        started.start_node(sites, name)
    return started
