"""The doctor finds what is wrong with a machine or a party's folder."""

import importlib.metadata
import json
import re
from pathlib import Path
from types import SimpleNamespace

import flwr.common.constant
import pretended_cuda as gpu
import psutil
import pytest
from tls_server import listening

from appa_flwr.core.ports import free_port
from appa_flwr.launch import doctor
from appa_flwr.launch.sites import Sites, make_certificates, prepare
from appa_flwr.survey.generate import generate

SURVEY = generate(num_questions=20, num_groups=2, seed=4)
NAME = SURVEY.groups[0]


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return prepare(SURVEY, tmp_path / "parties", host="127.0.0.1", port=free_port(), keys={}, bundle="")


def wrong(folder: Path) -> dict[str, str]:
    return {finding.what: finding.text for finding in doctor.party(folder) if not finding.good}


def test_every_party_is_well_while_the_server_runs_and_misses_it_else(sites):
    parties = (sites.server, sites.group(NAME))
    with listening(sites.server, port=sites.port):
        assert [wrong(folder) for folder in parties] == [{}, {}]
    assert [list(wrong(folder)) for folder in parties] == [[], ["server"]]
    assert f"127.0.0.1:{sites.port}: " in wrong(sites.group(NAME))["server"]


def test_what_answers_has_to_be_our_server(sites, tmp_path):
    for folder, tells in ((None, True), (sites.server, False)):  # no TLS; no clock
        with listening(folder, port=sites.port, tells=tells):
            assert list(wrong(sites.group(NAME))) == ["server"]
    make_certificates(tmp_path / "other", ["127.0.0.1"])
    with listening(tmp_path / "other", port=sites.port):
        assert "certificate verify failed" in wrong(sites.group(NAME))["server"]


# A node's clock may be less than 5 s ahead and less than 305 s behind; the middle of a second is far from both.
@pytest.mark.parametrize(
    ("ahead", "differs"),
    [(6.5, "[678] s behind"), (-310.5, "3(09|10|11) s ahead of"), (2.5, None), (-290.5, None)],
)
def test_a_clock_that_flower_would_refuse_is_named_with_its_distance(sites, ahead, differs):
    with listening(sites.server, port=sites.port, ahead=ahead):
        found = wrong(sites.group(NAME))
    assert list(found) == ([] if differs is None else ["server"])
    assert differs is None or re.search(f"its clock is {differs} this machine's", found["server"])


def test_the_bounds_of_a_clock_are_flower_s():
    system, signed = flwr.common.constant.SYSTEM_TIME_TOLERANCE, flwr.common.constant.TIMESTAMP_TOLERANCE
    assert (system, signed + system) == (doctor.AHEAD, doctor.BEHIND)


def test_folders_and_files_that_others_can_open_are_named(sites):
    folder, server = sites.group(NAME), sites.server
    (server / "state.db").touch(mode=0o600)
    (folder / "questions.jsonl").chmod(0o644)  # public
    assert "file modes" not in wrong(folder)
    for path in (server / "state.db", folder / "node.key", sites.data(NAME), folder / "runtime.secret", folder):
        mode = path.stat().st_mode
        path.chmod(mode | 0o040)
        where = path if path.is_dir() else path.parent
        assert wrong(where)["file modes"].endswith(f"chmod go= {path}")
        path.chmod(mode)


def test_a_group_s_answers_are_exact_or_have_noise_or_cannot_be_read(sites):
    file = sites.data(NAME)
    exact = file.read_text()
    noise = {"epsilon": 4.0, "delta": 1e-6, "sd": 8.02, "questions": 40, "columns": 1}
    changes = {
        "": "exact answers",
        f'"noise": {json.dumps(noise)}, ': "epsilon 4 a respondent (noise of 8 people)",
        '"noise": {"epsilon": 4.0}, ': "line 1: noise",
        '"appa-survey": 99, ': "line 1: has version 99",
    }
    for change, text in changes.items():
        start = exact.replace('"appa-survey": 1, ', "", 1) if "99" in change else exact
        file.write_text(start.replace("{", "{" + change, 1))
        found = {finding.what: finding for finding in doctor.party(sites.group(NAME))}[file.name]
        assert (text in found.text, found.good) == (True, "line 1" not in text)


def test_this_machine_is_well(monkeypatch):
    monkeypatch.setattr(doctor, "ASK_TORCH", "print('torch')")
    assert [finding for finding in doctor.machine() if not finding.good] == []


def test_a_missing_package_an_old_one_and_little_memory_are_named(monkeypatch):
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "flwr":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name == "torch" else known(name)

    monkeypatch.setattr(doctor, "ASK_TORCH", "import os; os.kill(os.getpid(), 9)")  # as a driver may end it
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    found = {finding.what: finding.text for finding in doctor.machine() if not finding.good}
    assert set(found) == {"flwr", "torch", "memory", "GPU"}
    assert 'pip install "flwr[simulation]<1.43,>=1.41"' in found["flwr"]
    assert "torch>=2.9" in found["torch"]
    assert found["GPU"] == "exit status -9"


def test_torch_is_asked_for_a_gpu_and_tries_to_pack_numbers_there(capsys):
    with gpu.pretended_cuda():
        exec(doctor.ASK_TORCH, {})
    assert capsys.readouterr().out.splitlines()[2:] == [f"{gpu.NAME}: 80 of 80 GiB free, nf4 works"]


def test_the_command_fails_where_something_is_wrong(sites, monkeypatch, appa):
    monkeypatch.setattr(doctor, "machine", lambda **_: [])
    assert "WRONG" not in appa("doctor", sites.server)
    sites.server.chmod(0o755)
    appa("doctor", sites.server, code=1)
