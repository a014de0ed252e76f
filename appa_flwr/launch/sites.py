"""The folders of a deployment: one a party, to be carried to its machine, with all it needs to start."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appa_flwr.config import to_toml_table
from appa_flwr.config.keys import Scalar, to_toml
from appa_flwr.errors import UserError
from appa_flwr.files import replace_file
from appa_flwr.launch.credentials import make_certificates, make_node_key
from appa_flwr.owner.policy import policy_file
from appa_flwr.survey.export import QUESTIONS_FILE, export_split, slugs
from appa_flwr.survey.types import Survey

CONNECTION = "deployed"
KEYS_FILE, STATE_FILE = "keys.toml", "state.db"
_AUTHORITY = "authority"


@dataclass(frozen=True)
class Sites:
    """Where each party's folder lies.

    Attributes:
        root: the folder of folders.
        host: by which groups and submitter reach the server.
        port: the server's.
        groups: names, with the names of their folders.
    """

    root: Path
    host: str
    port: int
    groups: Mapping[str, str]

    @property
    def server(self) -> Path:
        """The server's folder."""
        return self.root / "server"

    @property
    def submitter(self) -> Path:
        """The folder of whoever submits the run."""
        return self.root / "submitter"

    def group(self, name: str) -> Path:
        """A group's folder."""
        return self.root / "groups" / self.groups[name]

    def connection(self, certificate: str) -> str:
        """The submitter's Flower config; `certificate` is the path of the authority's."""
        values: dict[str, Scalar] = {"address": f"{self.host}:{self.port}", "root-certificates": certificate}
        return f"[superlink.{CONNECTION}]\n{to_toml_table(values)}"

    def server_command(self, *, listen: str) -> list[str]:
        """Starts the server in its folder."""
        command = ["flower-superlink", "--host", listen, "--port", str(self.port), "--database", STATE_FILE]
        command += ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        return [*command, "--enable-supernode-auth"]

    def group_command(self, name: str, *, port: int) -> list[str]:
        """Starts a group's node in its folder; `port` is its own, for its own processes."""
        node_config = f'group={to_toml(name)} data={to_toml(self.groups[name] + ".jsonl")} policy="policy.toml"'
        command = ["flower-supernode", "--superlink", f"{self.host}:{self.port}", "--port", str(port)]
        command += ["--root-certificates", "ca.crt", "--auth-supernode-private-key", "node.key"]
        return [*command, "--node-config", node_config]


def prepare(survey: Survey, root: Path, *, host: str, port: int, keys: Mapping[str, Scalar]) -> Sites:
    """Write the folders; keys and policies that are there stay, and other data than the survey's is left alone.

    Args:
        survey: split into the public questions and each group's answers.
        root: made if it is not there.
        host: name or IP address of the server.
        port: the server's.
        keys: of the run, as it will be submitted; the survey's and the groups' are added.

    Raises:
        UserError: a folder cannot be written, or holds something else than a deployment of these groups.
    """
    sites = Sites(root, host, port, slugs(survey.groups))
    there = {path.name for path in (root / "groups").glob("*")} if root.exists() else set()
    if root.exists() and any(root.iterdir()) and there != set(sites.groups.values()):
        raise UserError(
            f"{root}: holds something else than a deployment of {', '.join(sites.groups)}; name another folder"
        )
    authority = root / _AUTHORITY
    make_certificates(authority, list(dict.fromkeys((host, "127.0.0.1"))))
    split = export_split(survey, root / ".split")
    for folder in (sites.server, sites.submitter, *map(sites.group, sites.groups)):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(authority / "ca.crt", folder / "ca.crt")
    replace_file(sites.server / "server.key", (authority / "server.key").read_bytes(), mode=0o600)
    shutil.copyfile(authority / "server.crt", sites.server / "server.crt")
    split.questions.replace(sites.server / QUESTIONS_FILE)
    _script(sites.server, shlex.join(sites.server_command(listen="0.0.0.0")))
    (sites.submitter / "nodes").mkdir(exist_ok=True)
    for number, (name, private) in enumerate(split.groups.items()):
        folder = sites.group(name)
        there_already = folder / private.name
        if there_already.exists() and there_already.read_bytes() != private.read_bytes():
            raise UserError(
                f"{there_already}: holds other answers than the survey; move it away, or name another folder"
            )
        private.replace(there_already)
        if not (folder / "policy.toml").exists():
            replace_file(folder / "policy.toml", policy_file().encode())
        if not (folder / "node.key.pub").exists():
            make_node_key(folder / "node.key")
        shutil.copyfile(folder / "node.key.pub", sites.submitter / "nodes" / f"{sites.groups[name]}.pub")
        _script(folder, shlex.join(sites.group_command(name, port=port + 1 + number)))
    shutil.rmtree(root / ".split")
    _submitter(sites, keys)
    return sites


def _submitter(sites: Sites, keys: Mapping[str, Scalar]) -> None:
    folder = sites.submitter
    run = {**keys, "survey": QUESTIONS_FILE, "groups": "; ".join(sites.groups)}
    replace_file(folder / KEYS_FILE, to_toml_table(run).encode())
    # Flower wants the certificate's whole path, which nobody knows before the folder is where it will be.
    pattern = shlex.quote(sites.connection("%s/ca.crt").replace("\n", "\\n"))
    first = ["mkdir -p .flwr || exit 1", f'printf {pattern} "$PWD" > .flwr/config.toml']
    register = [f"flwr supernode register nodes/{slug}.pub {CONNECTION}" for slug in sites.groups.values()]
    _script(folder, *first, *register, name="register.sh")
    submit = f'flwr run "$app" {CONNECTION} --stream --run-config {KEYS_FILE}'
    _script(folder, *first, submit, name="submit.sh", before='app=$(cd "$1" && pwd) || exit 1')


def _script(folder: Path, *lines: str, name: str = "start.sh", before: str = "") -> None:
    head = ["#!/bin/sh", *filter(None, [before]), 'cd "$(dirname "$0")" || exit 1', 'export FLWR_HOME="$PWD/.flwr"']
    replace_file(folder / name, ("\n".join([*head, *lines]) + "\n").encode(), mode=0o755)
