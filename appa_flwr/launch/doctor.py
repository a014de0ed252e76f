"""`appa doctor`: what would keep a run, or a party of a deployment, from working here, before it is tried.

It needs no more than a group's machine has installed.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache, partial
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from packaging.requirements import Requirement

from appa_flwr.config.sources import read_toml
from appa_flwr.core.errors import UserError
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.checks import find_app_folder
from appa_flwr.launch.credentials import PUBLIC, certificate
from appa_flwr.launch.ports import LOOPBACK, port_is_free
from appa_flwr.launch.sites import (
    CLIENT_APP,
    GROUP_KEYS_FILE,
    GUARD,
    GUARD_SCRIPT,
    KEYS_FILE,
    OWNER_POLICY_FILE,
    PROGRAMS,
    STATE_FILE,
)
from appa_flwr.owner.owner_policy import read_owner_policy
from appa_flwr.survey import store
from appa_flwr.survey.store import QUESTIONS_FILE

PACKAGE = "appa-flwr"
OF_A_GROUP = ("flwr", "cryptography", "torch", "numpy", "pydantic")
COMMANDS = ("python", "flwr", "flower-superlink", "flower-supernode")
LEAST_DISK = 5.0  # GiB; a run with one of the paper's models keeps its SFT model and two adapters
ASK_TORCH = """
import json, torch

def packs(gpu):
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
        kept = quantize_4bit(torch.ones(64, 64, dtype=torch.float16, device=gpu), quant_type="nf4")
        return "" if dequantize_4bit(*kept).eq(1).all() else "wrong numbers"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]

def known(gpu):
    has, free = torch.cuda.get_device_properties(gpu), torch.cuda.mem_get_info(gpu)[0]
    return has.name, free, has.total_memory, has.major, has.minor, packs(gpu)

print(json.dumps([torch.__version__, *map(known, range(torch.cuda.device_count()))]))
"""
FIRST_WITH_BFLOAT16 = 8  # major version of the capability
SECONDS_TO_CONNECT = 5.0
AHEAD, BEHIND = 5, 305
"""Seconds by which a node's clock may differ from the server's, as Flower 1.41 bounds the time that a node signs."""
_ADDRESS = re.compile(r"(?:--superlink |address = \")([^\s\"]+):(\d+)")
_PORT = re.compile(r"--port (\d+)")
_DATA = re.compile(r' data="([^"]+)"')


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what is there, or what is wrong and what would be right."""

    what: str
    text: str
    good: bool


def _look(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, look(), good=True)
    except (UserError, OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        return Finding(what, str(error), good=False)


def machine(*, group: bool = False) -> Iterator[Finding]:
    """Python, the packages, Flower's commands and the GPU; with `group` what a group's machine needs of them."""
    found = importlib.metadata.metadata(PACKAGE)
    python = Requirement(f"python{found['Requires-Python']}")
    yield _look("Python", lambda: _in_range(python, ".".join(map(str, sys.version_info[:3]))))
    for line in importlib.metadata.requires(PACKAGE) or ():
        wanted = Requirement(line)
        if wanted.marker is None and (not group or wanted.name in OF_A_GROUP):
            yield _look(wanted.name, partial(_installed, wanted))
    for name in COMMANDS:
        yield _look(name, partial(_on_path, name))
    if not group:
        yield _look("GPU", _gpus)


def _gpus() -> str:
    """Torch's GPUs, of which the first is used; asked in another process, for a driver can take a process with it."""
    asked = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"status {asked.returncode}"]
        raise UserError(f"torch cannot be asked for it: {said[-1]}")
    version, *gpus = json.loads(asked.stdout.splitlines()[-1])
    if not gpus and shutil.which("nvidia-smi"):
        raise UserError(f"torch {version} sees none, and nvidia-smi is here; install torch for your CUDA version")
    if not gpus:
        return f"none; torch {version} computes on the CPU"
    named = []
    for name, free, memory, major, minor, fault in gpus:
        native = "native" if major >= FIRST_WITH_BFLOAT16 else 'emulated, so that "auto" is float32'
        packs = f'nf4 fails, so that policy.tuning = "qlora" will ({fault})' if fault else "nf4 works"
        held = f"{free / 2**30:.0f} of {memory / 2**30:.0f} GiB free"
        named.append(f"{name}, {held}, capability {major}.{minor}, bfloat16 {native}, {packs}")
    return "; ".join(named) + (" (the first is used; CUDA_VISIBLE_DEVICES chooses)" if len(named) > 1 else "")


def _installed(wanted: Requirement) -> str:
    try:
        return _in_range(wanted, importlib.metadata.version(wanted.name))
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f'is not installed; pip install "{wanted}"') from None


def _in_range(wanted: Requirement, version: str) -> str:
    if not wanted.specifier.contains(version, prereleases=True):
        raise UserError(f"is {version}; {wanted} is needed")
    return version


