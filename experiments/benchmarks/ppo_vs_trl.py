"""Our PPO engine beside TRL 1.12's PPOTrainer: same model, prompts, answer lengths and optimizer steps; one CPU thread.

    python -m experiments.benchmarks.ppo_vs_trl --trl-python TRL_ENVIRONMENT/bin/python

Each side runs in a process and an environment of its own, in turns, because a shared machine is never equally busy. CPU
seconds are what to compare; wall-clock seconds stand beside them in the result file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from appa_flwr import markdown
from appa_flwr.config import Scalar, parse_override
from appa_flwr.errors import UserError, unknown_name
from appa_flwr.files import replace_file
from appa_flwr.run import files
from experiments import entry
from experiments.benchmarks.chart import stacked_bars
from experiments.benchmarks.measure import Measured, Update
from experiments.benchmarks.models import save_random, small_qwen3
from experiments.benchmarks.side import CPU_ONE_THREAD, run_side
from experiments.benchmarks.workload import DPA_PROMPTS, SHORT_PROMPTS, Prompts, Workload, draw_batches

TRL_VERSION = "1.12.0"
ALL = "all"
OWN, TRL = "ours", "TRL"
ROLLOUTS = 96
RESPONSE_LENGTH = 60


@dataclass(frozen=True)
class Case:
    """What differs between the cases; answers that end on their own have 10 to 25 tokens, the others 60."""

    prompts: Prompts
    vocabulary: int
    ends: bool


CASES = {
    "dpa-forced": Case(DPA_PROMPTS, 1024, ends=False),
    "dpa-natural": Case(DPA_PROMPTS, 1024, ends=True),
    "short": Case(SHORT_PROMPTS, 1024, ends=False),
    "vocab32k": Case(SHORT_PROMPTS, 32_000, ends=False),
}

STAGES = ("rollout", "reference and value", "update")
_STAGE_OF = {
    "rollout": "rollout",
    "generate": "rollout",
    "reference": "reference and value",
    "value": "reference and value",
}


def stages(update: Update) -> dict[str, float]:
    """CPU seconds of the stages both sides have; whatever is no rollout, reference or value pass is the update's."""
    found = dict.fromkeys(STAGES, 0.0)
    for name, seconds in update.phases.items():
        if name in _STAGE_OF:
            found[_STAGE_OF[name]] += seconds.cpu
    found["update"] = update.total.cpu - sum(found.values())
    return found


@dataclass(frozen=True)
class Comparison:
    """Both sides of a case, each as often as it was run."""

    own: list[Measured]
    trl: list[Measured]

    def check(self) -> None:
        """See that both did the same work.

        Raises:
            RuntimeError: other tokens, other numbers of optimizer steps, or nothing learned.
        """
        for own, trl in zip(self.own, self.trl, strict=True):
            work = [
                [(u.prompt_tokens, u.response_tokens, u.optimizer_steps) for u in side.updates] for side in (own, trl)
            ]
            if work[0] != work[1]:
                raise RuntimeError(f"prompt tokens, response tokens and steps: ours {work[0]}, TRL {work[1]}")
            if not all(side.policy_change > 0 and side.value_change > 0 for side in (own, trl)):
                raise RuntimeError(f"a model did not change: ours {own}, TRL {trl}")


def _over_updates(side: Sequence[Measured], value: Callable[[Update], float]) -> list[float]:
    return [value(update) for measured in side for update in measured.updates]


def table(comparisons: dict[str, Comparison]) -> str:
    """Markdown: medians over updates, least and most in brackets; memory over runs."""
    head = ["case"]
    for name in ("CPU s", "wall s", "MiB added"):
        head += [f"{name}, {OWN}", f"{name}, {TRL}", "ratio"]
    rows = []
    for case, both in comparisons.items():
        cells = [case]
        for value in (lambda u: u.total.cpu, lambda u: u.total.wall):
            cells += _cells(_over_updates(both.own, value), _over_updates(both.trl, value), ".2f")
        cells += _cells([m.added_mib for m in both.own], [m.added_mib for m in both.trl], ".0f")
        rows.append(cells)
    stages_head = ["CPU s", *(f"{stage}, {side}" for stage in STAGES for side in (OWN, TRL))]
    stages_rows = [
        [case, *(f"{median(_stage(side, stage)):.2f}" for stage in STAGES for side in (both.own, both.trl))]
        for case, both in comparisons.items()
    ]
    return f"{markdown.table(head, rows)}\n\n{markdown.table(stages_head, stages_rows)}\n"


