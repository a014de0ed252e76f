"""Costs of PluralLLM, of a message of Flower's, of many groups and of secure sums.

    python -m experiments.benchmarks.others pluralllm
    python -m experiments.benchmarks.others floor
    python -m experiments.benchmarks.others scale
    python -m experiments.benchmarks.others secure-sums

Axis letters: J rollouts, K options.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Annotated, TypeVar

import numpy as np
import pandas as pd
import torch
import typer

from appa_flwr.config import Config, assemble
from appa_flwr.core.errors import UserError
from appa_flwr.launch.checks import find_app_folder
from appa_flwr.launch.deploy import SUBMITTER, start
from appa_flwr.launch.endings import RunFailed
from appa_flwr.launch.flower import UNFINISHED, launch
from appa_flwr.launch.ports import LOOPBACK, free_port
from appa_flwr.launch.processes import flower_home
from appa_flwr.launch.sites import CONNECTION, GUARD, prepare
from appa_flwr.protocol import wire
from appa_flwr.report.artifacts import RunArtifacts, read_run
from appa_flwr.secure import summing
from appa_flwr.secure.member import Member, pair_secrets
from appa_flwr.secure.messages import Task
from appa_flwr.secure.primitives import private_key, public_key
from appa_flwr.secure.roster import read_roster, roster_file
from appa_flwr.survey.generate import generate
from client_app.scoring import score
from experiments import entry
from experiments.benchmarks.beside_trl import Surveys
from experiments.benchmarks.engine import Out, shown
from experiments.benchmarks.sides import SEED
from experiments.pluralllm.protocol import SEEN_HELD_OUT, Problem, load_problem, recipe, train
from pluralllm.prediction import predict_targets

app = typer.Typer(add_completion=False)
T = TypeVar("T")

ROLLOUTS = 96
ROUNDS, ITERATIONS = 2, 6
NODES = 3


def pluralllm_costs(problem: Problem, config: Config, *, repeats: int) -> pd.Series[float]:
    """CPU seconds to pretrain, to make the seen groups' tables, and to score random answers against the first."""
    groups, option_QK = problem.parts[SEEN_HELD_OUT].context, problem.embedding.option_QK
    trained = train(problem, config, seed=SEED)
    steps = config.pluralllm.rounds * config.pluralllm.local_steps
    found = {f"pretraining, {steps} steps of {len(groups)} groups": trained.cpu_seconds}
    table = partial(predict_targets, num_context=config.pluralllm.num_context_questions, trained=problem.trained_Q)
    start = time.process_time()
    tables = [table(trained.model, data, problem.embedding, seed=SEED) for data in groups]
    found[f"target tables, {len(groups)} groups x {len(option_QK)} questions"] = time.process_time() - start
    for metrics in (("js",), ("js", "wasserstein")):
        rng = np.random.default_rng(SEED)
        question_J = rng.integers(len(option_QK), size=ROLLOUTS)
        request = wire.ScoreRequest(question_J, rng.random((ROLLOUTS, option_QK.shape[1])), metrics)
        scoring = partial(score, request, tables[0].probability_QK, option_QK)
        laps = repeat(scoring, timer=time.process_time, number=1, repeat=repeats)
        found[f"scoring {ROLLOUTS} answers of one group, {' + '.join(metrics)}"] = median(laps)
    return pd.Series(found)


@app.command()
def pluralllm(
    rounds: Annotated[int, typer.Option(min=1, help="Of federated pretraining, two steps each.")] = 125,
    repeats: Annotated[int, typer.Option(min=1, help="Scorings; their median is reported.")] = 2000,
    surveys: Surveys = None,
) -> None:
    """CPU time of one thread on GlobalQA with the paper's eight countries."""
    torch.set_num_threads(1)
    try:
        problem = load_problem("globalqa", seed=SEED, folder=surveys)
    except UserError as error:
        print(f"{error}; the generated survey stands in for it")
        problem = load_problem("generated", seed=SEED)
    config = recipe(f"pluralllm.rounds={rounds}", f"pluralllm.validate-every={rounds}")
    seconds = pluralllm_costs(problem, config, repeats=repeats)
    print(shown((1000 * seconds).to_frame("CPU ms")))


def secure_sum_costs(number: int, words: int, *, missing: float) -> pd.Series[float]:
    """CPU ms and kB of a secure sum over so many groups, of whom a share drops out between the two messages.

    A group's are the median over groups, with what it seals ahead for one round.
    """
    keys = {f"group {n:04}": private_key() for n in range(number)}
    roster = read_roster(roster_file({name: public_key(key) for name, key in keys.items()}).encode())
    spent: dict[str, list[float]] = {"agree on keys": [], "seal a round": [], "mask": [], "unmask": []}

    def timed(what: str, do: Callable[[], T]) -> T:
        start = time.process_time()
        found = do()
        spent.setdefault(what, []).append(1000 * (time.process_time() - start))
        return found

    members = {}
    for name, key in keys.items():
        pairs = timed("agree on keys", partial(pair_secrets, name, key, roster))
        members[name] = Member(name, pairs, roster, least_cohort=3, remember=_Steps())
    task = Task("costs", 1, roster.names, "request", words)
    prepared = {name: timed("seal a round", partial(m.prepare, "costs", [1]))[0] for name, m in members.items()}
    there = roster.names[: number - round(missing * number)]
    numbers = np.zeros(words, dtype=np.uint64)
    masked = {name: timed("mask", partial(members[name].mask, task, numbers)) for name in there}
    requests = timed("server", partial(summing.unmasking, roster, task, prepared, masked))
    shares = {name: timed("unmask", partial(members[name].unmask, task, of)) for name, of in requests.items()}
    total = timed("server", partial(summing.total, roster, task, prepared, masked, shares))
    assert not total.any()
    one = masked[there[0]]
    sizes = {
        "kB ahead": len(prepared[there[0]].sealed_seeds) + sum(map(len, prepared[there[0]].boxes.values())),
        "kB masked": one.words.nbytes + sum(map(len, one.boxes.values())),
        "kB shares": sum(map(len, shares[there[0]].values())),
    }
    found = {f"group: {what}": median(laps) for what, laps in spent.items() if what != "server"}
    return pd.Series(found | {"server": sum(spent["server"])} | {name: size / 1000 for name, size in sizes.items()})


