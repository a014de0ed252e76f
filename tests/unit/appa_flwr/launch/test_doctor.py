"""The doctor finds what is wrong with a machine or a party's folder, and says what would be right."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from pathlib import Path

import flwr.common.constant
import pretended_cuda as gpu
import pytest
import torch
from tls_server import listening

from appa_flwr.core.errors import UserError
from appa_flwr.launch import credentials, doctor
from appa_flwr.launch.ports import free_port
from appa_flwr.launch.sites import Sites, prepare
from appa_flwr.survey.generate import generate

REPO = Path(__file__).parents[4]
SURVEY = generate(num_questions=20, num_groups=2, seed=4)
NAME = SURVEY.groups[0]


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return prepare(SURVEY, tmp_path / "parties", host="127.0.0.1", port=free_port(), keys={}, bundle="")


def wrong(folder: Path) -> dict[str, str]:
    return {finding.what: finding.text for finding in doctor.party(folder) if not finding.good}


def test_everything_of_every_party_is_well_while_the_server_runs(sites):
    with listening(sites.server, port=sites.port):
        findings = list(doctor.party(sites.root))
    assert {finding.what: finding.text for finding in findings if not finding.good} == {}
    found = {finding.what: finding.text for finding in findings}
    slug = sites.groups[NAME]
    assert found["server: server.crt"].startswith("valid until ")
    assert found[f"groups/{slug}: server"].startswith(f"127.0.0.1:{sites.port} answers")
    assert found[f"groups/{slug}: clock"].endswith(" the server's")


def test_before_the_server_runs_that_alone_is_wrong(sites):
    (sites.root / "groups" / "notes.txt").write_text("mine")
    of_groups = {f"groups/{slug}: server" for slug in sites.groups.values()}
    assert set(wrong(sites.root)) == {"submitter: server", *of_groups}
    said = f"127.0.0.1:{sites.port}: cannot be reached (Connection refused); has start.sh been run at the server?"
    assert wrong(sites.group(NAME))["server"] == said
    way = f"ssh -N -L {sites.port}:127.0.0.1:{sites.port} SERVER"
    assert wrong(sites.submitter)["server"] == f"{said}; elsewhere than at the server: {way}"
    assert wrong(sites.server) == {}
    for carried_away in (sites.server, sites.submitter):
        shutil.rmtree(carried_away)
    assert set(wrong(sites.root)) == of_groups


def test_what_answers_has_to_be_our_server(sites, tmp_path):
    with listening(None, port=sites.port):
        assert "what answers speaks no TLS" in wrong(sites.submitter)["server"]
    credentials.make_certificates(tmp_path / "other", ["127.0.0.1"])
    with listening(tmp_path / "other", port=sites.port):
        assert "ca.crt does not vouch for what answers" in wrong(sites.group(NAME))["server"]


# A node's clock may be less than 5 s ahead and less than 305 s behind; the middle of a second is far from both.
@pytest.mark.parametrize(
    ("ahead", "tells", "differs"),
    [
        (30.5, True, "3[01] s ahead of"),
        (6.5, True, "[678] s ahead of"),
        (-310.5, True, "3(09|10|11) s behind"),
        (2.5, True, None),
        (-290.5, True, None),
        (30.5, False, None),
    ],
)
def test_a_clock_that_flower_would_refuse_is_named_with_its_distance(sites, ahead, tells, differs):
    with listening(sites.server, port=sites.port, ahead=ahead, tells=tells):
        for folder in (sites.group(NAME), sites.submitter):
            found = wrong(folder)
            assert set(found) == (set() if differs is None else {"clock"})
            text = f"this machine's clock is {differs} the server's; Flower refuses such nodes \\(401\\): set it by NTP"
            assert differs is None or re.fullmatch(text, found["clock"])


def test_the_bounds_of_a_clock_are_flower_s():
    system, signed = flwr.common.constant.SYSTEM_TIME_TOLERANCE, flwr.common.constant.TIMESTAMP_TOLERANCE
    assert (system, signed + system) == (doctor.AHEAD, doctor.BEHIND)


def test_folders_and_files_that_others_can_open_are_named(sites):
    (sites.server / "state.db").touch(mode=0o644)
    found = wrong(sites.server)
    assert found == {"folder": f"others can read state.db (mode 644); chmod 600 {sites.server / 'state.db'}"}
    sites.server.chmod(0o755)
    assert wrong(sites.server) == {"folder": f"others can read server (mode 755); chmod 700 {sites.server}"}
    folder = sites.group(NAME)
    for name in ("node.key", "avaria.jsonl", "runtime.secret"):
        (folder / name).chmod(0o640)
        with listening(sites.server, port=sites.port):
            assert wrong(folder) == {"folder": f"others can read {name} (mode 640); chmod 600 {folder / name}"}
        (folder / name).chmod(0o600)


def test_what_has_run_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(credentials, "YEARS_VALID", 0)
    sites = prepare(SURVEY, tmp_path, host="127.0.0.1", port=free_port(), keys={}, bundle="")
    assert "UTC only; make the folders again" in wrong(sites.server)["server.crt"]
    assert "UTC only; make the folders again" in wrong(sites.group(NAME))["ca.crt"]


def test_a_certificate_without_key_usage_is_named_and_made_again(tmp_path, monkeypatch):
    def make() -> Sites:
        return prepare(SURVEY, tmp_path, host="127.0.0.1", port=free_port(), keys={}, bundle="")

    monkeypatch.setattr(credentials.x509.CertificateBuilder, "add_extension", without_key_usage)
    sites = make()
    monkeypatch.undo()
    assert "make the folders again" in wrong(sites.server)["server.crt"]
    assert "make the folders again" in wrong(sites.group(NAME))["ca.crt"]
    make()
    assert wrong(sites.server) == {}
    assert set(wrong(sites.group(NAME))) == {"server"}  # which does not run


def without_key_usage(builder, extension, critical, *, add=credentials.x509.CertificateBuilder.add_extension):
    return builder if isinstance(extension, credentials.x509.KeyUsage) else add(builder, extension, critical)


def test_a_folder_of_nobody_s_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no party's folder; `appa deploy` makes such folders"):
        list(doctor.party(tmp_path))


def test_this_machine_is_well():
    assert [finding for finding in doctor.machine() if not finding.good] == []
    assert len(list(doctor.machine(group=True))) == 1 + len(doctor.OF_A_GROUP)


def test_a_missing_package_an_old_one_and_a_full_disk_are_named(monkeypatch):
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "flwr":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name == "torch" else known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "LEAST_DISK", 1e9)
    found = {finding.what: finding.text for finding in doctor.machine() if not finding.good}
    assert found["flwr"] == 'is not installed; pip install "flwr[simulation]<1.43,>=1.41"'
    assert found["torch"] == "is 1.0; torch>=2.6 is needed"
    assert found["disk"].endswith("GiB free; a run with a large model needs 1000000000")


H100 = '["H100", 75161927680, 85899345920, 9, 0, ""]'
T4 = '["T4", 16106127360, 16106127360, 7, 5, "RuntimeError: no kernel"]'
OF_AN_H100 = "H100, 70 of 80 GiB free, capability 9.0, bfloat16 native, nf4 works"
OF_A_T4 = (
    'T4, 15 of 15 GiB free, capability 7.5, bfloat16 emulated, so that "auto" is float32, '
    'nf4 fails, so that policy.tuning = "qlora" will (RuntimeError: no kernel)'
)
FIRST = " (the first is used; CUDA_VISIBLE_DEVICES chooses)"


@pytest.mark.parametrize(
    ("torch_says", "smi", "text", "good"),
    [
        (f"print('noise'); print('[\"2.13.0\", {H100}]')", True, OF_AN_H100, True),
        (f"print('[\"2.13.0\", {H100}, {T4}]')", True, f"{OF_AN_H100}; {OF_A_T4}{FIRST}", True),
        ("print('[\"2.13.0+cpu\"]')", False, "none; torch 2.13.0+cpu computes on the CPU", True),
        (
            "print('[\"2.13.0+cpu\"]')",
            True,
            "torch 2.13.0+cpu sees none, and nvidia-smi is here; install torch for your CUDA version",
            False,
        ),
        (
            "raise OSError('libcuda is broken')",
            False,
            "torch cannot be asked for it: OSError: libcuda is broken",
            False,
        ),
    ],
)
def test_gpus_are_named_with_what_they_can_and_a_torch_that_has_none_of_them(
    monkeypatch, tmp_path, torch_says, smi, text, good
):
    if smi:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "ASK_TORCH", torch_says)
    (finding,) = [found for found in doctor.machine() if found.what == "GPU"]
    assert finding == doctor.Finding("GPU", text, good=good)


def test_torch_is_asked_for_a_gpu_and_tries_to_pack_numbers_there(capsys, monkeypatch):
    with gpu.pretended_cuda():
        exec(doctor.ASK_TORCH, {})
        works = [gpu.NAME, gpu.MEMORY, gpu.MEMORY, 9, 0, ""]
        assert json.loads(capsys.readouterr().out) == [torch.__version__, works]
        for fails, fault in ((OSError("no libcudart\nat all"), "OSError: no libcudart"), (None, "wrong numbers")):

            def unpack(*packed, fails=fails):
                if fails:
                    raise fails
                return torch.zeros(64, 64, device="cuda")

            monkeypatch.setattr("bitsandbytes.functional.dequantize_4bit", unpack)
            exec(doctor.ASK_TORCH, {})
            assert json.loads(capsys.readouterr().out)[1] == [*works[:-1], fault]
