"""Compare aggregation rules: every rule with every seed, side by side with spread, table and trade-off plot.

    python -m experiments.compare --rules average,min,appa,appa-open --seeds 0,1,2,3,4

Each cell is a real run through the launcher; runs that are already complete are not repeated. The reference answers
(trivial baselines, ceilings) stand next to the rules, since a gain that does not beat them is none. A seed fixes the
survey, the SFT model and the first rollouts, so rules are compared seed by seed: differences to the first rule come
with an interval. "appa-open" is APPA without its fall-back to the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from scipy import stats

from appa_flwr import markdown
from appa_flwr.config import Config, assemble
from appa_flwr.errors import UserError
from appa_flwr.files import replace_file
from appa_flwr.launch.checks import find_app_folder
from appa_flwr.launch.flower import launch
from appa_flwr.report.plots import TradeOffPoint, trade_off
from appa_flwr.run.files import METRICS, REPORT_FILE, SUMMARY, WEIGHTS_FILE, read_config
from appa_flwr.run.records import CEILINGS, DO, FEW_SHOT, TRIVIAL_BASELINES
from appa_flwr.run.resume import check_resumable
from experiments import entry

REFERENCES = (*TRIVIAL_BASELINES, *CEILINGS)
STARTS = ("base", FEW_SHOT, DO["base"], "sft", DO["sft"])
LEARNED = ("ppo", DO["ppo"])
# what `--rules` knows beside the rules themselves -> keys
VARIANTS = {"appa-open": ("rule=appa", "appa.fairness-threshold=1.1")}
CONFIDENCE = 0.95


Cells = dict[str, float]
"""Column -> value of one policy in one run, NaN where it means nothing."""

COLUMNS = (
    *("Avg AS", "Min AS", "skill", "FI", "FI (readable)", "readable", "format"),
    *("Avg AS (survey)", "Min AS (survey)", "skill (survey)", "fell back"),
)
DECIMALS = {"skill": 1, "skill (survey)": 1}
SCORE_DECIMALS = 3


def read_scores(folder: Path, metric: str) -> dict[str, Cells]:
    """Every policy of a finished run, by name; "fell back" is the share of iterations with the plain mean.

    Args:
        folder: the run folder.
        metric: which rows of summary.json.

    Raises:
        UserError: see `appa_flwr.run.files.read_config` and `read`.
    """
    read_config(folder)
    branches = [line.fell_back for line in METRICS.read(folder) or () if line.fell_back is not None]
    found = {}
    for row in SUMMARY.read(folder) or ():
        if row.metric == metric:
            truth = (row.survey.avg_as, row.survey.min_as, row.survey.skill) if row.survey else (None, None, None)
            fell_back = float(np.mean(branches)) if branches and row.policy == "ppo" else None
            fairness = (row.fi, row.fi_readable, row.readable)
            cells = (row.avg_as, row.min_as, row.skill, *fairness, row.format_score, *truth, fell_back)
            found[row.policy] = {
                name: float("nan") if cell is None else cell for name, cell in zip(COLUMNS, cells, strict=True)
            }
    return found


def table(scores: Mapping[str, Sequence[Cells]]) -> str:
    """A Markdown table: a row a policy, mean and standard deviation (ddof 1) over seeds."""
    rows = [
        [name, str(len(by_seed)), *(_cell([cells[column] for cells in by_seed], column) for column in COLUMNS)]
        for name, by_seed in scores.items()
    ]
    return markdown.table(["policy", "seeds", *COLUMNS], rows) + "\n"


def differences(scores: Mapping[str, Sequence[Cells]], rules: Sequence[str]) -> str:
    """A Markdown table of each rule less the first, paired by seed: the mean and Student's 95 % interval."""
    columns = [column for column in COLUMNS if "AS" in column or column == "FI"]
    rows = []
    for rule in rules[1:]:
        cells = [f"{rule} - {rules[0]}"]
        for column in columns:
            first, other = (np.array([one[column] for one in scores[f"ppo, {name}"]]) for name in (rules[0], rule))
            gaps = other - first
            half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps))
            cells.append(f"{gaps.mean():+.4f} ({gaps.mean() - half:+.4f} to {gaps.mean() + half:+.4f})")
        rows.append(cells)
    return markdown.table(["paired difference", *columns], rows) + "\n"


