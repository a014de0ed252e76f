"""The commands that read a survey: `appa survey` and `export`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from appa_flwr.config import GENERATED_SURVEY, SURVEY_WORDS, Config
from appa_flwr.config.sections import DataSection
from appa_flwr.config.sources import assemble, read_words
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import check_folder, check_place
from appa_flwr.launch.terminal import Overrides, show
from appa_flwr.survey import store
from appa_flwr.survey.split import too_few
from appa_flwr.survey.types import UNITS, Survey

if TYPE_CHECKING:  # the readers need pandas, which the commands of a group lack
    from appa_flwr.survey.noise import Promise
    from appa_flwr.survey.sources import Conversion

NUM_WEIGHTIEST = 3  # guesses that are shown
EPSILONS = (1.0, 2.0, 4.0, 8.0)  # whose cost is shown
TOO_FAR = 50  # points: a larger error leaves nothing of a share

export = typer.Typer(help="Write a survey in the formats of other programs.", no_args_is_help=True)

Epsilon = Annotated[
    float | None,
    typer.Option(min=0.01, max=100.0, help="Protect respondents by noise; without --write, show what that costs."),
]
Delta = Annotated[float, typer.Option(min=1e-15, max=1e-3, help="Chance that epsilon does not hold.")]
WeightCap = Annotated[
    float | None,
    typer.Option(min=1.0 / UNITS, max=1e6, help="Largest weight, in people, chosen without a look at the file."),
]
Again = Annotated[bool, typer.Option("--again", help="Release noisy answers once more, which adds to the epsilon.")]
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A survey file or folder, or generated.")]


def _config(source: str, overrides: list[str] | None) -> Config:
    return assemble([*(overrides or []), f"survey={source}"], folder=Path.cwd())


def _path(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


def survey(
    source: Source,
    overrides: Overrides = None,
    write: Annotated[Path | None, _path("FILE.jsonl", "Write all answers in this package's format.")] = None,
    out: Annotated[Path | None, _path("FOLDER", "Write one private file per group, and the public questions.")] = None,
    codebook: Annotated[Path | None, _path("FILE.toml", "Read a file of respondents by this codebook.")] = None,
    questions: Annotated[
        Path | None, _path("FILE.jsonl", "Restrict a file of respondents to these public questions.")
    ] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Show how far the rules can differ on this survey.")
    ] = False,
    epsilon: Epsilon = None,
    delta: Delta = 1e-6,
    weight_cap: WeightCap = None,
    again: Again = False,
) -> None:
    """Read a survey, show what was read and left out, and convert it to this package's format.

    For a file with one row a respondent, data.group-by=NAME names the columns of groups, and data.weight and
    data.missing the weight and codes that are no answers; or --codebook says all that.
    """
    from appa_flwr.survey.noise import Promise

    promise = None if epsilon is None else Promise(epsilon, delta, weight_cap or 0.0, again)
    if promise is None and (weight_cap or again):
        raise UserError("--weight-cap and --again go with --epsilon")
    if write is not None:
        store.check_suffix(write)
    if promise and write:  # noise is spent before files are written
        check_folder(write.absolute().parent)
    if promise and out:
        check_place(out)
    config, made = _converted(source, overrides or [], codebook, questions, promise if write or out else None)
    survey = made.survey
    costs = [] if promise is None or survey.about.noise else [*_costs(source, made, promise)]
    # Files are written before tables are printed, so that they exist even if `| head` cuts the output.
    written = _written(made, write, out, codebook, epsilon)
    show(
        _table(survey),
        *survey.about.notes,
        too_few(survey, test_fraction=config.data.test_fraction, seed=config.seed) or None,
        f"{len(survey.questions)} questions, {len(survey.groups)} groups",
        *written,
        *costs,
        *(_diagnosis(config, survey) if diagnose else ()),
    )


def _diagnosis(config: Config, survey: Survey) -> Iterator[Table | str]:
    from appa_flwr.analysis import free_answers
    from appa_flwr.report import tables

    rules = free_answers.rules(config)
    frames = free_answers.diagnose(survey, metric=config.reward_metric, rules=rules, seed=config.seed)
    yield from (tables.show(frame, sign=True) for frame in frames)
    yield free_answers.verdict(frames[1], rule="appa" if config.rule == "average" else config.rule)
    if noise := survey.about.noise:
        yield f"{noise.sentence()}: noise, too, sets groups apart, so on exact answers rules may gain less"


def _written(
    made: "Conversion", write: Path | None, out: Path | None, codebook: Path | None, epsilon: float | None
) -> list[str]:
    """Write a survey, which keeps `epsilon`, to the named places, and say so."""
    from appa_flwr.survey import codebook as codebooks
    from appa_flwr.survey import noise

    survey, written = made.survey, [_guesses(made)] if made.codebook else []
    if (line := survey.about.noise) and made.codebook and made.frame:
        written += noise.weighed(made.frame, made.codebook, line.cap)
        together = f", {len(earlier) + 1} releases together" if (earlier := made.codebook.releases) else ""
        written.append(f"{line.sentence()}{together}, noted in {codebook}")
        there = sum(map(len, survey.answers.values()))
        if gone := (size := len(survey.questions) * len(survey.groups)) - there:
            written.append(f"{gone} of {size} answers are left out: the noise outweighs them, or nobody was asked")
    if write is not None:
        store.write(survey, write, epsilon=epsilon)
        written.append(f"all groups' answers: {write}")
    if out is not None:
        split = store.write_split(survey, out, epsilon=epsilon)
        written += [f"private, for {name} alone: {path}" for name, path in split.groups.items()]
        written.append(f"public, for the server: {split.questions}")
    if made.codebook and codebook is None and (place := write or (out and out / "survey")):
        if (file := place.with_name(place.stem + codebooks.SUFFIX)).exists():  # its owner may have edited it
            written.append(f"the codebook that was there: {file.replace(file.with_suffix('.old'))}")
        codebooks.write(made.codebook, file)
        written.append(f"the codebook, to be read and corrected: {file}")
    return written


def _costs(source: str, made: "Conversion", promise: "Promise") -> Iterator[Table | str]:
    """Table of what noise would cost each group, and what would help where it is larger than the sampling error."""
    from appa_flwr.survey import noise
    from appa_flwr.survey.sources import capped

    if made.frame is None or made.codebook is None:
        raise UserError(f"{source}: noise needs one row a respondent")
    free = promise._replace(again=True)  # nothing is released
    lines = [noise.plan(made.codebook, free._replace(epsilon=value)) for value in (*EPSILONS, promise.epsilon)]
    sd, by = lines[-1].sd, (made.frame, made.codebook, lines[-1].cap)
    mean_weight = float(noise.weights(*by).mean()) / UNITS
    costs = noise.costs(made.survey, capped(*by) if (caps := noise.weighed(*by)) else made.survey, mean_weight)
    names = ("respondents", "sampling", *["cap"] * len(caps), *(f"epsilon {x:g}" for x in EPSILONS))
    table = Table("error of a share, in points", *names)
    for cost in costs:
        errors = (cost.sampling, *[cost.cap] * len(caps), *(cost.noise * line.sd for line in lines[:-1]))
        table.add_row(
            cost.group,
            f"{cost.respondents:.0f}",
            *(f"{error:.2g}" if error < TOO_FAR else f"over {TOO_FAR}" for error in errors),
        )
    yield table
    yield from caps
    if small := [cost for cost in costs if cost.noise * sd > cost.sampling]:
        # The noise's error falls as 1 / n, the sampling error as 1 / sqrt(n).
        ratios = ((cost.respondents, cost.noise * sd / cost.sampling) for cost in small if cost.sampling)
        needed = max((people * ratio**2 for people, ratio in ratios), default=None)
        equal = f"; {needed:.0f} respondents a question make them equal" if needed else ""
        questions, columns = lines[-1].questions, lines[-1].columns
        yield (
            f"at epsilon {promise.epsilon:g} the noise is larger than the sampling error in {len(small)} groups of "
            f"{len(costs)}{equal}. What helps: fewer questions than {questions} (--questions)"
            + (f", and one column of groups instead of {columns}" if columns > 1 else "")
        )
    yield f"nothing has been written: --write FILE{store.SUFFIX} or --out FOLDER adds the noise"


def _converted(
    source: str, overrides: list[str], codebook: Path | None, questions: Path | None, promise: "Promise | None"
) -> tuple[Config, "Conversion"]:
    """Read a source by the words of `appa survey` and by the keys of a run, which select groups and answers."""
    from appa_flwr.survey.sources import Conversion, convert, read_run, with_extra

    own = [word for word in overrides if word.partition("=")[0].strip() in SURVEY_WORDS]
    config = _config(source, [word for word in overrides if word not in own])
    if config.survey == GENERATED_SURVEY:
        return config, Conversion(read_run(config))
    by = {key.removeprefix("data.").replace("-", "_"): value for key, value in read_words(own).items()}
    by |= {"min_respondents": config.data.min_respondents}
    if config.data.refusals != DataSection().refusals:
        by["refusals"] = config.data.refusals
    if promise:
        with_extra(Survey((), {}), config)  # a file that cannot be read must not spend a release
    made = convert(
        config.survey, groups=config.group_names or None, codebook=codebook, questions=questions, promise=promise, **by
    )
    return config, made._replace(survey=with_extra(made.survey, config))


def _guesses(made: "Conversion") -> str:
    """Say how many guesses a codebook has, and the weightiest with their shares of the respondents."""
    shares = [f" ({share:.0%} of the respondents)" if share else "" for share, _ in made.guesses]
    first = [words + share for share, (_, words) in zip(shares, made.guesses[:NUM_WEIGHTIEST], strict=False)]
    return f"the codebook has {len(made.guesses)} guesses" + (f", first: {'; '.join(first)}" if first else "")


def _table(survey: Survey) -> Table:
    """Table of the groups, those with most questions first."""
    shown = Table("group", "questions", "respondents (median)")
    for name in sorted(survey.groups, key=lambda name: -len(survey.answers[name])):
        people = list(survey.respondents.get(name, {}).values())
        shown.add_row(name, str(len(survey.answers[name])), f"{np.median(people):.0f}" if people else "")
    return shown


@export.command("prompts")
def export_prompts(
    source: Source,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("prompts"),
    plain: Annotated[bool, typer.Option("--plain", help="Write prompts as plain text, not as a chat.")] = False,
) -> None:
    """Write the prompts of a survey for TRL, OpenRLHF, verl and slime (docs/engines.md)."""
    from server_app.serve import prompts

    written = prompts.export(_config(source, overrides), out, plain=plain)
    typer.echo(f"{out}: " + ", ".join(f"{count} {name}" for name, count in written.items()))
