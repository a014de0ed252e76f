"""The doctor finds what is wrong with a machine or a party's folder, and says what would be right."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import ssl
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import flwr.common.constant
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_ssh_private_key,
)

from appa_flwr.core.errors import UserError
from appa_flwr.launch import credentials, doctor
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.sites import Sites, prepare
from appa_flwr.survey.generate import generate

REPO = Path(__file__).parents[4]
SURVEY = generate(num_questions=20, num_groups=2, seed=4)
NAME = SURVEY.groups[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return prepare(SURVEY, tmp_path / "parties", host="127.0.0.1", port=free_port(), keys={}, bundle="")


@contextmanager
def listening(port: int, folder: Path | None, *, ahead: float = 0.0, tells: bool = True) -> Iterator[None]:
    """A server on this port, with the certificates in this folder, or one that speaks no TLS.

    This machine's clock is so many seconds `ahead` of the one that it tells, if it does.
    """
    with socket.create_server(("127.0.0.1", port)) as door:
        secured = None
        if folder is not None:
            secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            secured.load_cert_chain(folder / "server.crt", folder / "server.key")

        def serve() -> None:
            while True:
                try:
                    calling, _ = door.accept()
                except OSError:
                    return
                with calling:
                    try:
                        if secured is None:
                            calling.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                        else:
                            with secured.wrap_socket(calling, server_side=True) as called:
                                calling_for = called.recv(4096)  # nothing, where a connection is all that was wanted
                                date = f"Date: {formatdate(time.time() - ahead, usegmt=True)}\r\n" * tells
                                called.sendall(f"HTTP/1.1 200 OK\r\n{date}\r\n".encode() if calling_for else b"")
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join()


def wrong(folder: Path) -> dict[str, str]:
    return {finding.what: finding.text for finding in doctor.party(folder) if not finding.good}


def test_everything_of_every_party_is_well_while_the_server_runs(sites):
    with listening(sites.port, sites.server):
        findings = list(doctor.party(sites.root))
    assert {finding.what: finding.text for finding in findings if not finding.good} == {}
    found = {finding.what: finding.text for finding in findings}
    assert found["server: port"] == f"{sites.port}, where this server is running"
    slug = sites.groups[NAME]
    assert found[f"groups/{slug}: data"] == f"{NAME}: {len(SURVEY.answers[NAME])} answers; 0 left out"
    assert found[f"groups/{slug}: server"].startswith(f"127.0.0.1:{sites.port} answers")
    assert found[f"groups/{slug}: clock"].endswith(" the server's")
    assert found[f"groups/{slug}: bundle"].startswith("none is pinned: whatever code a run brings runs here")


def test_before_the_server_runs_that_alone_is_wrong(sites):
    assert set(wrong(sites.root)) == {
        "submitter: server",
        *(f"groups/{slug}: server" for slug in sites.groups.values()),
    }
    assert wrong(sites.group(NAME))["server"] == (
        f"127.0.0.1:{sites.port}: cannot be reached (Connection refused); has start.sh been run at the server?"
    )
    assert wrong(sites.server) == {}


def test_another_program_on_the_server_s_port_is_told_from_the_server(sites):
    with listening(sites.port, None):
        assert wrong(sites.server)["port"].startswith(f"another program uses {sites.port} (what answers speaks no TLS")
        assert "what answers speaks no TLS" in wrong(sites.submitter)["server"]


def test_a_server_of_another_authority_is_not_taken_for_ours(sites, tmp_path):
    credentials.make_certificates(tmp_path / "other", ["127.0.0.1"])
    with listening(sites.port, tmp_path / "other"):
        assert "ca.crt does not vouch for what answers" in wrong(sites.group(NAME))["server"]


def test_the_way_to_the_server_from_elsewhere_is_a_tunnel(sites):
    way = f"ssh -N -L {sites.port}:127.0.0.1:{sites.port} SERVER"
    assert wrong(sites.submitter)["server"].endswith(
        f"has start.sh been run at the server?; elsewhere than at the server: {way}"
    )


# A node's clock may be less than 5 s ahead and less than 305 s behind; the middle of a second is far from both.
@pytest.mark.parametrize(
    ("ahead", "differs"), [(30.5, "3[01] s ahead of"), (6.5, "[678] s ahead of"), (-310.5, "3(09|10|11) s behind")]
)
def test_a_clock_that_flower_would_refuse_is_named_with_its_distance(sites, ahead, differs):
    with listening(sites.port, sites.server, ahead=ahead):
        for folder in (sites.group(NAME), sites.submitter):
            found = wrong(folder)
            assert set(found) == {"clock"}
            text = f"this machine's clock is {differs} the server's; Flower refuses such nodes \\(401\\): set it by NTP"
            assert re.fullmatch(text, found["clock"])


@pytest.mark.parametrize(("ahead", "tells"), [(2.5, True), (-290.5, True), (30.5, False)])
def test_a_clock_that_flower_takes_or_nobody_tells_is_well(sites, ahead, tells):
    with listening(sites.port, sites.server, ahead=ahead, tells=tells):
        assert wrong(sites.group(NAME)) == {}


def test_the_bounds_of_a_clock_are_flower_s():
    system, signed = flwr.common.constant.SYSTEM_TIME_TOLERANCE, flwr.common.constant.TIMESTAMP_TOLERANCE
    assert (system, signed + system) == (doctor.AHEAD, doctor.BEHIND)


def pin(sites: Sites, bundle: str) -> dict[str, doctor.Finding]:
    (sites.group(NAME) / "policy.toml").write_text(f'bundle = "{bundle}"\n')
    return {finding.what: finding for finding in doctor.party(sites.group(NAME))}


def test_a_pinned_app_that_is_not_this_checkout_s_is_named(sites, monkeypatch, tmp_path):
    monkeypatch.chdir(REPO)
    own = bundle_hash(REPO)
    assert pin(sites, f"{'0' * 64} {own}")["bundle"] == doctor.Finding("bundle", f"that of {REPO} is pinned", good=True)
    other = pin(sites, "0" * 64)["bundle"]
    assert not other.good
    assert f"runs from {REPO} are refused: its bundle, {own}, is not pinned" in other.text


def test_keys_that_are_missing_are_not_taken_for_another_folder(sites):
    (sites.group(NAME) / "node.key").unlink()
    (sites.server / "server.crt").unlink()
    (sites.submitter / "keys.toml").unlink()
    with listening(sites.port, sites.root / "authority"):
        assert wrong(sites.group(NAME)) == {
            "node.key": "is missing: copy it here again; if it is lost, have the operator make a new one"
        }
        assert set(wrong(sites.server)) == {"server.crt", "server.key"}
        assert set(wrong(sites.submitter)) == {"keys.toml"}


def test_folders_and_files_that_others_can_open_are_named(sites):
    state = sites.server / "state.db"
    state.touch(mode=0o644)
    assert wrong(sites.server) == {"folder": f"others can read state.db (mode 644); chmod 600 {state}"}
    sites.server.chmod(0o755)
    assert wrong(sites.server) == {"folder": f"others can read server (mode 755); chmod 700 {sites.server}"}
    folder = sites.group(NAME)
    folder.chmod(0o750)
    sites.data(NAME).chmod(0o640)
    with listening(sites.port, sites.server):
        found = wrong(folder)
    assert found == {
        "folder": f"others can read avaria (mode 750); chmod 700 {folder}",
        "data": f"others can read avaria.jsonl (mode 640); chmod 600 {sites.data(NAME)}",
    }


def spoil_owner_policy(sites: Sites) -> None:
    (sites.group(NAME) / "policy.toml").write_text("vote = false\n")


def spoil_data(sites: Sites) -> None:
    sites.data(NAME).write_text("not a survey\n")


def swap_node_key(sites: Sites) -> None:
    other = sites.group(SURVEY.groups[1])
    shutil.copyfile(other / "node.key", sites.group(NAME) / "node.key")


def open_key(sites: Sites) -> None:
    (sites.group(NAME) / "node.key").chmod(0o644)


def lose_data(sites: Sites) -> None:
    sites.data(NAME).unlink()


def old_guard(sites: Sites) -> None:
    (sites.group(NAME) / "guard" / "flwr-clientapp").write_text("#!/bin/sh\nexec flwr-clientapp\n")


def lose_guard(sites: Sites) -> None:
    shutil.rmtree(sites.group(NAME) / "guard")


def lock_key(sites: Sites) -> None:
    path = sites.group(NAME) / "node.key"
    key = load_ssh_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


def lose_owner_policy(sites: Sites) -> None:
    (sites.group(NAME) / "policy.toml").unlink()


@pytest.mark.parametrize(
    ("spoil", "what", "text"),
    [
        (spoil_owner_policy, "policy.toml", "unknown key vote; known are"),
        (lose_owner_policy, "policy.toml", "cannot be read (No such file or directory)"),
        (spoil_data, "data", "avaria.jsonl"),
        (lose_data, "data", "avaria.jsonl"),
        (old_guard, "guard", "does not stand before Flower's programs, and `bundle` counts for nothing"),
        (lose_guard, "guard", "does not stand before Flower's programs, and `bundle` counts for nothing"),
        (lock_key, "node.key", ""),
        (swap_node_key, "node.key", "is not the private key of node.key.pub; make the folders again"),
        (open_key, "node.key", "others can read node.key (mode 644); chmod 600 "),
    ],
)
def test_what_is_wrong_at_a_group(sites, spoil, what, text):
    spoil(sites)
    with listening(sites.port, sites.server):
        found = wrong(sites.group(NAME))
    assert set(found) == {what}
    assert text in found[what]


def test_what_is_wrong_at_the_server(sites, monkeypatch, tmp_path):
    credentials.make_certificates(tmp_path / "other", ["127.0.0.1"])
    shutil.copyfile(tmp_path / "other" / "server.key", sites.server / "server.key")
    (sites.server / "group-keys.toml").write_text("Avaria = \n")
    monkeypatch.setattr(doctor, "LEAST_DISK", 1e9)
    found = wrong(sites.server)
    assert found["server.key"] == "is not the key of server.crt; make the folders again"
    assert "Invalid value" in found["group-keys.toml"]
    assert found["disk"].endswith("GiB free; a run with a large model needs 1000000000")
    assert set(found) == {"server.key", "group-keys.toml", "disk"}


def test_a_certificate_that_has_run_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(credentials, "YEARS_VALID", 0)
    sites = prepare(SURVEY, tmp_path, host="127.0.0.1", port=free_port(), keys={}, bundle="")
    assert "UTC only; make the folders again" in wrong(sites.server)["server.crt"]
    assert "UTC only; make the folders again" in wrong(sites.group(NAME))["ca.crt"]


def test_what_the_submitter_sends_has_to_be_keys(sites):
    (sites.submitter / "keys.toml").write_text("rull = 'appa'\n")
    (sites.submitter / "nodes" / "avaria.pub").write_text("no key")
    found = wrong(sites.submitter)
    assert 'unknown key "rull"' in found["keys.toml"]
    assert "nodes/avaria.pub" in found


def test_folders_that_have_been_carried_away_are_nobody_s_fault(sites):
    shutil.rmtree(sites.server)
    shutil.rmtree(sites.submitter)
    (sites.root / "groups" / "notes.txt").write_text("mine")
    assert set(wrong(sites.root)) == {f"groups/{slug}: server" for slug in sites.groups.values()}


@pytest.mark.parametrize(("text", "message"), [("", "names no group"), ("x = 3", "")])
def test_a_table_of_keys_has_to_hold_keys(sites, text, message):
    (sites.server / "group-keys.toml").write_text(text)
    assert message in wrong(sites.server)["group-keys.toml"]


def test_a_folder_of_nobody_s_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no party's folder; `appa deploy` makes such folders"):
        list(doctor.party(tmp_path))


def test_this_machine_is_well():
    assert [finding for finding in doctor.machine() if not finding.good and finding.what not in doctor.COMMANDS] == []
    assert len(list(doctor.machine(group=True))) == 1 + len(doctor.OF_A_GROUP) + len(doctor.COMMANDS)


def test_a_missing_package_an_old_one_and_commands_elsewhere_are_named(monkeypatch, tmp_path):
    versions = {"torch": "1.0", "flwr": None}
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name in versions and versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    command = tmp_path / "flwr"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {finding.what: finding.text for finding in doctor.machine(group=True) if not finding.good}
    here = sysconfig.get_path("scripts")
    away = "is not on the PATH, where Flower looks for its parts; put"
    assert found == {
        "python": f"{away} {here} there",
        "flwr": f"{command} is of another environment; put {here} first on the PATH",
        "torch": "is 1.0; torch>=2.6 is needed",
        "flower-superlink": f"{away} {here} there",
        "flower-supernode": f"{away} {here} there",
    }
    first = next(finding for finding in doctor.machine(group=True) if finding.what == "flwr")
    assert first.text == 'is not installed; pip install "flwr[simulation]<1.43,>=1.41"'
    monkeypatch.setenv("PATH", here + os.pathsep + str(tmp_path))
    others = set(doctor.COMMANDS) - {"flwr"}  # also the name of the package
    assert all(finding.good for finding in doctor.machine(group=True) if finding.what in others)


def gpu_finding(monkeypatch, tmp_path, *, torch_says: str, smi: bool):
    """What the doctor says of the GPU where torch says this, with or without the driver's command on the PATH."""
    if smi:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "ASK_TORCH", torch_says)
    (finding,) = [found for found in doctor.machine() if found.what == "GPU"]
    return finding


