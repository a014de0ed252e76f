"""The parties' folders: certificates that TLS takes, keys that Flower takes, and nobody's data at anybody else's."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.launch import deploy
from appa_flwr.launch.bundle import bundle_hash, sent_files
from appa_flwr.launch.checks import read_survey
from appa_flwr.launch.credentials import make_certificates
from appa_flwr.launch.sites import OWNER_POLICY_FILE, prepare
from appa_flwr.owner import guard
from appa_flwr.owner.owner_policy import OWNER_POLICY_VARIABLE, OwnerPolicy, read_owner_policy
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey

REPO = Path(__file__).parents[4]
SURVEY = generate(num_questions=20, num_groups=2, seed=4)
PINNED = "ab" * 32


def greeted(folder: Path, *, name: str, trusts: Path) -> bytes:
    """The answer to a client that calls a server of this folder by this name."""
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


def made(root: Path, survey: Survey = SURVEY, **given):
    usual = {"host": "appa.example.org", "port": 9100, "keys": {"rule": "min", "seed": 3}, "bundle": PINNED}
    return prepare(survey, root, **{**usual, **given})


def named(*names: str) -> Survey:
    """The survey with its groups called otherwise."""
    return replace(SURVEY, answers=dict(zip(names, SURVEY.answers.values(), strict=True)))


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
        } | {"questions.jsonl", "runtime.secret", "start.sh"}
        rows = [json.loads(line) for line in (folder / f"{slug}.jsonl").read_text().splitlines()]
        assert {row["group"] for row in rows} == {name}
        assert len(rows) == len(SURVEY.answers[name])
        assert read_owner_policy(folder / "policy.toml") == OwnerPolicy(bundle=PINNED)
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
    for name in ("flwr", "flower-supernode", "python"):
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
    assert flower == {"address": "127.0.0.1:9100", "root-certificates": str(there / "ca.crt")}
    name, slug = next(iter(sites.groups.items()))
    (started,) = said(sites.group(name) / "start.sh")
    assert started.startswith(
        "flower-supernode --superlink appa.example.org:9100 --host 127.0.0.1 --port 9101 --root-certificates ca.crt"
    )
    assert f'--node-config group="{name}" data="{slug}.jsonl" policy="policy.toml" at' in started
    (server,) = said(sites.server / "start.sh")
    for part in ("python -P -m appa_flwr.launch.door ", " --host 0.0.0.0 --port 9100 ", " --enable-supernode-auth "):
        assert part in server


def test_what_a_party_has_is_for_its_own_eyes(tmp_path):
    """Also in folders that were there before; what a script starts makes such files too, as the server's state.db."""
    sites = made(tmp_path / "parties")
    folders = [tmp_path / "parties" / "authority", sites.server, sites.submitter, *map(sites.group, sites.groups)]
    for folder in folders:
        folder.chmod(0o755)
    for name in SURVEY.groups:
        sites.data(name).chmod(0o644)
    made(tmp_path / "parties")
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert {sites.data(name).stat().st_mode & 0o777 for name in SURVEY.groups} == {0o600}
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ntouch state.db\n")
    python.chmod(0o755)
    subprocess.run([sites.server / "start.sh"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, umask=0o022, check=True)
    assert (sites.server / "state.db").stat().st_mode & 0o777 == 0o600


def test_the_app_that_is_pinned_is_the_one_that_flower_sends_and_no_other(tmp_path, monkeypatch):
    """`flwr run` builds the bundle with the function that is called here, and the node's own guard looks at it."""
    made(tmp_path / "parties", bundle=bundle_hash(REPO))
    sent = sent_files(REPO, tmp_path)
    for name in SURVEY.groups:
        owner_policy = made(tmp_path / "parties").group(name) / OWNER_POLICY_FILE
        monkeypatch.setenv(OWNER_POLICY_VARIABLE, str(owner_policy))
        guard.check(build_fab_from_disk(sent))
        guard.check(build_fab_from_disk(REPO))  # as submit.sh sends it
    (sent / "client_app" / "main.py").write_text("# another line\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(guard.NOT_PINNED)):
        guard.check(build_fab_from_disk(sent))


def test_a_run_that_the_groups_policies_would_refuse_is_not_begun(tmp_path):
    config = Config.load({"data.num-groups": 2, "data.num-questions": 20, "pluralllm.rounds": 0})
    made(tmp_path, survey=read_survey(config, ()))
    assert deploy.not_pinning(made(tmp_path, survey=read_survey(config, ())), PINNED) == {}
    with pytest.raises(UserError, match=f"policy.toml: pins another app than {REPO}, whose bundle is [0-9a-f]{{64}}"):
        deploy.deploy_local(config, tmp_path, app_folder=REPO)
    assert not (tmp_path / "server" / "runs").exists()
    for owner_policy in tmp_path.glob("groups/*/policy.toml"):
        owner_policy.write_text("")
    sites = made(tmp_path, survey=read_survey(config, ()))
    assert deploy.not_pinning(sites, PINNED) == dict.fromkeys(sites.groups, False)


@pytest.mark.parametrize("name", ['The "others"', "A'B", "both ' and \"", "a\\", 'a\\"', "x=1 y=2", "Côte d'Ivoire"])
def test_flower_reads_any_name_from_the_start_script(tmp_path, name):
    sites = made(tmp_path, survey=named(name, "B"))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "flower-supernode").write_text('#!/bin/sh\nprintf %s "$*"\n')
    (tools / "flower-supernode").chmod(0o755)
    (tools / "flower-superexec").symlink_to("/bin/true")  # Flower's, of an activated environment, would wait for a node
    script = sites.group(name) / "start.sh"
    done = subprocess.run(script, env={"PATH": f"{tools}:{os.environ['PATH']}"}, capture_output=True, check=True)
    given = done.stdout.decode().partition("--node-config ")[2]
    slug = sites.groups[name]
    assert parse_config_args([given]) == {"group": name, "data": f"{slug}.jsonl", "policy": "policy.toml"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"host": ""}, 'host = "" is neither a host name nor an IPv4 address'),
        ({"host": "a b"}, 'host = "a b" is neither'),
        ({"host": "http://appa.example.org"}, "is neither"),
        ({"host": "x" * 64 + ".org"}, "is neither"),  # a part of a name has 63 at most
        ({"host": "::1"}, "is neither"),  # the server listens at IPv4 addresses
        ({"port": 99999}, "port = 99999 must be from 1 to 65533: each group's node has one of the ports above it"),
        ({"port": 65534}, "must be from 1 to 65533"),
        ({"port": 0}, "must be from 1 to 65533"),
    ],
)
def test_an_address_that_can_be_none_is_refused_before_anything_is_written(tmp_path, given, says):
    with pytest.raises(UserError, match=re.escape(says)):
        made(tmp_path / "parties", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_long_host_name_and_the_last_port_will_do(tmp_path):
    host = "appa." + "x" * 63 + ".example.org"
    sites = made(tmp_path, host=host, port=65533)
    assert greeted(sites.server, name=host, trusts=sites.submitter / "ca.crt") == b"hello"


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
    assert {"survey", "groups", "run.output-dir", "federation.group-keys"}.isdisjoint(keys)
