"""The folders of a deployment: one for the server and one per group, with all files that the party's machine needs.

Runs are submitted on the server's machine; the server accepts them from no other machine (`superlink_filter`).
"""

import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from appa_flwr.config.keys import Scalar, to_toml, to_toml_table
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.core.ports import LOOPBACK
from appa_flwr.owner.owner_policy import OWNER_POLICY_VARIABLE, owner_policy_file
from appa_flwr.survey.store import QUESTIONS_FILE, slugs, write_split
from appa_flwr.survey.types import Survey

CONNECTION, PORT = "deployed", 9100
HOME = "APPA_FLOWER_HOME"  # environment variable: the Flower home of a party that runs on this machine for a trial
KEYS_FILE, GROUP_KEYS_FILE, OWNER_POLICY_FILE, STATE_FILE = "keys.toml", "group-keys.toml", "policy.toml", "state.db"
SECRET_FILE = "runtime.secret"  # shared by a group's SuperNode and the process that takes its tasks
PRIVATE = ("*.key", "*.jsonl", "*.secret", "*.sqlite*", f"{STATE_FILE}*")
PUBLIC = ".pub"  # suffix of a public key's file, after the name of the private key's file
# Flower starts these programs by name, so a folder before Flower's on the PATH can replace them. A node needs only the
# first program, and each of the others could run a bundle too.
GUARD = "guard"
CLIENT_APP = "flwr-clientapp"
OTHER_APPS = ("serverapp", "simulation", "agentapp", "model", "connector")
PROGRAMS = (CLIENT_APP, *(f"flwr-{name}" for name in OTHER_APPS))
REFUSING_SCRIPT = "#!/bin/sh\necho 'this node runs the ClientApp alone' >&2\nexit 1\n"
_POLLS = "export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1"  # seconds; Flower's default of 1 delays each message
_NO_COLON = 'case "$PWD" in *:*) echo "$PWD: the guard cannot stand on the PATH with a : in it" >&2; exit 1;; esac'
GUARD_SCRIPT = '#!/bin/sh\nexec python -P -m appa_flwr.owner.guard "$@"\n'
NODES, _AUTHORITY, _GROUPS = "nodes", "authority", "groups"
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")


@dataclass(frozen=True)
class Sites:
    """Paths of each party's folder in `root`; `groups` maps a group's name to that of its folder.

    Groups reach the server by `host`, a name or an IP address, and `port`.
    """

    root: Path
    host: str
    port: int
    groups: Mapping[str, str]

    @property
    def server(self) -> Path:
        """The server's folder."""
        return self.root / "server"

    def group(self, name: str) -> Path:
        """A group's folder."""
        return self.root / _GROUPS / self.groups[name]

    def data(self, name: str) -> Path:
        """A group's private answers."""
        return self.group(name) / f"{self.groups[name]}.jsonl"


