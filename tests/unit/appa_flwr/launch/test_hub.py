"""Uploads to a hub that only notes what it is sent."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.launch import hub
from appa_flwr.run.run_files import write_config


@pytest.fixture
def sent(monkeypatch):
    """What the hub notes of each call."""
    noted = []

    def upload_folder(*, folder_path, allow_patterns, **given):
        names = {path.name for path in folder_path.iterdir() if path.is_file()}
        noted.append({"files": names & set(allow_patterns or names), **given})
        return SimpleNamespace(commit_url="https://hub/commit/1")

    def create_repo(name, **given):
        noted.append({"repository": name, **given})

    monkeypatch.setattr(hub, "HfApi", lambda: SimpleNamespace(create_repo=create_repo, upload_folder=upload_folder))
    return noted


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "policy").mkdir(parents=True)
    write_config(folder, Config.load({"run-name": "run", "seed": 3}))
    for name in ("policy/README.md", "policy/model.safetensors", "pluralllm.safetensors", "pluralllm.json", "run.log"):
        (folder / name).write_text("x")
    return folder


def test_the_policy_goes_to_a_private_repository(run, sent):
    assert hub.upload(run, "me/policy", public=False, predictor=False) == "https://hub/commit/1"
    made, uploaded = sent
    assert made == {"repository": "me/policy", "private": True, "exist_ok": True}
    assert uploaded["files"] == {"README.md", "model.safetensors"}
    assert uploaded["commit_message"] == "appa-flwr: policy, rule appa, seed 3"


def test_the_predictor_is_its_weights_and_their_card_and_nothing_else_of_the_run(run, sent):
    hub.upload(run, "me/predictor", public=True, predictor=True)
    assert sent[0]["private"] is False
    assert sent[1]["files"] == {"pluralllm.safetensors", "pluralllm.json"}


@pytest.mark.parametrize(
    ("name", "predictor"), [("policy/notes.txt", False), ("policy/more", False), ("pluralllm.safetensors", True)]
)
def test_a_link_in_a_run_folder_sends_nothing_of_this_machine(run, sent, tmp_path, name, predictor):
    (tmp_path / "private").write_text("x")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path if name == "policy/more" else tmp_path / "private")
    with pytest.raises(UserError, match=f"{name}: is a link"):
        hub.upload(run, "me/x", public=False, predictor=predictor)
    assert sent == []


def test_an_adapter_on_a_folder_of_this_machine_is_not_pushed(run, sent, tmp_path):
    config = run / "policy" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    with pytest.raises(UserError, match=r"which others do not have; run with lora\.export=merged"):
        hub.upload(run, "me/policy", public=False, predictor=False)
    assert not sent
    config.write_text(json.dumps({"base_model_name_or_path": "org/name"}))
    hub.upload(run, "me/policy", public=False, predictor=False)
    assert len(sent) == 2


def test_an_adapter_that_cannot_be_read_is_named(run, sent):
    (run / "policy" / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json is not JSON"):
        hub.upload(run, "me/policy", public=False, predictor=False)
    assert not sent


def test_a_run_without_a_policy_has_nothing_to_push(run, sent):
    (run / "policy" / "README.md").unlink()
    with pytest.raises(UserError, match=r"has not made .*README\.md yet, so there is nothing to push"):
        hub.upload(run, "me/policy", public=False, predictor=False)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LocalTokenNotFoundError("no token"), "hf auth login"),
        (HTTPError("[Errno -2] Name or service not known"), r"to the hub \(\[Errno -2\] Name or service not known\)"),
        (OSError("no way there\nand more"), r"me/p: cannot be pushed to the hub \(no way there\)"),
    ],
)
def test_a_hub_that_refuses_is_one_line(run, monkeypatch, error, says):
    monkeypatch.setattr(hub, "HfApi", Mock(side_effect=error))
    with pytest.raises(UserError, match=says):
        hub.upload(run, "me/p", public=False, predictor=True)