def _on_path(name: str) -> str:
    here, found = Path(sysconfig.get_path("scripts")), shutil.which(name)
    if found is None:
        raise UserError(f"is not on the PATH, where Flower looks for its parts; put {here} there")
    if Path(found).parent.resolve() != here.resolve():
        raise UserError(f"{found} is of another environment; put {here} first on the PATH")
    return found


def party(folder: Path) -> Iterator[Finding]:
    """A party's folder as `appa deploy` made it, or the folder of all parties.

    Raises:
        UserError: it is neither.
    """
    if _has(folder, "server.crt", "server.key", GROUP_KEYS_FILE):
        yield from _server(folder)
    elif is_group(folder):
        yield from _group(folder)
    elif _is_submitter(folder):
        yield from _submitter(folder)
    elif (folder / "groups").is_dir():
        everyone = (folder / "server", *sorted((folder / "groups").iterdir()), folder / "submitter")
        for one in everyone:  # as many as have not been carried away
            for finding in party(one) if one.is_dir() else ():
                yield replace(finding, what=f"{one.relative_to(folder)}: {finding.what}")
    else:
        raise UserError(f"{folder}: is no party's folder; `appa deploy` makes such folders")


def is_group(folder: Path) -> bool:
    """True if it is a group's folder, whose machine needs less."""
    return _has(folder, "node.key", f"node.key{PUBLIC}", OWNER_POLICY_FILE)


def _is_submitter(folder: Path) -> bool:
    """True if it is a submitter's folder, whose way to the server may be a tunnel."""
    return _has(folder, KEYS_FILE, "submit.sh")


def _has(folder: Path, *names: str) -> bool:
    """True if one of these files is there: others may be missing, which is to be found."""
    return any((folder / name).exists() for name in names)


def _server(folder: Path) -> Iterator[Finding]:
    yield _look("folder", lambda: _private(folder, *folder.glob(f"{STATE_FILE}*")))
    yield _look("server.crt", lambda: _in_time(folder / "server.crt"))
    yield _look("server.key", lambda: _own_key(folder / "server.key", folder / "server.crt"))
    questions = folder / QUESTIONS_FILE
    yield _look(questions.name, lambda: f"{len(store.read(questions).questions)} questions")
    yield _look(GROUP_KEYS_FILE, lambda: _keys(folder / GROUP_KEYS_FILE))
    yield _look("disk", lambda: _room(folder))
    yield _look("port", lambda: _own_port(folder))


def _group(folder: Path) -> Iterator[Finding]:
    yield _look("folder", lambda: _private(folder, *folder.glob("*.sqlite*")))
    yield _look("node.key", lambda: _own_key(folder / "node.key", folder / f"node.key{PUBLIC}"))
    yield _look("data", lambda: _answers(folder / _named(_DATA, folder / "start.sh")[0]))
    yield (owner_policy := _look(OWNER_POLICY_FILE, lambda: str(read_owner_policy(folder / OWNER_POLICY_FILE))))
    if owner_policy.good:
        yield _look("bundle", lambda: _pinned(folder / OWNER_POLICY_FILE))
    yield _look(GUARD, lambda: _guarded(folder))
    yield from _way_to_server(folder, "start.sh")


def _submitter(folder: Path) -> Iterator[Finding]:
    yield _look(KEYS_FILE, lambda: f"{len(read_toml(folder / KEYS_FILE))} keys")
    for path in sorted((folder / "nodes").glob("*.pub")):
        yield _look(f"nodes/{path.name}", partial(_public_key, path))
    yield from _way_to_server(folder, "submit.sh")


def _public_key(path: Path) -> str:
    return _hex(load_ssh_public_key(path.read_bytes()))[-16:]


def _answers(path: Path) -> str:
    survey = store.read(path)
    _private(path)
    return ", ".join(f"{name}: {len(answers)} answers" for name, answers in survey.answers.items())


def _pinned(path: Path) -> str:
    pinned = read_owner_policy(path).bundle.split()
    if not pinned:
        return "none is pinned: whatever code a run brings runs here; `appa group bundle` says what to pin"
    try:
        checkout = find_app_folder(Path.cwd())
    except UserError:
        return "pinned; there is no checkout here to compare it with"
    if (own := _bundle_of(checkout)) not in pinned:
        raise UserError(
            f"runs from {checkout} are refused: its bundle, {own}, is not pinned; read it before you pin it"
        )
    return f"that of {checkout} is pinned"


_bundle_of = cache(bundle_hash)


def _guarded(folder: Path) -> str:
    missing = [name for name in PROGRAMS if not os.access(folder / GUARD / name, os.X_OK)]
    others = missing or (folder / GUARD / CLIENT_APP).read_text() != GUARD_SCRIPT  # another version's
    if others or f"$PWD/{GUARD}:" not in (folder / "start.sh").read_text():
        raise UserError(
            "does not stand before Flower's programs, and `bundle` counts for nothing; make the folder again"
        )
    return "stands before Flower's programs"