def prepare(
    survey: Survey,
    root: Path,
    *,
    host: str,
    port: int,
    keys: Mapping[str, Scalar],
    bundle: str,
    groups: Sequence[str] = (),
) -> Sites:
    """Write the parties' folders, which only the user can read.

    Existing node keys, authorities, owners' policies and data files are kept. If the survey has questions alone,
    `groups` names the groups. The ports of their nodes, each on its own machine, follow the server's. `keys` are the
    run's, of which `survey` and `groups` are replaced; new owners' policies pin the app whose hash is `bundle`, if any.

    Raises:
        UserError: the host is invalid, the root has a colon, or a folder cannot be written or holds other answers.
    """
    sites = Sites(root, host, port, slugs(survey.groups or groups))
    with tempfile.TemporaryDirectory() as scratch:
        split = write_split(survey, Path(scratch))
        questions = split.questions.read_bytes()
        answers = {name: path.read_bytes() for name, path in split.groups.items()}
    if ":" in str(root):
        raise UserError(
            f"{root}: choose a folder without a colon, which would end a folder's name on the PATH of a node"
        )
    if not _HOST_NAME.fullmatch(host):
        raise UserError(f'host = "{host}" is neither a host name nor an IPv4 address')
    for name, mine in answers.items():
        if (path := sites.data(name)).exists() and path.read_bytes() != mine:
            raise UserError(f"{path}: holds other answers than the survey; move it away, or name another folder")
    authority = root / _AUTHORITY
    make_certificates(authority, list(dict.fromkeys((host, LOOPBACK))))
    for folder in (authority, sites.server, sites.server / NODES, *map(sites.group, sites.groups)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    for folder in (sites.server, *map(sites.group, sites.groups)):
        shutil.copyfile(authority / "ca.crt", folder / "ca.crt")
    replace_file(sites.server / "server.key", (authority / "server.key").read_bytes(), mode=0o600)
    shutil.copyfile(authority / "server.crt", sites.server / "server.crt")
    replace_file(sites.server / QUESTIONS_FILE, questions)
    listen = LOOPBACK if host == LOOPBACK else "0.0.0.0"
    server = ["python", "-P", "-m", "appa_flwr.launch.superlink_filter", "--enable-supernode-auth", "--host", listen]
    server += ["--port", str(port), "--database", STATE_FILE, "--ssl-ca-certfile", "ca.crt"]
    server += ["--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
    _script(sites.server, f'{shlex.join(server)} "$@"')
    for number, name in enumerate(sites.groups, start=1):
        replace_file(sites.group(name) / QUESTIONS_FILE, questions)
        _group_folder(sites, name, answers.get(name), port=port + number, bundle=bundle)
    public = {to_toml(name): (sites.group(name) / f"node.key{PUBLIC}").read_text().strip() for name in sites.groups}
    replace_file(sites.server / GROUP_KEYS_FILE, to_toml_table(public).encode())
    _submission(sites, keys)
    return sites


def _group_folder(sites: Sites, name: str, answers: bytes | None, *, port: int, bundle: str) -> None:
    """Write a group's folder, with its answers if they are known, and copy its public key to the server's folder."""
    folder = sites.group(name)
    if answers is not None:
        replace_file(sites.data(name), answers, mode=0o600)
    if not (folder / OWNER_POLICY_FILE).exists():
        replace_file(folder / OWNER_POLICY_FILE, owner_policy_file(bundle=bundle).encode())
    if not (folder / f"node.key{PUBLIC}").exists():
        make_node_key(folder / "node.key")
    if not (folder / SECRET_FILE).exists():
        replace_file(folder / SECRET_FILE, secrets.token_bytes(32), mode=0o600)
    shutil.copyfile(folder / f"node.key{PUBLIC}", sites.server / NODES / f"{sites.groups[name]}.pub")
    for program in PROGRAMS:
        script = GUARD_SCRIPT if program == CLIENT_APP else REFUSING_SCRIPT
        replace_file(folder / GUARD / program, script.encode(), parents=True, mode=0o755)
    guarded = f'export PATH="$PWD/{GUARD}:$PATH" {OWNER_POLICY_VARIABLE}="$PWD/{OWNER_POLICY_FILE}"'
    node_config = f"group={_in_quotes(name)} data={to_toml(sites.data(name).name)} policy={to_toml(OWNER_POLICY_FILE)}"
    # Flower's SuperNode gives its tasks, and thus the right to answer, to any process that asks on the node's port,
    # unless tasks are taken by a separate process that knows a secret.
    secret = ["--superexec-auth-secret-file", SECRET_FILE]
    tasks = ["flower-superexec", "--insecure", *secret, "--runtime-api-address", f"{LOOPBACK}:"]
    node = ["flower-supernode", "--superlink", f"{sites.host}:{sites.port}", "--root-certificates", "ca.crt"]
    node += ["--auth-supernode-private-key", "node.key", "--isolation", "process", *secret]
    node += ["--host", LOOPBACK, "--port"]
    own_port = f"port=${{1:-{port}}}  # another than {port}, where that is in use"
    lines = (
        f'{shlex.join(tasks)}"$port" --parent-pid $$ &',
        f'{shlex.join(node)} "$port" --node-config {shlex.quote(node_config)}',
    )
    _script(folder, _NO_COLON, own_port, _POLLS, guarded, *lines)


def _in_quotes(text: str) -> str:
    """Write a TOML string for a node-config, in which Flower ends a string at the next quote, escaped or not."""
    inner = to_toml(text)[1:-1].replace('\\"', "\\u0022")
    return f'"{inner}"'


def _submission(sites: Sites, keys: Mapping[str, Scalar]) -> None:
    """Write a run's keys, and the scripts that register the groups' keys and submit the run."""
    folder = sites.server
    run = {**keys, "survey": QUESTIONS_FILE, "groups": "; ".join(sites.groups)}
    run["run.group-keys"] = GROUP_KEYS_FILE
    replace_file(folder / KEYS_FILE, to_toml_table(run).encode())
    # Flower needs the certificate's absolute path, which is known only once the folder is in its final place.
    pattern = f'[superlink.{CONNECTION}]\\naddress = "{LOOPBACK}:{sites.port}"\\nroot-certificates = "%s/ca.crt"\\n'
    first = ['mkdir -p "$FLWR_HOME" || exit 1', f'printf {shlex.quote(pattern)} "$PWD" > "$FLWR_HOME/config.toml"']
    register = [f"flwr supernode register {NODES}/{slug}.pub {CONNECTION}" for slug in sites.groups.values()]
    _script(folder, *first, *register, name="register.sh")
    submit = f'flwr run "$app" {CONNECTION} --stream --run-config {KEYS_FILE}'
    _script(folder, *first, submit, name="submit.sh", before='app=$(cd "$1" && pwd) || exit 1')


def _script(folder: Path, *lines: str, name: str = "start.sh", before: str = "") -> None:
    head = [
        "#!/bin/sh",
        "umask 077",
        *filter(None, [before]),
        'cd "$(dirname "$0")" || exit 1',
        f'export FLWR_HOME="${{{HOME}:-$PWD/.flwr}}"',
        f'export NO_PROXY="${{NO_PROXY:-$no_proxy}},{LOOPBACK}"; export no_proxy="$NO_PROXY"',
    ]
    # The last command replaces the shell, so that ending the script ends Flower.
    text = "\n".join([*head, *lines[:-1], f"exec {lines[-1]}"]) + "\n"
    replace_file(folder / name, text.encode(), mode=0o755)


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write a new authority (`ca.crt`, `ca.key`), and the server's certificate and key (`server.crt`, `server.key`).

    An existing authority is used again, so that groups with its certificate trust the server's new certificate.
    `hosts` are names and IP addresses by which the server will be reached; clients reject other names.

    Raises:
        UserError: a file cannot be written, or the existing authority cannot be used.
    """
    from trustme import CA  # a group's machine lacks this package

    certificate, key = folder / "ca.crt", folder / "ca.key"
    if certificate.exists():
        try:
            authority = CA.from_pem(certificate.read_bytes(), key.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{key}, {certificate}: cannot be used ({error}); name another folder") from None
    else:
        authority = CA(organization_name="appa-flwr")
        replace_file(key, authority.private_key_pem.bytes(), parents=True, mode=0o600)
        replace_file(certificate, authority.cert_pem.bytes())
    server = authority.issue_cert(*hosts, organization_name="appa-flwr")
    replace_file(folder / "server.key", server.private_key_pem.bytes(), mode=0o600)
    replace_file(folder / "server.crt", server.cert_chain_pems[0].bytes())


def make_node_key(path: Path) -> None:
    """Write a SuperNode's private key, and then beside it (`.pub`) the public key to be registered."""
    key, no_password = ec.generate_private_key(ec.SECP384R1()), serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, no_password)
    replace_file(path, private, parents=True, mode=0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    replace_file(path.with_name(path.name + PUBLIC), public + b"\n")