def _cell(values: Sequence[float], column: str) -> str:
    known, decimals = [value for value in values if not np.isnan(value)], DECIMALS.get(column, SCORE_DECIMALS)
    if not known:
        return "-"
    spread = f" ± {np.std(known, ddof=1):.{decimals}f}" if len(known) > 1 else ""
    return f"{np.mean(known):z.{decimals}f}{spread}"


def compare(rules: Sequence[str], seeds: Sequence[int], *, overrides: Sequence[str], output: Path, here: Path) -> Path:
    """Run what is missing, then write compare.md, whose path is returned, and trade_off.png.

    A seed fixes the generated survey too, so rules are compared on the same one.

    Raises:
        UserError: an unknown rule or key.
        RunFailed: a run did not complete; those before it are kept.
    """
    keys = {
        (rule, seed): [
            *overrides,
            *VARIANTS.get(rule, (f"rule={rule}",)),
            f"seed={seed}",
            f"run-name={rule}-seed{seed}",
            f"run.output-dir={output.absolute()}",
        ]
        for seed in seeds
        for rule in rules
    }
    for given in keys.values():  # whatever is wrong shows before hours of runs
        assemble(None, given, folder=here)
    found: dict[str, list[Cells]] = {}
    metric = ""
    for (rule, seed), given in keys.items():
        # No rule touches PluralLLM, so it is trained once a seed.
        weights = output.absolute() / f"{rules[0]}-seed{seed}" / WEIGHTS_FILE
        shared = [] if rule == rules[0] else [f"pluralllm.checkpoint={weights}"]
        config = assemble(None, [*given, *shared], folder=here)
        metric = config.reward_metric
        _finish(config, here)
        scores = read_scores(config.run_folder, metric)
        for name in LEARNED:
            if name in scores:
                found.setdefault(f"{name}, {rule}", []).append(scores[name])
        if rule == rules[0]:  # what does not depend on the rule counts once a seed
            for name in (*STARTS, *REFERENCES):
                if name in scores:
                    found.setdefault(name, []).append(scores[name])
    order = [*STARTS, *(f"{name}, {rule}" for name in LEARNED for rule in rules), *REFERENCES]
    found = {name: found[name] for name in order if name in found}
    points = [
        TradeOffPoint(
            name.removeprefix("ppo, "),
            tuple(cells["Avg AS"] for cells in by_seed),
            tuple(cells["Min AS"] for cells in by_seed),
            reference=name in REFERENCES,
        )
        for name, by_seed in found.items()
        if name in REFERENCES or name.startswith("ppo, ")
    ]
    trade_off(points, output / "trade_off.png", metric=metric)
    path = output / "compare.md"
    text = f"Metric: {metric}. Mean ± standard deviation over seeds.\n\n{table(found)}"
    if len(rules) > 1 and len(seeds) > 1:
        text += f"\nPaired by seed, mean and {CONFIDENCE:.0%} interval (Student's t):\n\n{differences(found, rules)}"
    replace_file(path, text.encode())
    return path


def _finish(config: Config, here: Path) -> None:
    folder = config.run_folder
    if (folder / REPORT_FILE).exists():
        print(f"{folder.name}: complete already")
        return
    if folder.exists():
        config = Config.load({**config.flat(), "run.resume": True})
        check_resumable(config)
    print(f"{folder.name}:", flush=True)
    launch(config, app_folder=find_app_folder(here))


def main(
    rules: Annotated[str, typer.Option(help="Aggregation rules, separated by commas.")] = "average,min,appa",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    overrides: Annotated[
        list[str] | None, typer.Option("-c", "--config", metavar="KEY=VALUE", help="A key of every run; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the runs and the result.")] = Path("runs/compare"),
) -> None:
    """Compare aggregation rules over seeds."""
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise UserError(f'--seeds = "{seeds}": give whole numbers separated by commas, such as 0,1,2') from None
    path = compare(rules.split(","), numbers, overrides=overrides or [], output=output, here=Path.cwd())
    print(path.read_text())
    print(f"table: {path}")


if __name__ == "__main__":
    entry.run(main)
