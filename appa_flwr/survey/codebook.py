"""The codebook of a file with one row a respondent: its groups, weight and questions, and what each code means.

It holds no count and no share, so it can be shown and shared. What the file does not declare is marked, `seen` if it
stands in cells, `guessed` with the reason; the file's owner removes a mark to confirm a line. Each release of answers
with noise is added to it, since what several releases tell of a respondent adds up.
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError, model_validator

from appa_flwr.config.keys import to_toml, to_toml_table
from appa_flwr.config.sections import Section
from appa_flwr.core.errors import UserError, first_problem
from appa_flwr.core.files import read_file, replace_file
from appa_flwr.core.text import decode, parse_toml
from appa_flwr.survey.frames import FileLayout
from appa_flwr.survey.names import same
from appa_flwr.survey.nonanswers import number
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, Noise, Question

SUFFIX: Final = ".codebook.toml"
UNWEIGHTED: Final = "none"
_HEAD: Final = """\
# Codebook for `appa survey FILE --codebook THIS --write FILE.jsonl` (docs/surveys.md). It holds no count and no share.
# seen: the label stands in cells, and the file does not declare it. guessed: why the line is a guess. Remove a mark
# that you have checked, and change what is wrong.
"""
_BARE: Final = re.compile("[A-Za-z0-9_-]+")

Refusals = Literal["keep", "drop"]


class Entry(Section):
    """A code of a column, and its label."""

    code: str
    label: str = Field(pattern=r"\S")
    refusal: bool = False
    seen: bool = False
    guessed: str = ""


Entries = tuple[Entry, ...]


class Listed(Section):
    """A column of groups, of which each option is one; or what a question adds to that."""

    options: Entries  # of a question in the survey's order
    no_answers: Entries = ()

    @model_validator(mode="after")
    def _is_plain(self) -> "Listed":
        _check_once("code", (entry.code for entry in self.entries))
        return self

    @property
    def entries(self) -> Entries:
        """All codes."""
        return (*self.options, *self.no_answers)

    @property
    def labels(self) -> list[str]:
        """The distinct labels of the options."""
        return [*dict.fromkeys(entry.label for entry in self.options)]

    def label_places(self) -> dict[str, int]:
        """Code of an option -> index into the labels."""
        place = {label: k for k, label in enumerate(self.labels)}
        return {entry.code: place[entry.label] for entry in self.options}


class Item(Listed):
    """A column that is a question."""

    id: str = Field(pattern=r"\S")
    text: str = Field(pattern=r"\S")
    ordinal: bool | tuple[float, ...] = False  # positions of the options without refusals; true: their codes, or 1 to K
    guessed: str = ""

    @model_validator(mode="after")
    def _is_question(self) -> "Item":
        if not MIN_OPTIONS <= (size := len({same(entry.label) for entry in self.options})) <= MAX_OPTIONS:
            raise ValueError(f"has {size} options, not {MIN_OPTIONS} to {MAX_OPTIONS}")
        if not isinstance(self.ordinal, bool) and len(self.ordinal) != len(self._answers):
            raise ValueError("ordinal has not one number for each option that is no refusal")
        return self

    @property
    def _answers(self) -> list[Entry]:
        return [entry for entry in self.options if not entry.refusal]

    def places(self) -> list[float]:
        """Positions of all options on the scale, NaN for refusals or without a scale."""
        by_code = [place for entry in self._answers if (place := number(entry.code)) is not None]
        places = by_code if len(by_code) == len(self._answers) else range(1, len(self._answers) + 1)
        rest = iter(places if self.ordinal is True else self.ordinal or ())
        return [math.nan if entry.refusal else next(rest, math.nan) for entry in self.options]


class Weight(Section):
    """The column of the respondents' weights; "none" counts each respondent once."""

    column: str = UNWEIGHTED
    unit: float = Field(1.0, gt=0)  # the weight of one person, where noise is added
    guessed: str = ""


class Codebook(Section):
    """How a file of respondents is read; columns are keys. A column in no table is left out, too."""

    version: Literal[1] = 1
    refusals: Refusals = "keep"
    layout: FileLayout = FileLayout()
    weight: Weight
    groups: dict[str, Listed] = Field(min_length=1)
    questions: dict[str, Item]
    left_out: dict[str, str] = Field({})  # column -> reason
    releases: tuple[Noise, ...] = ()  # in their order

    @model_validator(mode="after")
    def _is_plain(self) -> "Codebook":
        _check_once("id", (item.id for item in self.questions.values()))
        return self

    def marked(self) -> list[str]:
        """What is still marked as seen or guessed, such as "ECON: 2": all of it may be there because of one person."""
        listed = self.groups | self.questions
        lines = [(name, entry) for name, part in listed.items() for entry in part.entries]
        marked = [f"{name}: {entry.code}" for name, entry in lines if entry.seen or entry.guessed]
        marked += [name for name, item in self.questions.items() if item.guessed]
        return marked + [f"weight {self.weight.column}"] * bool(self.weight.guessed)