H100 = '["H100", 85899345920, 9, 0]'
T4 = '["T4", 16106127360, 7, 5]'


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (H100, "H100, 80 GiB, capability 9.0, bfloat16 native"),
        (
            f"{H100}, {T4}",
            "H100, 80 GiB, capability 9.0, bfloat16 native; "
            'T4, 15 GiB, capability 7.5, bfloat16 emulated, so that "auto" is float32 (the first is used)',
        ),
    ],
)
def test_gpus_are_named_with_what_they_can(monkeypatch, tmp_path, gpus, text):
    says = f"print('noise'); print('[\"2.13.0+cu130\", {gpus}]')"
    assert gpu_finding(monkeypatch, tmp_path, torch_says=says, smi=True) == doctor.Finding("GPU", text, good=True)


def test_a_machine_without_a_gpu_is_well_and_one_whose_torch_has_none_of_its_gpus_is_not(monkeypatch, tmp_path):
    says = "print('[\"2.13.0+cpu\"]')"
    finding = gpu_finding(monkeypatch, tmp_path, torch_says=says, smi=False)
    assert (finding.good, finding.text) == (True, "none; torch 2.13.0+cpu computes on the CPU")
    finding = gpu_finding(monkeypatch, tmp_path, torch_says=says, smi=True)
    assert not finding.good
    assert "install torch for your CUDA version" in finding.text


def test_a_torch_that_cannot_be_asked_is_named(monkeypatch, tmp_path):
    finding = gpu_finding(monkeypatch, tmp_path, torch_says="raise OSError('libcuda is broken')", smi=False)
    assert not finding.good
    assert finding.text == "torch cannot be asked for it: OSError: libcuda is broken"