def _keys(path: Path) -> str:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for text in table.values():
        load_ssh_public_key(str(text).encode())
    if not table:
        raise UserError("names no group; make the folders again")
    return ", ".join(table)


def _named(pattern: re.Pattern[str], script: Path, lacking: str = "start.sh does not say") -> tuple[str, ...]:
    found = pattern.search(script.read_text())
    if found is None:
        raise UserError(f"{lacking}; make the folders again")
    return found.groups()


def _hex(key: PublicKeyTypes) -> str:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo).hex()


def _own_key(path: Path, public: Path) -> str:
    """Check of a private key: it is the one of that public key or certificate, and nobody else can read it."""
    if ssh := public.suffix == PUBLIC:
        if not path.exists():
            raise UserError("is missing: copy it here again; if it is lost, have the operator make a new one")
        own = _hex(load_ssh_private_key(path.read_bytes(), None).public_key())
        expected = _hex(load_ssh_public_key(public.read_bytes()))
    else:
        expected = _hex(x509.load_pem_x509_certificate(public.read_bytes()).public_key())
        own = _hex(load_pem_private_key(path.read_bytes(), None).public_key())
    if own != expected:
        raise UserError(f"is not the {'private key' if ssh else 'key'} of {public.name}; make the folders again")
    return f"matches, and {_private(path)}"


def _private(*paths: Path) -> str:
    for path in paths:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            right = "700" if path.is_dir() else "600"
            raise UserError(f"others can read {path.name} (mode {mode:o}); chmod {right} {path}")
    return "nobody else can read it"


def _in_time(path: Path) -> str:
    own = certificate(path)
    begin, end, now = own.not_valid_before_utc, own.not_valid_after_utc, datetime.now(UTC)
    if now < begin:
        raise UserError(f"is valid from {begin:%Y-%m-%d %H:%M} UTC on; is this machine's clock right?")
    if now > end - timedelta(days=1):
        raise UserError(f"is valid until {end:%Y-%m-%d %H:%M} UTC only; make the folders again")
    return f"valid until {end:%Y-%m-%d}"


def _room(folder: Path) -> str:
    free = shutil.disk_usage(folder).free / 2**30
    if free < LEAST_DISK:
        raise UserError(f"{free:.1f} GiB free; a run with a large model needs {LEAST_DISK:.0f}")
    return f"{free:.1f} GiB free"


def _own_port(folder: Path) -> str:
    port = int(_named(_PORT, folder / "start.sh")[0])
    if port_is_free(port):
        return f"{port}, free"
    if (why := _unreached(LOOPBACK, port, folder / "ca.crt")) is not None:
        raise UserError(f"another program uses {port} ({why}); end it, or make the folders again")
    return f"{port}, where this server is running"


def _way_to_server(folder: Path, script: str) -> Iterator[Finding]:
    yield _look("ca.crt", lambda: _in_time(folder / "ca.crt"))
    address = partial(_named, _ADDRESS, folder / script, "the script names none")
    yield (server := _look("server", lambda: _reached(folder, *address())))
    if server.good:
        yield _look("clock", lambda: _in_step(folder, *address()))


def _reached(folder: Path, host: str, port: str) -> str:
    if why := _unreached(host, int(port), folder / "ca.crt"):
        tunnel = f"; elsewhere than at the server: ssh -N -L {port}:{host}:{port} SERVER"
        raise UserError(f"{host}:{port}: {why}{tunnel * _is_submitter(folder)}")
    return f"{host}:{port} answers, with a certificate that ca.crt vouches for"


def _in_step(folder: Path, host: str, port: str) -> str:
    """Check of this machine's clock against the server's, which each answer names in whole seconds."""
    trusting = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    caller = http.client.HTTPSConnection(host, int(port), timeout=SECONDS_TO_CONNECT, context=trusting)
    with closing(caller) as connection:
        connection.request("GET", "/health")
        date = connection.getresponse().getheader("Date")
    if date is None:
        return "the server does not tell its own"
    ahead = round((datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds())
    differs = f"{abs(ahead)} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if not -BEHIND < ahead < AHEAD:
        raise UserError(f"this machine's clock is {differs}; Flower refuses such nodes (401): set it by NTP")
    return differs


def _unreached(host: str, port: int, authority: Path) -> str | None:
    """The reason why a TLS connection cannot be made; None where it was."""
    trusting = ssl.create_default_context(cafile=str(authority))
    try:
        with (
            socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT) as plain,
            trusting.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return f"ca.crt does not vouch for what answers: {error.verify_message}"
    except TimeoutError:
        return "no answer; does a firewall close that port to this machine?"
    except ssl.SSLError as error:
        return f"what answers speaks no TLS ({error.reason})"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error}); has start.sh been run at the server?"
