"""The parties' folders: certificates that TLS takes, keys that Flower takes, and nobody's data at anybody else's."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.launch import deploy
from appa_flwr.launch.credentials import make_certificates
from appa_flwr.launch.sites import prepare
from appa_flwr.owner.policy import Policy, read_policy
from appa_flwr.survey.generate import generate

SURVEY = generate(num_questions=20, num_groups=2, seed=4)


def greeted(folder: Path, *, name: str, trusts: Path) -> bytes:
    """What a client hears that calls a server of this folder by this name."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            calling, _ = listening.accept()
            try:
                with server.wrap_socket(calling, server_side=True) as secured:
                    secured.sendall(b"hello")
            except OSError:
                calling.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = ssl.create_default_context(cafile=str(trusts))
            with (
                socket.create_connection(listening.getsockname()) as plain,
                client.wrap_socket(plain, server_hostname=name) as secured,
            ):
                return secured.recv(5)
        finally:
            thread.join()


def test_a_server_is_known_by_its_names_and_by_its_own_authority_alone(tmp_path):
    for folder in ("a", "b"):
        make_certificates(tmp_path / folder, ["appa.example.org", "127.0.0.1"])
    mine, other = tmp_path / "a", tmp_path / "b"
    for name in ("appa.example.org", "127.0.0.1"):
        assert greeted(mine, name=name, trusts=mine / "ca.crt") == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        greeted(mine, name="example.org", trusts=mine / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        greeted(mine, name="127.0.0.1", trusts=other / "ca.crt")
    assert (mine / "ca.key").stat().st_mode & 0o077 == 0


def made(root: Path, **given):
    return prepare(
        SURVEY, root, **{"host": "appa.example.org", "port": 9100, "keys": {"rule": "min", "seed": 3}, **given}
    )


def test_every_party_has_what_it_needs_and_nobody_else_s_answers(tmp_path):
    sites = made(tmp_path / "parties")
    assert sorted(path.name for path in sites.server.iterdir()) == [
        *("ca.crt", "group-keys.toml", "questions.jsonl", "server.crt", "server.key", "start.sh")
    ]
    assert "distribution" not in (sites.server / "questions.jsonl").read_text()
    for name, slug in sites.groups.items():
        folder = sites.group(name)
        assert {path.name for path in folder.iterdir()} == {
            *("ca.crt", f"{slug}.jsonl", "guard", "node.key", "node.key.pub", "policy.toml")
        } | {"questions.jsonl", "start.sh"}
        rows = [json.loads(line) for line in (folder / f"{slug}.jsonl").read_text().splitlines()]
        assert {row["group"] for row in rows} == {name}
        assert len(rows) == len(SURVEY.answers[name])
        assert read_policy(folder / "policy.toml") == Policy()
        public = load_ssh_public_key((sites.submitter / "nodes" / f"{slug}.pub").read_bytes())
        private = load_ssh_private_key((folder / "node.key").read_bytes(), None)
        assert private.public_key().public_numbers() == public.public_numbers()
        assert (folder / "node.key").stat().st_mode & 0o077 == 0
    submitted = tomllib.loads((sites.submitter / "keys.toml").read_text())
    assert submitted == {"rule": "min", "seed": 3, "survey": "questions.jsonl", "groups": "; ".join(SURVEY.groups)} | {
        "federation": {"group-keys": "group-keys.toml"}
    }
    bound = tomllib.loads((sites.server / "group-keys.toml").read_text())
    assert bound == {name: (sites.group(name) / "node.key.pub").read_text().strip() for name in SURVEY.groups}
    assert not list(sites.submitter.rglob("*.jsonl"))
    for script in (tmp_path / "parties").rglob("*.sh"):
        subprocess.run(["sh", "-n", str(script)], check=True)


def test_the_scripts_work_where_their_folder_has_been_carried(tmp_path):
    """Flower's commands are stood in for by one that says how it was called."""
    sites = made(tmp_path / "parties")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("flwr", "flower-supernode", "flower-superlink"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" at "$FLWR_HOME"\n')
        (tools / name).chmod(0o755)

    def said(script: Path, *arguments: str) -> list[str]:
        environment = {"PATH": f"{tools}:/usr/bin:/bin"}
        done = subprocess.run(
            [script, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    there = (tmp_path / "elsewhere with a space") / "mine"
    shutil.copytree(sites.submitter, there)
    home = f"at {there}/.flwr"
    assert said(there / "register.sh") == [
        f"flwr supernode register nodes/{slug}.pub deployed {home}" for slug in sites.groups.values()
    ]
    clone = tmp_path / "a clone"
    clone.mkdir()
    (run,) = said(there / "submit.sh", str(clone.relative_to(tmp_path)))
    assert run == f"flwr run {clone} deployed --stream --run-config keys.toml {home}"
    flower = tomllib.loads((there / ".flwr" / "config.toml").read_text())["superlink"]["deployed"]
    assert flower == {"address": "appa.example.org:9100", "root-certificates": str(there / "ca.crt")}
    name, slug = next(iter(sites.groups.items()))
    (started,) = said(sites.group(name) / "start.sh")
    assert started.startswith(
        "flower-supernode --superlink appa.example.org:9100 --port 9101 --root-certificates ca.crt"
    )
    assert f'--node-config group="{name}" data="{slug}.jsonl" policy="policy.toml" at' in started
    (server,) = said(sites.server / "start.sh")
    assert "--host 0.0.0.0 --port 9100 --database state.db" in server


def test_made_again_keys_certificates_and_policies_stay(tmp_path):
    sites = made(tmp_path)
    own = sites.group(SURVEY.groups[0])
    (own / "policy.toml").write_text("votes = false\n")
    kept = {path: path.read_bytes() for path in (own / "policy.toml", own / "node.key", sites.server / "server.key")}
    made(tmp_path, port=9200)
    assert greeted(sites.server, name="appa.example.org", trusts=own / "ca.crt") == b"hello"
    authority = (own / "ca.crt").read_bytes()
    assert {path: path.read_bytes() for path in kept} == kept
    assert "9200" in (sites.server / "start.sh").read_text()
    made(tmp_path, host="new.example.org")
    assert (own / "ca.crt").read_bytes() == authority
    assert greeted(sites.server, name="new.example.org", trusts=own / "ca.crt") == b"hello"


def test_data_of_the_group_s_own_is_left_alone(tmp_path):
    sites = made(tmp_path)
    mine = sites.group(SURVEY.groups[0]) / f"{sites.groups[SURVEY.groups[0]]}.jsonl"
    mine.write_text("what this group has asked itself\n")
    before = (sites.server / "start.sh").read_text()
    with pytest.raises(UserError, match=f"^{mine}: holds other answers than the survey"):
        made(tmp_path, port=9200)
    assert (sites.server / "start.sh").read_text() == before  # nothing else was written either
    assert mine.read_text() == "what this group has asked itself\n"


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=f"^{tmp_path}: holds notes.txt, which is of no deployment of Avaria, Belmora;"):
        made(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_a_kill_left_unfinished_is_finished(tmp_path):
    sites = made(tmp_path)
    shutil.rmtree(sites.group(SURVEY.groups[1]))
    (sites.group(SURVEY.groups[0]) / "node.key.pub").unlink()
    made(tmp_path)
    for name, slug in sites.groups.items():
        assert sites.data(name).exists()
        assert (sites.keys / f"{slug}.pub").read_bytes() == (sites.group(name) / "node.key.pub").read_bytes()


def test_where_things_lie_is_not_submitted():
    keys = deploy.submitted(Config.load({"survey": "generated", "rule": "min", "run.output-dir": "/somewhere"}))
    assert keys["rule"] == "min"
    assert {"survey", "groups", "run.output-dir", "run.cache-dir", "federation.group-keys"}.isdisjoint(keys)
