"""`appa doctor`: checks of this machine and of a party's folder; it needs only a group's packages."""

import http.client
import importlib.metadata
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from appa_flwr import __version__
from appa_flwr.core.errors import UserError
from appa_flwr.launch.sites import PRIVATE
from appa_flwr.survey import store
from appa_flwr.survey.store import QUESTIONS_FILE

PACKAGE = "appa-flwr"
OF_A_GROUP = ("flwr", "cryptography", "torch", "numpy", "pydantic")
LEAST = 2.0  # GiB of free memory
AHEAD, BEHIND = 5, 305  # seconds: Flower 1.41's bounds of the time that a node signs
ASK_TORCH = """
import shutil, torch
print("torch", torch.__version__)
gpus = torch.cuda.device_count()
assert gpus or not shutil.which("nvidia-smi"), "torch sees no GPU; install torch for your CUDA version"
print(f"{gpus or 'no'} GPU, computes on the {'GPU' if gpus else 'CPU'}")
for gpu in range(gpus):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    packed = quantize_4bit(torch.ones(64, 64, dtype=torch.float16, device=gpu), quant_type="nf4")
    assert dequantize_4bit(*packed).eq(1).all(), "nf4 gives wrong numbers"
    free, size = (bytes / 2**30 for bytes in torch.cuda.mem_get_info(gpu))
    print(f"{torch.cuda.get_device_name(gpu)}: {free:.0f} of {size:.0f} GiB free, nf4 works")
"""
_ADDRESS = re.compile(r"--superlink (\S+):(\d+)")


class Finding(NamedTuple):
    """Result of one check; `text` says what was found, or what is wrong and what would be right."""

    what: str
    text: str
    good: bool


def machine(*, group: bool = False) -> Iterator[Finding]:
    """Check packages, memory and GPUs; with `group` only the packages that a group's machine needs."""
    yield Finding(PACKAGE, __version__, good=True)
    for wanted in map(Requirement, importlib.metadata.requires(PACKAGE) or ()):
        if wanted.marker is None and (not group or wanted.name in OF_A_GROUP):
            yield _package(wanted)
    if not group:
        with suppress(ImportError):  # a missing psutil is reported with the packages above
            import psutil

            free = psutil.virtual_memory().available / 2**30
            yield Finding("memory", f"{free:.1f} GiB free; the tiny model needs {LEAST:g}", free >= LEAST)
        yield _gpus()


def _package(wanted: Requirement) -> Finding:
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(wanted.name, f'not installed; pip install "{wanted}"', good=False)
    good = wanted.specifier.contains(version, prereleases=True)
    return Finding(wanted.name, version if good else f"{version}; {wanted} is needed", good)


def _gpus() -> Finding:
    """Check GPUs with torch in another process, since a driver can crash the process."""
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, check=False)
    lines = (done.stderr if done.returncode else done.stdout).splitlines() or [f"exit status {done.returncode}"]
    return Finding("GPU", lines[-1] if done.returncode else "; ".join(lines), not done.returncode)


def party(folder: Path) -> Iterator[Finding]:
    """Check a party's folder made by `appa deploy`: file modes, and for a group its answers, the server and its clock.

    Raises:
        UserError: the folder is not a party's.
    """
    script, authority = folder / "start.sh", folder / "ca.crt"
    if not (script.exists() and authority.exists()):
        raise UserError(f"{folder}: is no party's folder: server or groups/NAME of what appa deploy made")
    private = [path for pattern in PRIVATE for path in folder.glob(pattern) if path.name != QUESTIONS_FILE]
    opened = [f"others can open it: chmod go= {path}" for path in (folder, *private) if path.stat().st_mode & 0o077]
    yield Finding("file modes", "; ".join(opened) or "nobody else can open what is private", not opened)
    yield from (_answers(file) for file in sorted(folder.glob(f"*{store.SUFFIX}")) if file.name != QUESTIONS_FILE)
    if address := _ADDRESS.search(script.read_text()):
        yield _server(address[1], int(address[2]), authority)


def _answers(file: Path) -> Finding:
    try:
        return Finding(file.name, store.read(file).about.precision, good=True)
    except UserError as error:
        return Finding(file.name, str(error), good=False)


def _server(host: str, port: int, authority: Path) -> Finding:
    """Check that the server answers by TLS, and its clock, which each answer states in whole seconds."""
    try:
        trusting = ssl.create_default_context(cafile=str(authority))
        with closing(http.client.HTTPSConnection(host, port, timeout=5.0, context=trusting)) as connection:
            connection.request("GET", "/health")
            date = parsedate_to_datetime(connection.getresponse().headers["Date"])
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:  # the last two: the answer has no date
        return Finding("server", f"{host}:{port}: {error}; has start.sh been run at the server?", good=False)
    ahead = round((datetime.now(UTC) - date).total_seconds())
    text = f"{host}:{port} answers; its clock is {abs(ahead)} s {'behind' if ahead > 0 else 'ahead of'} this machine's"
    good = -BEHIND < ahead < AHEAD
    return Finding("server", text if good else f"{text}: Flower refuses such nodes (401); set clocks by NTP", good)