class _Steps(dict[str, bytes]):
    """A ledger in memory."""

    def __call__(self, step: str, digest: bytes) -> bytes | None:
        before = self.get(step)
        self.setdefault(step, digest)
        return before


@app.command("secure-sums")
def secure_sums(
    groups: Annotated[list[int] | None, typer.Option(help="How many; by default 8, 64, 256 and 1024.")] = None,
    words: Annotated[list[int] | None, typer.Option(help="Numbers of a group; by default 400 and 40,000.")] = None,
    missing: Annotated[float, typer.Option(min=0, max=0.3, help="Share of groups that drop out.")] = 0.05,
) -> None:
    """Cost of a secure sum at a group and at the server, CPU ms of one thread and kB; Flower's own is not in it."""
    for count in words or (400, 40000):
        table = {f"{n} groups": secure_sum_costs(n, count, missing=missing) for n in groups or (8, 64, 256, 1024)}
        print(f"{count} numbers of a group, {missing:.0%} of the groups missing")
        print(shown(pd.DataFrame(table)))


def waits(folder: Path, *, rounds: int, seconds: float) -> list[float]:
    """Seconds waited for messages that hold nothing in each round but the first, which starts processes."""
    survey = generate(num_questions=20, num_groups=NODES, seed=SEED)
    sites = prepare(survey, folder / "parties", host=LOOPBACK, port=free_port(), keys={}, bundle="")
    for name in sites.groups:
        shutil.rmtree(sites.group(name) / GUARD)  # so that Flower's own program answers
    result = folder / "waited.json"
    empty = shutil.copytree(Path(__file__).with_name("empty_app"), folder / "app")
    given = {"nodes": NODES, "rounds": rounds + 1, "seconds": seconds, "result": str(result)}
    keys = " ".join(f"{key}={json.dumps(value)}" for key, value in given.items())
    with flower_home() as home:
        submitter = start(sites, home, nodes=sites.groups).parties[SUBMITTER]
        submitter.call(["flwr", "run", str(empty), CONNECTION, "--run-config", keys])
        while submitter.status().partition(":")[0] in UNFINISHED:
            time.sleep(2.0)
    if not result.exists():
        raise RunFailed(f"the empty app has not run to its end; {sites.server}/superlink.log says why")
    return list(json.loads(result.read_text()))[1:]


@app.command()
def floor(
    rounds: Annotated[int, typer.Option(help="Messages to each node that are counted.")] = 20,
    seconds: Annotated[float, typer.Option(help="What the server computes between two rounds, as PPO does.")] = 2.0,
) -> None:
    """Seconds that Flower takes for a message that holds nothing: three nodes over TLS here, by its own program."""
    with tempfile.TemporaryDirectory(prefix="floor-") as folder:
        waited = pd.Series(waits(Path(folder), rounds=rounds, seconds=seconds), name="waited")
    print(shown(waited.agg(["mean", "std", "max"]).to_frame()))


def grown(groups: int, folder: Path) -> RunArtifacts:
    """A shortened run with so many groups; one that is there already is not repeated."""
    name = f"groups-{groups}"
    if not (folder / name / "report.html").exists():
        keys = ["eval.extra-rows=false", "policy.threads=1", "pluralllm.validate-every=0"]
        keys += [f"pluralllm.rounds={ROUNDS}", f"ppo.num-iterations={ITERATIONS}", f"data.num-groups={groups}"]
        keys += [f"run-name={name}", f"run.output-dir={folder}"]
        launch(assemble(None, keys, folder=Path.cwd()), app_folder=find_app_folder(Path.cwd()))
    return read_run(folder / name)


def growth(run: RunArtifacts) -> dict[str, float]:
    """Seconds of phases and of an iteration, of which the first one warms up, and the server's memory."""
    seconds = {phase.phase: phase.seconds for phase in run.phases}
    later = [line.seconds for line in run.iterations[1:]]
    return {
        "a PluralLLM round": seconds["pluralllm"] / ROUNDS,
        "targets": seconds["targets"],
        "waiting in an iteration": median(line["federation_wait"] for line in later),
        "an iteration": median(sum(line.values()) for line in later),
        "MiB": max(phase.peak_mib or 0.0 for phase in run.phases),
    }


@app.command()
def scale(
    sizes: Annotated[str, typer.Option(help="Numbers of groups.")] = "8,64,256,1024",
    output: Out = Path("runs/scale"),
) -> None:
    """Run the default loop with more and more groups, and say what grows."""
    rows = {size: growth(grown(int(size), output)) for size in sizes.split(",")}
    print(shown(pd.DataFrame.from_dict(rows, orient="index").rename_axis("groups")))


if __name__ == "__main__":
    entry.run(app, call=lambda command: command())
