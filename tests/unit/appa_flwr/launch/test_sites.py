"""The parties' folders: certificates that TLS takes, keys that Flower takes, and nobody's data at anybody else's."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.common.config import parse_config_args
from tls_server import listening

from appa_flwr.config import Config
from appa_flwr.config.sources import assemble
from appa_flwr.core.errors import UserError
from appa_flwr.launch import deploy
from appa_flwr.launch.checks import read_survey
from appa_flwr.launch.sites import Sites, make_certificates, prepare
from appa_flwr.owner.owner_policy import OwnerPolicy, read_owner_policy
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey

SURVEY = generate(num_questions=20, num_groups=2, seed=4)
A, B = SURVEY.groups
PINNED = "ab" * 32


def call(folder: Path, *, name: str, trusts: Path) -> None:
    """Call a server of this folder by this name."""
    client = ssl.create_default_context(cafile=str(trusts))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's own default from 3.13 on
    with listening(folder) as port, socket.create_connection(("127.0.0.1", port)) as plain:
        client.wrap_socket(plain, server_hostname=name).close()


def made(root: Path, survey: Survey = SURVEY, **given) -> Sites:
    usual = {"host": "appa.example.org", "port": 9100, "keys": {"rule": "min", "seed": 3}, "bundle": PINNED}
    return prepare(survey, root, **{**usual, **given})


def started(script: Path, *arguments: str, commands: dict[str, str]) -> str:
    """What a script says where these commands, as lines of shell, stand in for Flower's and Python's."""
    tools = script.parent / "bin"
    tools.mkdir(exist_ok=True)
    # Flower's own, of an activated environment, would wait for a node.
    for name, line in {"flower-superexec": "exit", **commands}.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run([script, *arguments], env=path, cwd=tools, umask=0o022, capture_output=True, check=True)
    return done.stdout.decode()


def test_a_server_is_known_by_its_names_and_by_its_own_authority_alone(tmp_path):
    long = "appa." + "x" * 63 + ".example.org"  # longer than a certificate's common name may be
    for folder in ("a", "b"):
        make_certificates(tmp_path / folder, [long, "127.0.0.1"])
    mine, other = tmp_path / "a", tmp_path / "b"
    for name in (long, "127.0.0.1"):
        call(mine, name=name, trusts=mine / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        call(mine, name="example.org", trusts=mine / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        call(mine, name="127.0.0.1", trusts=other / "ca.crt")
    assert (mine / "ca.key").stat().st_mode & 0o077 == 0
    trusted = (mine / "ca.crt").read_bytes()
    make_certificates(mine, ["example.org"])
    assert (mine / "ca.crt").read_bytes() == trusted
    call(mine, name="example.org", trusts=mine / "ca.crt")
    (mine / "ca.key").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"ca\.key"):
        make_certificates(mine, ["example.org"])


def test_every_party_has_what_it_needs_and_nobody_else_s_answers(tmp_path):
    sites = made(tmp_path / "parties")
    assert sorted(path.name for path in sites.server.iterdir()) == [
        *("ca.crt", "group-keys.toml", "keys.toml", "nodes", "questions.jsonl", "register.sh"),
        *("server.crt", "server.key", "start.sh", "submit.sh"),
    ]
    assert "distribution" not in (sites.server / "questions.jsonl").read_text()
    for name, slug in sites.groups.items():
        folder = sites.group(name)
        assert {path.name for path in folder.iterdir()} == {
            *("ca.crt", f"{slug}.jsonl", "guard", "node.key", "node.key.pub", "policy.toml")
        } | {"questions.jsonl", "runtime.secret", "start.sh"}
        rows = [json.loads(line) for line in (folder / f"{slug}.jsonl").read_text().splitlines()[1:]]
        assert {row["group"] for row in rows} == {name}
        assert len(rows) == len(SURVEY.answers[name])
        assert read_owner_policy(folder / "policy.toml") == OwnerPolicy(bundle=PINNED)
        public = load_ssh_public_key((sites.server / "nodes" / f"{slug}.pub").read_bytes())
        private = load_ssh_private_key((folder / "node.key").read_bytes(), None)
        assert private.public_key().public_numbers() == public.public_numbers()
        assert (folder / "node.key").stat().st_mode & 0o077 == 0
    submitted = tomllib.loads((sites.server / "keys.toml").read_text())
    assert submitted == {"rule": "min", "seed": 3, "survey": "questions.jsonl", "groups": "; ".join(SURVEY.groups)} | {
        "run": {"group-keys": "group-keys.toml"}
    }
    bound = tomllib.loads((sites.server / "group-keys.toml").read_text())
    assert bound == {name: (sites.group(name) / "node.key.pub").read_text().strip() for name in SURVEY.groups}


def test_a_server_for_one_machine_listens_to_no_other(tmp_path):
    assert " --host 127.0.0.1 " in (made(tmp_path, host="127.0.0.1").server / "start.sh").read_text()


def test_the_operator_needs_no_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(deploy, "bundle_hash", lambda: PINNED)
    asked = Survey(SURVEY.questions, {})
    with_answers, without = made(tmp_path / "with"), made(tmp_path / "without", asked, groups=SURVEY.groups)
    for name in SURVEY.groups:
        assert not without.data(name).exists()
        there = {path.name for path in with_answers.group(name).iterdir()} - {with_answers.data(name).name}
        assert {path.name for path in without.group(name).iterdir()} == there
    keys = "server/keys.toml"
    assert (without.root / keys).read_text() == (with_answers.root / keys).read_text()
    folder = tmp_path / "refused"
    config = Config.load({"survey": str(without.server / "questions.jsonl")})
    with pytest.raises(UserError, match=r"questions\.jsonl: has questions alone; .*groups=A;B"):
        deploy.make_sites(config, folder, host="h", port=1)
    with pytest.raises(UserError, match=r"avaria\.jsonl: is not there"):
        deploy.deploy_local(Config.load({**config.flat(), "groups": f"{A};{B}"}), folder)


def test_the_scripts_work_where_their_folder_has_been_carried(tmp_path):
    made(tmp_path / "parties")
    root = tmp_path / "elsewhere with a space"
    shutil.copytree(tmp_path / "parties", root)
    sites = Sites(root, "", 0, {A: "avaria", B: "belmora"})
    says = {name: f'echo {name} "$@" at "$FLWR_HOME"' for name in ("flwr", "flower-supernode", "python")}
    home = f"at {sites.server}/.flwr"
    register = [f"flwr supernode register nodes/{slug}.pub deployed {home}" for slug in sites.groups.values()]
    assert started(sites.server / "register.sh", commands=says).splitlines() == register
    (clone := sites.server / "bin" / "a clone").mkdir()
    run = started(sites.server / "submit.sh", "a clone", commands=says)
    assert run == f"flwr run {clone} deployed --stream --run-config keys.toml {home}\n"
    assert "--host 127.0.0.1 --port 9101 --node-config" in started(sites.group(A) / "start.sh", commands=says)
    # what a script starts makes files for its party's eyes alone, as the server's state.db
    server = started(sites.server / "start.sh", commands={"python": f"{says['python']}; touch state.db"})
    for part in ("appa_flwr.launch.superlink_filter ", " --host 0.0.0.0 --port 9100 ", " --enable-supernode-auth "):
        assert part in server
    assert (sites.server / "state.db").stat().st_mode & 0o777 == 0o600


def test_what_a_party_has_is_for_its_own_eyes_also_where_it_was_there_before(tmp_path):
    sites = made(tmp_path)
    folders = [tmp_path / "authority", sites.server, *map(sites.group, sites.groups)]
    for folder in folders:
        folder.chmod(0o755)
    for name in SURVEY.groups:
        sites.data(name).chmod(0o644)
    made(tmp_path)
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    private = [*map(sites.data, SURVEY.groups), sites.server / "server.key"]
    assert {file.stat().st_mode & 0o777 for file in private} == {0o600}


def test_a_run_that_the_groups_policies_would_refuse_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(deploy, "bundle_hash", lambda: "cd" * 32)
    config = Config.load({"data.num-groups": 2, "data.num-questions": 20, "pluralllm.rounds": 0})
    made(tmp_path, survey=read_survey(config))
    with pytest.raises(UserError, match=f"policy.toml: .* {'cd' * 32}"):
        deploy.deploy_local(config, tmp_path)
    assert not (tmp_path / "server" / "runs").exists()
    for owner_policy in tmp_path.glob("groups/*/policy.toml"):
        owner_policy.write_text("")
    deploy.make_sites(config, tmp_path, host="h", port=1)
    submitted = assemble([str(tmp_path / "server" / "keys.toml")], folder=None)
    # the tiny base of the simulation, not that of real surveys, which takes 1,200 steps
    assert submitted.prompt_style == config.prompt_style == "compact"


@pytest.mark.parametrize("name", ["both ' and \"", "a\\", 'a\\"', "x=1 y=2", "Côte d'Ivoire"])
def test_flower_reads_any_name_from_the_start_script(tmp_path, name):
    answers = dict(zip((name, "B"), SURVEY.answers.values(), strict=True))
    sites = made(tmp_path / "parties", survey=replace(SURVEY, answers=answers))
    said = started(sites.group(name) / "start.sh", commands={"flower-supernode": 'printf %s "$*"'})
    given = said.partition("--node-config ")[2]
    data = f"{sites.groups[name]}.jsonl"
    assert parse_config_args([given]) == {"group": name, "data": data, "policy": "policy.toml"}


def test_made_again_keys_certificates_and_policies_stay_and_what_a_kill_left_unfinished_is_finished(tmp_path):
    sites = made(tmp_path)
    own = sites.group(A)
    (own / "policy.toml").write_text("may-leave = []\n")
    kept = {path: path.read_bytes() for path in (own / "policy.toml", own / "node.key", sites.server / "ca.crt")}
    made(tmp_path, port=9200)
    call(sites.server, name="appa.example.org", trusts=own / "ca.crt")
    assert {path: path.read_bytes() for path in kept} == kept
    assert "9200" in (sites.server / "start.sh").read_text()
    before = shutil.copy(own / "ca.crt", tmp_path / "authority" / "before.crt")
    shutil.rmtree(sites.group(B))
    (own / "node.key.pub").unlink()
    made(tmp_path, host="new.example.org")
    for trusted in (own / "ca.crt", before):  # of owners who got the new one, and of others
        call(sites.server, name="new.example.org", trusts=trusted)
    for name, slug in sites.groups.items():
        assert sites.data(name).exists()
        assert (sites.server / "nodes" / f"{slug}.pub").read_bytes() == (
            sites.group(name) / "node.key.pub"
        ).read_bytes()


def test_what_is_not_ours_is_left_alone(tmp_path):
    sites = made(tmp_path)
    mine = sites.data(A)
    mine.write_text("what this group has asked itself\n")
    with pytest.raises(UserError, match=f"^{mine}: holds other answers than the survey"):
        made(tmp_path, port=9200)
    assert "9200" not in (sites.server / "start.sh").read_text()  # nothing else was written either
    assert mine.read_text() == "what this group has asked itself\n"
