"""The files in a run's folder: their names, their content, and how they are read and written.

config.json            schema version of the folder, and every key of the run
survey.jsonl           the survey as the run uses it (`appa_flwr.survey.store`)
survey.memory/         what simulated nodes store until the run ends
progress.jsonl         one line per step, for the launcher
run.log                the same for people; its lock marks a folder in use
replies/               the groups' numbers, by the hash of the request
pluralllm.json         the card of PluralLLM's weights: its training and its scores
pluralllm.safetensors  PluralLLM's final weights
metrics.jsonl          one line per PPO iteration
rules.json             the values of each rule's parameters
questions.json         how many questions the policy is asked
summary.json           the scores of every method: model, trivial baseline or ceiling
scores.parquet         the groups' scores for each answer; summary.json has their means
examples.json          the held-out questions, and what each method and group answers
sft-model/             the policy before PPO
checkpoint.pt          PPO's state after an iteration
*.sha256               hashes of scores.parquet and checkpoint.pt
policy/                the aligned policy, in Hugging Face's layout
served.jsonl           answers and rounds that were served to other trainers (`appa_flwr.run.served`)
token, stop            the token that other trainers need; a file whose creation ends the service
RULE/                  a run's folder for the policy trained by one of `baseline-rules`
report.html, plots/    the report
error.txt              why the run ended early
flower.log             output of `flwr run`, from the launcher
superlink.log          output of the SuperLink of a failed run, from the launcher
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from appa_flwr.config import Config, Scalar
from appa_flwr.core.errors import UserError, first_problem
from appa_flwr.core.files import replace_file
from appa_flwr.run import records

SCHEMA = 16
"""Version of a run's folder, in its config.json. Folders of another version are neither read nor resumed."""

T = TypeVar("T")

SCHEMA_KEY = "schema"
CONFIG_FILE, SURVEY_FILE, LOG_FILE, ERROR_FILE = "config.json", "survey.jsonl", "run.log", "error.txt"
WEIGHTS_FILE, CHECKPOINT_FILE = "pluralllm.safetensors", "checkpoint.pt"
SCORES_FILE = "scores.parquet"
SFT_MODEL, POLICY = "sft-model", "policy"
TOKEN_FILE, STOP_FILE, SERVE_PHASE = "token", "stop", "serve"
REPLIES_FOLDER = "replies"
REPORT_FILE, PLOTS_FOLDER = "report.html", "plots"
FLOWER_LOG, SUPERLINK_LOG = "flower.log", "superlink.log"


@dataclass(frozen=True)
class JsonFile(Generic[T]):
    """A file that is one JSON value."""

    name: str
    kind: type[T]

    def read(self, folder: Path) -> T | None:
        """Read the content; None if there is no file. Raises as `read`."""
        return read(folder / self.name, self.kind)


@dataclass(frozen=True)
class LineFile(Generic[T]):
    """A file with one JSON value per line."""

    name: str
    kind: type[T]

    def read(self, folder: Path) -> tuple[T, ...]:
        """Read all `lines`, without their numbers."""
        return tuple(line for _, line in self.lines(folder))

    def lines(self, folder: Path, *, after: int = 0) -> Iterator[tuple[int, T]]:
        """Yield number and value of the lines after the first `after`, none if there is no file; raises as `read`.

        An incomplete last line is skipped, also one that is being written.
        """
        path, adapter = folder / self.name, TypeAdapter(self.kind)
        lines = (_bytes(path) or b"").split(b"\n")[:-1]
        for number, line in enumerate(lines[after:], start=after + 1):
            if line.strip():
                yield number, parse(line, adapter, f"{path}: line {number}")


MACHINE, NOISE, BY_MEAN = "machine", "noise, by the owners' word", "predicted by the mean of all groups"
"""Phases of the lines in progress.jsonl that state version and machine of the run, noise in groups' answers, and groups
whose answers cannot be solved for."""
PROGRESS = LineFile("progress.jsonl", records.Progress)
METRICS_FILE = LineFile("metrics.jsonl", records.Iteration)
SERVED = LineFile("served.jsonl", records.ServedLine)
CARD = JsonFile("pluralllm.json", records.Card)
RULE_VALUES = JsonFile("rules.json", dict[str, records.RuleValues])
QUESTIONS = JsonFile("questions.json", records.QuestionCounts)
EXAMPLES = JsonFile("examples.json", tuple[records.Example, ...])
SUMMARY = JsonFile("summary.json", tuple[records.SummaryRow, ...])


def rule_folder(rule: str) -> str:
    """Subfolder of a run's folder for one of `baseline-rules`; the name of a user's rule is MODULE:NAME."""
    return rule.replace(":", "-")


def read(path: Path, kind: type[T]) -> T | None:
    """Read a JSON file; None if there is no file.

    Raises:
        UserError: the file cannot be read, or `parse` rejects its content.
    """
    data = _bytes(path)
    return None if data is None else parse(data, TypeAdapter(kind), str(path))


def dumps(content: object, *, indent: int | None = None) -> str:
    """JSON text of records, also nested in containers; NaN and infinities are written as in Python's json."""
    return json.dumps(to_jsonable_python(content), indent=indent)


def write(path: Path, content: object) -> None:
    """Replace a JSON file as a whole; raises as `replace_file`."""
    replace_file(path, (dumps(content, indent=1) + "\n").encode())


def read_config(folder: Path) -> Config:
    """Read the config of the run in this folder.

    Raises:
        UserError: there is no run, its schema is another one, or a key is wrong.
    """
    path = folder / CONFIG_FILE
    flat = read(path, dict[str, Scalar])
    if flat is None:
        raise UserError(f"{folder}: not a run folder, it has no {CONFIG_FILE} (a run writes to runs/NAME)")
    schema = flat.pop(SCHEMA_KEY, "none")
    if schema != SCHEMA:
        raise UserError(
            f"{folder}: another version of appa-flwr wrote this run (its schema is {schema}, this version's {SCHEMA}); "
            "read or resume it with that version, or run it again"
        )
    try:
        return Config.load(flat)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def write_config(folder: Path, config: Config) -> None:
    """Write the config of a new run to its folder."""
    write(folder / CONFIG_FILE, {SCHEMA_KEY: SCHEMA, **config.flat()})


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def parse(data: bytes, adapter: TypeAdapter[T], where: str) -> T:
    """Parse a JSON value of a file; `where` names its place in errors.

    Raises:
        UserError: this is no JSON or has a wrong value; the message names row and key.
    """
    try:
        return adapter.validate_json(data, strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}") from None