def _check_once(what: str, names: Iterator[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{what} {twice[0]!r} occurs twice")


def write(codebook: Codebook, file: Path) -> None:
    """Write a codebook as TOML, one line for each code."""
    table = {"version": codebook.version, "refusals": codebook.refusals} | codebook.model_dump(
        by_alias=True, exclude_defaults=True, exclude={"releases"}
    )
    text = _HEAD + "\n".join(_lines(table)) + "\n"
    replace_file(file, (text + "".join(map(_release, codebook.releases))).encode())


def read(file: Path) -> Codebook:
    """Read a codebook; a `UserError` names the file and the wrong column or line."""
    try:
        return Codebook.model_validate(parse_toml(file))
    except ValidationError as error:
        raise UserError(f"{file}: {first_problem(error)}") from None


def add_release(file: Path, release: Noise) -> None:
    """Append a release to a codebook, whose text stays as its owner wrote it.

    Raises:
        UserError: the file cannot be written, or has an entry `releases` in another form.
    """
    text = decode(read_file(file)).rstrip("\n") + "\n" + _release(release)
    try:
        Codebook.model_validate(tomllib.loads(text))
    except ValueError:
        raise UserError(f"{file}: a line such as [[releases]] cannot be added; delete the entry releases") from None
    replace_file(file, text.encode())


def _release(release: Noise) -> str:
    return f"\n[[releases]]\n{to_toml_table(asdict(release))}"


def _lines(table: Mapping[str, Any], place: str = "") -> Iterator[str]:
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    for key, value in sorted(table.items(), key=lambda pair: isinstance(pair[1], tuple)):
        if isinstance(value, tuple) and value and isinstance(value[0], dict):
            yield f"{_key(key)} = ["
            for row in value:
                yield f"  {{ {', '.join(f'{name} = {to_toml(cell)}' for name, cell in row.items())} }},"
            yield "]"
        elif isinstance(value, tuple):
            yield f"{_key(key)} = [{', '.join(map(to_toml, value))}]"
        elif key not in tables:
            yield f"{_key(key)} = {to_toml(value)}"
    for key, value in tables.items():
        if not all(isinstance(part, dict) for part in value.values()) or not value:
            yield f"\n[{place}{_key(key)}]"
        yield from _lines(value, f"{place}{_key(key)}.")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else to_toml(name)


def restrict(codebook: Codebook, public: Sequence[Question]) -> tuple[Codebook, dict[str, str]]:
    """Restrict a codebook to public questions, and return what does not fit, with the reason.

    A question is found by its id, else by its text. Of its options, refusals can be missing in the public question;
    a public option that no code has is kept with share 0.
    """
    column_of = {same(item.text): column for column, item in codebook.questions.items()}
    column_of |= {item.id: column for column, item in codebook.questions.items()}
    questions, problems = dict[str, Item](), dict[str, str]()
    for question in public:
        column = column_of.get(question.question_id) or column_of.get(same(question.text), "")
        fitting = _restricted(codebook.questions[column], question) if column else "the file has no such question"
        if isinstance(fitting, Item):
            questions[column] = fitting
        else:
            problems[question.question_id] = fitting
    rest = {column: "not among the public questions" for column in codebook.questions if column not in questions}
    left_out = codebook.left_out | rest
    changes: dict[str, Any] = {"refusals": "keep", "questions": questions, "left_out": left_out}
    return codebook.model_copy(update=changes), problems


def _restricted(item: Item, question: Question) -> Item | str:
    """Give a question the words and options of a public one, or say why it does not fit."""
    if same(item.text) != same(question.text):
        return f"the text differs: {item.text!r}"
    entries_of: dict[str, list[Entry]] = {}
    for entry in item.entries:
        entries_of.setdefault(same(entry.label), []).append(entry)
    options, scale = list[Entry](), list[float]()
    for k, label in enumerate(question.options):
        for entry in entries_of.pop(same(label), [Entry(code=label, label=label)]):
            options.append(entry.model_copy(update={"label": label}))
            scale += [question.ordinal[k]] if question.ordinal and not entry.refusal else []
    rest = tuple(entry for entry in item.entries if same(entry.label) in entries_of)
    for entry in rest:
        if entry in item.options and not entry.refusal:
            return f"not among its options: {entry.label!r}"
    known = {entry.code for entry in rest}
    if wrong := [entry.label for entry in options if entry.code in known]:
        return f"its option {wrong[0]!r} is the code of another label"
    ordinal = tuple(scale) or False
    return Item(id=question.question_id, text=question.text, ordinal=ordinal, options=tuple(options), no_answers=rest)
