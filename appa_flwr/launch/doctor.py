"""`appa doctor`: what would keep a run, or a party of a deployment, from working here, before it is tried.

It needs no more than a group's machine has installed.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from packaging.requirements import Requirement

from appa_flwr.core.errors import UserError
from appa_flwr.launch.credentials import certificate
from appa_flwr.launch.sites import (
    OWNER_POLICY_FILE,
    STATE_FILE,
)
from appa_flwr.survey.store import QUESTIONS_FILE

PACKAGE = "appa-flwr"
OF_A_GROUP = ("flwr", "cryptography", "torch", "numpy", "pydantic")
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
_PRIVATE = ("*.key", "*.jsonl", "*.secret", "*.sqlite*", f"{STATE_FILE}*")


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
    """Python, the packages, memory, disk and the GPU; with `group` what a group's machine needs of them."""
    found = importlib.metadata.metadata(PACKAGE)
    python = Requirement(f"python{found['Requires-Python']}")
    yield _look("Python", lambda: _in_range(python, ".".join(map(str, sys.version_info[:3]))))
    for line in importlib.metadata.requires(PACKAGE) or ():
        wanted = Requirement(line)
        if wanted.marker is None and (not group or wanted.name in OF_A_GROUP):
            yield _look(wanted.name, partial(_installed, wanted))
    if not group:
        yield _look("disk", lambda: _room(Path.cwd()))
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


def party(folder: Path) -> Iterator[Finding]:
    """A party's folder as `appa deploy` made it, or the folder of all parties: file modes, certificates, server, clock.

    Raises:
        UserError: it is neither.
    """
    if (folder / "groups").is_dir():
        everyone = (folder / "server", *sorted((folder / "groups").iterdir()), folder / "submitter")
        for one in everyone:  # as many as have not been carried away
            for finding in party(one) if one.is_dir() else ():
                yield replace(finding, what=f"{one.relative_to(folder)}: {finding.what}")
        return
    if not (folder / "ca.crt").exists():
        raise UserError(f"{folder}: is no party's folder; `appa deploy` makes such folders")
    private = [path for pattern in _PRIVATE for path in folder.glob(pattern) if path.name != QUESTIONS_FILE]
    yield _look("folder", lambda: _private(folder, *private))
    for path in sorted(folder.glob("*.crt")):
        yield _look(path.name, partial(_in_time, path))
    script = folder / ("submit.sh" if (folder / "submit.sh").exists() else "start.sh")
    if address := _ADDRESS.search(script.read_text()) if script.exists() else None:
        host, port = address.groups()
        yield (server := _look("server", lambda: _reached(folder, host, int(port))))
        if server.good:
            yield _look("clock", lambda: _in_step(folder, host, int(port)))


def is_group(folder: Path) -> bool:
    """True if it is a group's folder, whose machine needs less."""
    return (folder / OWNER_POLICY_FILE).exists()


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


def _reached(folder: Path, host: str, port: int) -> str:
    if why := _unreached(host, port, folder / "ca.crt"):
        tunnel = f"; elsewhere than at the server: ssh -N -L {port}:{host}:{port} SERVER"
        raise UserError(f"{host}:{port}: {why}{tunnel * (folder / 'submit.sh').exists()}")
    return f"{host}:{port} answers, with a certificate that ca.crt vouches for"


def _in_step(folder: Path, host: str, port: int) -> str:
    """Check of this machine's clock against the server's, which each answer names in whole seconds."""
    trusting = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    caller = http.client.HTTPSConnection(host, port, timeout=SECONDS_TO_CONNECT, context=trusting)
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
