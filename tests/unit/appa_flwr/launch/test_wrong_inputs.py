"""Wrong inputs of every command: one line that names the key, file or number, and exit code 2.

No program is started and no file written. `{}` in a command is a port in use; `FILES` lie where the command runs.
"""

import json
import re
import shlex
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from surveys import row, write

import appa_flwr.report  # noqa: F401  (matplotlib, when it is first loaded, lists fonts by a program)
from appa_flwr.config import Config
from appa_flwr.launch import deploy
from appa_flwr.run.run_files import write_config

QUESTIONS = "".join(
    json.dumps({"question_id": key, "question": f"{key}?", "options": ["Yes", "No"]}) + "\n" for key in "abcdefgh"
)
RULES = """
import numpy as np
from appa_flwr.analysis.rules import Combination, Rule

class Short(Rule):
    def combine(self, reward_GJ, past):
        return Combination(reward_GJ[0, 1:], [1 / 3] * 3)

class Unknown(Rule):
    def combine(self, reward_GJ, past):
        return Combination(reward_GJ[0], [np.nan] * 3)

class Heavy(Rule):
    def combine(self, reward_GJ, past):
        return Combination(reward_GJ[0], [1.0] * 3)

class Broken(Rule):
    def combine(self, reward_GJ, past):
        return past.nothing

class Adrift(Short):
    def update_log_weights(self, log_weight_G, mean_G):
        return log_weight_G * np.nan
"""
FILES = {
    "bad_rules.py": RULES,
    "a file": "",
    "empty.jsonl": "",
    "survey.png": "\x89PNG",
    "uneven.csv": "a,b\n1\n",
    "people.csv": "sex,q1\nm,1\nf,2\nm,2\n",
    "token": "secret",
    "old.policy": "least-answers = 99\n",
    "torn/config.json": "{",
    "folder/empty": "",
    "syntax.toml": "seed = ",
    "nested.toml": "seed = " + "[" * 9999,
    "both.toml": '"ppo.epochs" = 1\n[ppo]\nepochs = 2\n',
    "asked.jsonl": QUESTIONS,
    "section.toml": "[ppoo]\nclip-range = 1\n",
    "nothing.toml": "[ppoo]\n",
    "list.toml": "seed = [1]\n",
    "true.toml": "[ppo]\nlearning-rate = true\n[run]\n",
    "line.toml": '"se\\ned" = 1\n',
}
TOML = [  # which are no config files
    *((name, "not valid TOML") for name in ("syntax", "nested")),
    ("both", '"ppo.epochs" is given twice'),
    ("section", '"ppoo.clip-range"; the nearest is "ppo.clip-range"'),
    ("nothing", '"ppoo"'),
    ("list", '"seed" must be'),
    ("line", r'"se\\ned".*"seed"'),
]
KEYS = [  # of a run
    ("lerning-rate=1e-3", '"lerning-rate".*"sft.learning-rate"'),
    ("ppo.learning_rate=1e-3", '"ppo.learning_rate".*"ppo.learning-rate"'),
    ("rollout.batch-size=96", "sft.batch-size.*ppo.batch-size"),
    ("ppo=1", '"ppo" is a section.*learning-rate'),
    ("seed", '"seed" .*key=value'),
    ("folder", "folder: cannot be read as a TOML file"),
    ("preset=papr", "preset = .papr. .*paper, paper-oqa"),
    ("true.toml", "ppo.learning-rate = true"),
    ("ppo.learning-rate=fast", 'ppo.learning-rate = "fast".*number'),
    ("appa.alpha=nan", "appa.alpha.*-inf"),
    ("seed=-1", "seed.*greater than or equal to 0"),
    ("sft.answer-step=0.03", "sft.answer-step.*multiple of 0.01 that divides 1"),
    ("rule=aveage", 'rule = "aveage".*appa, average,'),
    ("rule=nowhere:Rule", 'rule "nowhere:Rule": nowhere cannot be imported'),
    ("rule=os:getcwd", "os has no class getcwd"),
    ("rule=appa_flwr.analysis.rules:Rule", "no class Rule that extends .* has its `combine`"),
    ("data.num-groups=3 rule=bad_rules:Short", r"rewards of shape \(15,\), 15 of them finite; .*\(16,\), all finite"),
    ("data.num-groups=3 rule=bad_rules:Unknown", r"weights of shape \(3,\), 0 of them finite"),
    ("data.num-groups=3 rule=bad_rules:Adrift", r"log-weights of shape \(3,\), 0 of them finite"),
    ("data.num-groups=3 rule=bad_rules:Heavy", "weights that sum to 3; they have to sum to 1"),
    ("data.num-groups=3 rule=bad_rules:Broken", "does not work: AttributeError.*bad_rules.py, line 19"),
    ("task=opa metric=js", 'metric = "js".*"opa".*auto, auto-ordinal, borda'),
    ("baseline-rules=average,alpha", 'rule = "alpha" .*appa.alpha'),
    ("baseline-rules=average,mim", "unknown rule 'mim': did you mean 'mi.'.*average, min"),
    ("ppo.num-mini-batches=7", "ppo.num-mini-batches = 7 .*384"),
    ("ppo.answers-per-question=1", "ppo.baseline.*ppo.answers-per-question"),
    ("policy.compute-dtype=bfloat16", "policy.tuning.*policy.compute-dtype"),
    ("policy.sft-targets=q_proj,c_attn", "policy.sft-targets.*must be names among q_proj,k_proj,.*,down_proj"),
    ("model=google/gemma-2-2b-it", "model.*preset=smollm2.*preset=paper.*policy.tuning"),
    ("run-name=../escape", "run-name"),
    ("run.min-groups=9", "run.min-groups = 9 .*8"),
    ("groups=A,B,A", 'groups names "A" twice'),
]
PATHS = [  # of a run
    ("survey=nowhere.jsonl", "nowhere.jsonl: no such survey file"),
    ("survey=asked.jsonl", "asked.jsonl: has questions alone"),
    ("survey=empty.jsonl", "empty.jsonl: holds no survey rows"),
    ("survey=survey.png", r"survey\.png: .*\.csv"),
    ("survey=uneven.csv", "uneven.csv: line 2"),
    ("survey=people.csv", "people.csv: .*appa survey .*people.csv data.group-by=NAME --write people.jsonl"),
    ("survey=people.csv data.group-by=party", "data.group-by is a word of `appa survey` alone"),
    ("survey=folder", "folder: .*appa survey .*folder data.group-by=NAME"),
    ("survey=one.jsonl run.min-groups=1", "at least two different question texts"),
    ("survey=~nosuchuser/x", 'survey = "~nosuchuser/x"'),
    ("run.output-dir='a file' run-name=mine", "a file/mine: cannot be written"),
    ("pluralllm.checkpoint=none.safetensors", r"pluralllm\.checkpoint = .*/none\.safetensors"),
    ("run-name=half run.output-dir=.", 'run-name = "half".*--resume .*/half'),
    ("--resume nowhere", "nowhere: not a run folder, it has no config.json"),
    ("--resume torn", "torn/config.json"),
    ("--resume half seed=4", "seed: a resumed run keeps its keys; it may change run.reply-timeout"),
]
OTHERS = [
    ("frob", "'frob'"),
    ("serve --resume half", "half: the run trains and has not served"),
    ("serve serve.port={}", "serve.port: 127.0.0.1:{} cannot be used"),
    ("eval --model m --name n", "APPA_URL"),
    ("eval --model m --name org/m", '--name "org/m"'),
    ("ask half 'Is it?' --options 'Yes;No'", "half: has no policy/"),
    ("ask half 'Is it?' --options Yes", "1 given; a question needs 2 to 30"),
    ("survey people.csv data.group-by=party", "people.csv: has no column 'party'"),
    ("survey folder", "folder: is a folder"),
    ("survey generated --diagnose groups=Avaria", "no question was answered by two groups"),
    ("survey public.jsonl --diagnose", "no question was answered by two groups"),
    ("deploy here --local --host server.example.org", "--host and --port"),
    (f"deploy here --host {'x' * 64}.org", "is neither"),  # a part of a name has 63 at most
    ("deploy here --host ::1", "is neither"),  # the server listens at IPv4 addresses
    ("doctor folder", "folder: is no party's folder"),
    ("group check nowhere.jsonl --questions two.jsonl", "nowhere.jsonl: cannot be read"),
    ("group check two.jsonl --questions one.jsonl", "one.jsonl: North has answered none .*public file"),
    ("group check two.jsonl --questions reworded.jsonl", "North has answered none .*text or options of .* differ"),
    ("group check two.jsonl --questions two.jsonl --policy old.policy", "old.policy: least-answers: an owner's policy"),
    ("group audit nowhere.sqlite", "nowhere.sqlite: there is no ledger"),
    ("group audit token", "token: the ledger cannot be used"),
    ("group bundle .", "is no checkout"),
]
CASES = [
    *((f"run {name}.toml", f"{name}.toml: .*{says}") for name, says in TOML),
    *((f"run {words}", says) for words, says in (*KEYS, *PATHS)),
    *OTHERS,
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which commands run, with `FILES`, surveys and run folders."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write(tmp_path / "two.jsonl", [row(q, group) for q in ("q1", "q2") for group in ("North", "South")])
    questions = [{"question_id": q, "question": f"{q}?", "options": ["A", "B"]} for q in ("q1", "q2")]
    write(tmp_path / "public.jsonl", questions)
    write(tmp_path / "one.jsonl", [row("another", group) for group in ("North", "South")])
    write(tmp_path / "reworded.jsonl", [{**row(q, "North"), "question": "Something else?"} for q in ("q1", "q2")])
    (tmp_path / "half").mkdir()
    write_config(tmp_path / "half", Config.load({"run-name": "half"}))
    (tmp_path / "half" / "metrics.jsonl").touch()  # as its server does first
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(deploy, "bundle_hash", lambda: "ab" * 32)
    for name in ("APPA_URL", "APPA_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "says"), CASES, ids=[command[:60] for command, _ in CASES])
def test_a_wrong_input_is_one_line_that_names_it_and_nothing_is_started_or_written(
    here, monkeypatch, appa, command, says
):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = written(here)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        (line,) = appa(*shlex.split(command.replace("{}", str(port))), code=2).splitlines()
    assert line.startswith("appa: ")
    assert len(line) < 600  # it can be read
    assert re.search(says.replace("{}", str(port)), line), line
    assert written(here) == before
