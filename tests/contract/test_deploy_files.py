"""The files for containers and systemd: as far as a parser can tell, they fit what `appa deploy` writes."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from appa_flwr.launch.sites import prepare
from appa_flwr.survey.generate import generate

REPO = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((REPO / "deploy" / "compose.yaml").read_text())
UNITS = sorted((REPO / "deploy").glob("*.service"))


def test_every_container_starts_the_folder_of_its_party(tmp_path):
    """Made as the file's first line says."""
    sites = prepare(
        generate(num_questions=20, num_groups=3, seed=0), tmp_path, host="server", port=9100, keys={}, bundle=""
    )
    assert set(COMPOSE["services"]) == {"server", "submitter", *sites.groups.values()}
    for name, service in COMPOSE["services"].items():
        (volume,) = service["volumes"]
        there, inside = re.fullmatch(r"\$\{PARTIES:-\.\./parties\}/(\S+):(\S+)", volume).groups()
        folder = tmp_path / there
        assert folder.is_dir()
        assert there == name or there == f"groups/{name}"
        assert service["working_dir"] == inside
        if name != "submitter":
            assert (folder / service["entrypoint"][-1]).exists()
        else:
            assert {"register.sh", "submit.sh"} <= {path.name for path in folder.iterdir()}
            assert service["network_mode"] == "service:server"  # its scripts call 127.0.0.1, as the server asks
    named = x509.load_pem_x509_certificate((sites.server / "server.crt").read_bytes()).extensions
    assert "server" in named.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    )
    (port,) = COMPOSE["services"]["server"]["ports"]
    assert f"--port {port.split(':')[1]}" in (sites.server / "start.sh").read_text()


def test_the_images_are_of_the_flower_that_is_tested_and_find_their_files():
    pinned = re.search(r"^flwr==(\S+)$", (REPO / "constraints.txt").read_text(), re.MULTILINE)[1]
    allowed = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((REPO / name).exists() for name in allowed)
    for service in COMPOSE["services"].values():
        text = service["build"]["dockerfile_inline"]
        assert re.search(r"^FROM flwr/super(?:link|node):(\S+)$", text, re.MULTILINE)[1] == pinned
        used = set(re.findall(r"/app/checkout/(\S+)", text))
        assert used
        assert used <= allowed
        assert service["build"]["context"] == ".."


def test_the_units_start_the_party_s_script_and_may_write_to_its_folder_alone():
    assert [path.name for path in UNITS] == ["appa-group@.service", "appa-server.service"]
    accounts = []
    for path in UNITS:
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str
        unit.read(path)
        service = unit["Service"]
        assert service["ExecStart"] == f"{service['WorkingDirectory']}/start.sh"
        assert service["ReadWritePaths"] == service["WorkingDirectory"]
        accounts.append(service["User"])
    assert accounts == ["appa-%i", "appa"]  # no two parties share one, and none is root


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_units():
    done = subprocess.run(["systemd-analyze", "verify", *UNITS], capture_output=True, text=True, check=False)
    found = [line for line in done.stderr.splitlines() if "/srv/appa/" not in line]  # where nothing lies here
    assert found == []