def _stage(side: Sequence[Measured], stage: str) -> list[float]:
    return _over_updates(side, lambda update: stages(update)[stage])


def _cells(own: Sequence[float], trl: Sequence[float], form: str) -> list[str]:
    shown = [f"{median(side):{form}} ({min(side):{form}} to {max(side):{form}})" for side in (own, trl)]
    return [*shown, f"{median(own) / median(trl):.3f}"]


def plot(comparisons: dict[str, Comparison]) -> bytes:
    """A pair of bars a case, as the bytes of a PNG."""
    rows = [
        (f"{case}, {name}", {stage: median(_stage(side, stage)) for stage in STAGES})
        for case, both in comparisons.items()
        for name, side in ((OWN, both.own), (TRL, both.trl))
    ]
    return stacked_bars(rows, axis=f"CPU seconds an update of {ROLLOUTS} rollouts (one thread)")


def check_trl(python: str) -> None:
    """See that an interpreter has the TRL this benchmark was written for.

    Raises:
        UserError: it has not.
    """
    ask = "import importlib.metadata as m; print(m.version('trl'))"
    try:
        found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = "no TRL"
    if found != TRL_VERSION:
        raise UserError(f"--trl-python = {python}: needs trl=={TRL_VERSION}, found {found}; see docs/benchmarks.md")


def compare(
    cases: Sequence[str],
    *,
    trl_python: str,
    updates: int,
    repeats: int,
    seed: int,
    out: Path,
    config: dict[str, Scalar] | None = None,
) -> dict[str, Comparison]:
    """Run both sides in turns, `repeats` processes each; the results are written to `out` after each case.

    `config` holds keys of our run config, where ours is not to run as `own_side.KEYS` has it.
    """
    done: dict[str, Comparison] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in cases:
            case, model = CASES[name], Path(scratch) / name
            save_random(small_qwen3(vocabulary=case.vocabulary), model, seed=seed)
            batches = draw_batches(
                case.prompts, vocabulary=case.vocabulary, rollouts=ROLLOUTS, updates=updates, seed=seed
            )
            workload = Workload(str(model), batches, RESPONSE_LENGTH, case.ends, config=config or {}, seed=seed)
            both = Comparison([], [])
            for repeat in range(repeats):
                for side, found, python in ((OWN, both.own, sys.executable), (TRL, both.trl, trl_python)):
                    module = "own_side" if side == OWN else "trl_side"
                    measured = run_side(python, module, workload, scratch=Path(scratch), environment=CPU_ONE_THREAD)
                    found.append(measured)
                    seconds = median(update.total.cpu for update in measured.updates)
                    print(
                        f"{name}, {repeat + 1} of {repeats}, {side}: {seconds:.2f} CPU s an update, "
                        f"{measured.added_mib:.0f} MiB added",
                        flush=True,
                    )
            both.check()
            done[name] = both
            out.mkdir(parents=True, exist_ok=True)
            files.write(out / "results.json", {n: asdict(b) for n, b in done.items()})
            replace_file(out / "results.md", table(done).encode())
            replace_file(out / "ppo_vs_trl.png", plot(done))
    return done


def main(
    trl_python: Annotated[str, typer.Option(help=f"Python of an environment with trl=={TRL_VERSION}.")],
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}, or {ALL}.")] = ALL,
    updates: Annotated[int, typer.Option(min=1, help="Counted updates a process, after one to warm up.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Processes a side, in turns.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("-c", "--config", metavar="KEY=VALUE", help="A key of our side; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/ppo_vs_trl"),
) -> None:
    """Compare our PPO engine with TRL's PPOTrainer."""
    if case != ALL and case not in CASES:
        raise unknown_name("case", case, valid=[*CASES, ALL])
    check_trl(trl_python)
    cases = list(CASES) if case == ALL else [case]
    config = dict(parse_override(text) for text in overrides or [])
    done = compare(cases, trl_python=trl_python, updates=updates, repeats=repeats, seed=seed, out=out, config=config)
    print(table(done))
    print(f"results: {out}")


if __name__ == "__main__":
    entry.run(main)
