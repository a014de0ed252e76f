"""Deployments: making the parties' folders for a run, and starting all parties on this machine.

Each party is started by the scripts in its folder (`sites`), as on separate machines, but over the loopback interface.
"""

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.ports import LOOPBACK, free_port
from appa_flwr.launch.bundle import bundle_hash, sent_files
from appa_flwr.launch.checks import read_survey
from appa_flwr.launch.flower import Flower, followed
from appa_flwr.launch.processes import flower_home
from appa_flwr.launch.sites import CONNECTION, GROUP_KEYS_FILE, OWNER_POLICY_FILE, STATE_FILE, Sites, prepare
from appa_flwr.launch.terminal import show
from appa_flwr.owner.owner_policy import read_owner_policy
from appa_flwr.run.resume import claim
from appa_flwr.survey.store import QUESTIONS_FILE

START, SERVER = "./start.sh", "(server)"


def make_sites(config: Config, root: Path, *, host: str, port: int) -> Sites:
    """Write the parties' folders for a run with this config (see `sites.prepare`), and print what to do with them.

    Raises:
        UserError: see `checks.read_survey` and `sites.prepare`; or an existing owner's policy cannot be read, or pins
            another app than this one.
    """
    survey, keys = read_survey(config), config.flat()
    groups = config.group_names
    if not (survey.groups or groups):
        raise UserError(f"{config.survey}: has questions alone; name the groups that have answered them: groups=A;B")
    del keys["run.output-dir"]  # chosen at the server
    # The server's file of questions does not say that these are generated, which chooses the prompts.
    keys["policy.prompt-style"] = config.prompt_style
    bundle = bundle_hash()
    sites = prepare(survey, root.resolve(), host=host, port=port, keys=keys, bundle=bundle, groups=groups)
    for owner_policy in (sites.group(name) / OWNER_POLICY_FILE for name in sites.groups):
        if (pinned := read_owner_policy(owner_policy).bundle.split()) and bundle not in pinned:
            raise UserError(f"{owner_policy}: pins another app than this one, whose bundle is {bundle}; pin that one")
    show(
        survey.about.sentence(),
        f"{sites.root}: a folder for each party; who gets which, and starts what: docs/deployment.md, Set up",
        f"owners' policies pin this app, bundle {bundle}; nobody else may get authority/ca.key",
    )
    return sites


def deploy_local(config: Config, root: Path) -> Path:
    """Write the parties' folders, start all parties, run, end all processes, and return the run's folder.

    Paths in the config are absolute. Files of an earlier deployment in the folder are used again.

    Raises:
        UserError: before anything is started, see `make_sites` and `claim`.
        RunFailed: a party did not start, or Flower did not report the run as completed.
        Stopped: a signal came; all processes have ended.
    """
    config = config.named(datetime.now())
    sites = make_sites(config, root, host=LOOPBACK, port=free_port())
    if missing := [path for path in map(sites.data, sites.groups) if not path.exists()]:
        raise UserError(f"{missing[0]}: is not there; on one machine the answers of every group are needed")
    names = {"survey": QUESTIONS_FILE, "run.output-dir": "runs", "run.group-keys": GROUP_KEYS_FILE}
    placed = {key: str(sites.server / name) for key, name in names.items()}
    placed |= {"policy.prompt-style": config.prompt_style, "groups": "; ".join(sites.groups)}
    config = Config.load({**config.flat(), **placed})
    claimed = claim(config, launcher=True)
    with flower_home() as home:
        started = start(sites, home, nodes=sites.groups)
        print(f"run folder: {config.run_folder}", flush=True)
        command = ["flwr", "run", str(sent_files(home)), CONNECTION]
        followed(config, started.parties[SERVER], command, superlink=started.superlink)
    claimed.release()
    return config.run_folder


@dataclass
class Started:
    """Running programs: each party's Flower by the party's name, the server's SuperLink, and each group's node."""

    parties: Mapping[str, Flower]
    superlink: subprocess.Popen[bytes]
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_node(self, name: str) -> None:
        """Start a group's node, for the first time or again."""
        node = self.parties[name]
        self.nodes[name] = node.start([START, str(free_port())], log=node.folder / "supernode.log")


def start_server(server: Flower, home: Path) -> subprocess.Popen[bytes]:
    """Start the SuperLink, for the first time or again; `home` keeps its state apart from other deployments."""
    return server.start_superlink([START, "--host", LOOPBACK, "--database", str(home / STATE_FILE)])


def start(sites: Sites, home: Path, *, nodes: Iterable[str]) -> Started:
    """Start the server, register all groups' keys, and start these groups' nodes; Flower homes are in `home`.

    Raises:
        RunFailed: the server did not start, or the registration failed.
    """
    folders = {SERVER: sites.server, **{name: sites.group(name) for name in sites.groups}}
    parties = {
        name: Flower(home / str(number), sites.port, folder, CONNECTION)
        for number, (name, folder) in enumerate(folders.items())
    }
    superlink = start_server(parties[SERVER], home)
    parties[SERVER].call(["./register.sh"])
    started = Started(parties, superlink)
    for name in nodes:
        started.start_node(name)
    return started
