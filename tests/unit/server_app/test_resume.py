"""A run that is stopped at any point and resumed ends as one that was not: real server and groups in one process."""

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import Killed, looped, read_every_answer
from safetensors.torch import load_file
from small import CHOSEN, SMALLEST, VALUE_MODEL, lines_of

from appa_flwr.config import Config
from appa_flwr.core import files
from appa_flwr.core.errors import UserError
from appa_flwr.run import pair_scores
from appa_flwr.run.schema import METRICS_FILE, PROGRESS
from server_app import checkpoint, ppo_phase
from server_app import run as server
from server_app.policy import models
from server_app.policy.tiny import TinyRecipe, build
from server_app.questions import build_catalogue
from server_app.run_writer import RunWriter

TINY = {
    **SMALLEST,
    **VALUE_MODEL,
    "baseline-rules": "average",
    "sft.steps": 12,
    "policy.tuning": "lora",  # adapters begin with random numbers
    "ppo.num-iterations": 5,
    "ppo.learning-rate": 1e-2,
    "appa.fairness-threshold": 1.1,  # so that the groups' reward history matters
    "pluralllm.architecture": "attention",  # and the number of the iteration
}
ITERATIONS = TINY["ppo.num-iterations"]


@pytest.fixture(scope="module", autouse=True)
def _every_second_iteration_is_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ppo_phase, "CHECKPOINT_EVERY", 2)
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with a policy small enough for many sessions; what it writes does not matter, all of it is read."""
    folder = tmp_path_factory.mktemp("resume")
    catalogue = build_catalogue(Config.load(TINY))
    training = [q for q, train in zip(catalogue.questions, catalogue.train_Q, strict=True) if train]
    recipe = TinyRecipe("dpa", steps=2, batch_size=16, hidden_size=48, num_layers=2)
    for part in build(recipe, training):
        part.save_pretrained(folder / "model")
    return folder


def config_of(folder: Path, name: str, **changes: object) -> Config:
    places = {"run.output-dir": str(folder / "runs"), "model": str(folder / "model"), "run-name": name}
    return Config.load({**TINY, **CHOSEN, **places, **changes})


def session(config: Config) -> None:
    """One life of the server, in which nobody knows where the global random numbers stand."""
    load_model = server.base_models.load_model

    def loaded(*args, **kwargs):
        torch.manual_seed(time.time_ns())
        return load_model(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        read_every_answer(patched)
        for user in (server.base_models, models):
            patched.setattr(user, "load_model", loaded)
        looped(config, 2)


def results(folder: Path) -> dict[str, object]:
    """Everything with numbers that a run leaves, but for seconds."""
    lines = [line | {"seconds": None, "traffic": None} for line in lines_of(folder)]
    found: dict[str, object] = {"metrics": lines}
    for name in ("summary.json", "pluralllm.json"):
        found[name] = json.loads((folder / name).read_text())
    for name in ("policy/adapter_model.safetensors", "sft-model/adapter_model.safetensors"):
        if not (folder / name).exists():  # the baseline's rule begins with the SFT model of the other
            continue
        found[name] = {key: value.tolist() for key, value in load_file(folder / name).items()}
    return found


@pytest.fixture(scope="module")
def unbroken(shared) -> Path:
    config = config_of(shared, "unbroken")
    session(config)
    return config.run_folder


@pytest.fixture(scope="module")
def expected(unbroken) -> dict[str, object]:
    found = results(unbroken)
    for name in ("kl", "value_loss"):  # an update that is lost or done twice would show
        assert len({line[name] for line in found["metrics"]}) == ITERATIONS, name
    assert len(set(found["metrics"][-1]["history"].values())) == TINY["data.num-groups"]
    return found


Kill = Callable[[pytest.MonkeyPatch], None]


def before(owner: object, name: str, meets: Callable[..., bool], error: BaseException | type = Killed) -> Kill:
    """When `owner.name` is about to be called with arguments that meet the condition."""

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        honest = getattr(owner, name)

        def call(*given, **keys):
            if meets(*given):
                raise error
            return honest(*given, **keys)

        monkeypatch.setattr(owner, name, call)

    return install


def at_step(phase: str, step: int) -> Kill:
    """When the run is about to tell that this step of a phase is done."""
    return before(RunWriter, "progress", lambda _, name, number, *rest: (name, number) == (phase, step))


def is_checkpoint(source: Path, target: Path) -> bool:
    return Path(target).name == "checkpoint.pt"


between_line_and_checkpoint = before(checkpoint, "save", lambda *_: True)
writing_hash = before(files.os, "replace", lambda _, target: Path(target).name == "checkpoint.pt.sha256")
# the second checkpoint is written, but not yet in the first one's place
writing_checkpoint = before(files.os, "replace", lambda *to: is_checkpoint(*to) and Path(to[1]).exists())
# no kill: the disk takes no more of the second checkpoint
full_disk = before(files.os, "replace", is_checkpoint, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
# the next line after the second checkpoint of this session
after_checkpoint = at_step("ppo by appa", 5)
saving_policy = before(files.os, "rename", lambda _, target: Path(target).name == "policy")
scoring_policy = at_step("evaluate ppo", 0)
by_baseline = at_step("ppo by average", 3)
saving_baseline = before(files.os, "rename", lambda _, target: Path(target).parts[-2:] == ("average", "policy"))


# In the order in which one run meets them: when, iterations kept, and whether PluralLLM and SFT have to be done again.
KILLS: list[tuple[Kill, int, bool, bool]] = [
    (at_step("pluralllm", 1), 0, True, True),
    (at_step("sft", 10), 0, False, True),
    (between_line_and_checkpoint, 0, False, False),
    (writing_checkpoint, 2, False, False),
    (full_disk, 2, False, False),
    (writing_hash, 4, False, False),
    (after_checkpoint, 4, False, False),
    (saving_policy, 5, False, False),
    (scoring_policy, 5, False, False),
    (by_baseline, 5, False, False),
    (saving_baseline, 5, False, False),
]


@pytest.mark.parametrize(
    ("name", "read"),
    [("checkpoint.pt", checkpoint.load), ("scores.parquet", lambda path: pair_scores.read(path.parent))],
)
def test_a_flipped_bit_is_noticed_wherever_it_is(unbroken, tmp_path, name, read):
    shutil.copytree(unbroken, tmp_path / "run")
    whole = (path := tmp_path / "run" / name).read_bytes()
    assert len(vars(read(path)))
    for place in np.random.default_rng(0).integers(8 * len(whole), size=40):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=rf"^{path}: cannot be read \(ValueError: it is not what was written"):
            read(path)


def test_a_run_killed_at_every_point_ends_with_the_numbers_of_an_unbroken_one(shared, expected, unbroken):
    config = config_of(shared, "broken")
    resumed = Config.load({**config.flat(), "run.resume": True})
    folder, lines_before, iterations_before = config.run_folder, 0, 0
    # What the session before this one has left: at first nothing.
    left = (0, True, True)
    for kill, *leaves in [*KILLS, (None, ITERATIONS, False, False)]:
        begins = config if lines_before == 0 else resumed
        if kill is None:
            session(begins)
        else:
            with pytest.MonkeyPatch.context() as patched:
                kill(patched)
                with pytest.raises(UserError if kill is full_disk else Killed):
                    session(begins)
        if kill in (saving_policy, scoring_policy):
            assert (folder / "policy" / "README.md").exists() == (kill is scoring_policy)
        if kill is by_baseline:  # else the main rule's scores would be shown as those of this one
            assert {*pair_scores.read(folder / "average")["method"]} & {"sft", "ppo"} == {"sft"}
        progress = PROGRESS.read(folder)[lines_before:]
        lines_before += len(progress)
        kept, pretrains, tunes = left
        done = [line.step for line in progress if line.phase == "ppo by appa" and "reward" in line.message]
        assert done == list(range(kept + 1, kept + 1 + len(done)))
        messages = [f"{line.phase}: {line.message}" for line in progress]
        if iterations_before and "ppo by appa: begins" in messages:
            (text,) = [text for text in messages if text.startswith("ppo by appa: resumed")]
            assert [*map(int, re.findall(r"\d+", text))] == [kept, *range(kept + 1, iterations_before + 1)]
        else:
            assert "ppo by appa: resumed" not in " ".join(messages)
        iterations_before = len(METRICS_FILE.read(folder))
        assert any(text.startswith("pluralllm: loss") for text in messages) <= pretrains
        assert any(text.startswith("sft: loss") for text in messages) <= tunes
        assert ("evaluate base: begins" in messages) <= tunes  # its scores are kept
        reason = (folder / "error.txt").read_text() if (folder / "error.txt").exists() else None
        full = f"{folder / 'checkpoint.pt'}: cannot be written (No space left on device)\n"
        assert reason == (full if kill is full_disk else None)
        left = tuple(leaves)
    assert progress[-1].phase == "report"
    assert results(folder) == expected
    assert "| ppo | survey | 0." in (folder / "policy" / "README.md").read_text()
    assert results(folder / "average") == results(unbroken / "average")
    assert [path.name for path in folder.glob(".*")] == [".run.log.lock"]
    kept = [sorted(path.name for path in (run / "replies").rglob("*")) for run in (folder, unbroken)]
    assert kept[0] == kept[1]
    assert not [*folder.glob("replies/*/*")]  # PPO's, after its last checkpoint


def test_rules_side_by_side_give_the_numbers_of_one_after_another(shared, expected, unbroken):
    config = config_of(shared, "beside", **{"run.rules-at-once": 2})
    with pytest.MonkeyPatch.context() as patched:
        by_baseline(patched)
        with pytest.raises(Killed):
            session(config)
    folder = config.run_folder
    assert len(METRICS_FILE.read(folder / "average")) == 3
    assert "ppo by appa" in [line.phase for line in PROGRESS.read(folder)]  # it had begun, and ended with the other
    assert not (folder / "average" / "policy").exists()
    session(Config.load({**config.flat(), "run.resume": True}))
    assert results(folder) == expected
    assert results(folder / "average") == results(unbroken / "average")
    assert not [*folder.glob("replies/*/*")]
