"""Writes a survey as the parties need it: one public question file, one private file per group.

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file, writing
from appa_flwr.survey.types import Question, Survey

QUESTIONS_FILE: Final = "questions.jsonl"
GROUPS_FOLDER: Final = "groups"
MAX_SLUG_CHARS: Final = 60
_NAMELESS: Final = "group"
# Names that some systems keep for devices, with any extension.
_DEVICE: Final = re.compile(r"con|prn|aux|nul|com\d|lpt\d")


@dataclass(frozen=True)
class Exported:
    """Paths of an export: the public file, and each group's private one by the group's name."""

    questions: Path
    groups: Mapping[str, Path]


def slugs(names: Sequence[str]) -> dict[str, str]:
    """A different file name (no extension) per group, of lower-case ASCII letters, digits and hyphens.

    Names are all different; a later one that would share its slug gets a number.
    """
    taken: dict[str, str] = {}
    for name in names:
        ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
        slug = re.sub(r"[^a-z0-9]+", "-", ascii_name.lower())[:MAX_SLUG_CHARS].strip("-") or _NAMELESS
        if _DEVICE.fullmatch(slug):
            slug = f"{_NAMELESS}-{slug}"
        candidate, number = slug, 1
        while candidate in taken:
            number += 1
            candidate = f"{slug}-{number}"
        taken[candidate] = name
    return {name: slug for slug, name in taken.items()}


def export_split(survey: Survey, folder: str | os.PathLike[str]) -> Exported:
    """Writes `questions.jsonl` and `groups/<slug>.jsonl` so that no file holds two groups' answers.

    `read.read_questions` and `read.read_groups` give back the same questions and, bit for bit, the same
    distributions. The folder is made; every file appears whole or not at all; files of an earlier export with the same
    names are replaced, others are left alone.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    root = Path(folder)
    by_id = {question.question_id: question for question in survey.questions}
    files = {name: root / GROUPS_FOLDER / f"{slug}.jsonl" for name, slug in slugs(survey.groups).items()}
    with writing(root):
        (root / GROUPS_FOLDER).mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        replace_file(file, _lines(_private_rows(name, survey, by_id)))
    questions = root / QUESTIONS_FILE
    replace_file(questions, _lines(map(_public_row, survey.questions)))
    return Exported(questions, files)


def write_table(survey: Survey, file: Path) -> None:
    """Write the whole survey, every group's answers, as one .csv or .jsonl in our own columns; it reads as it is.

    Raises:
        UserError: another extension, or the file cannot be written.
    """
    by_id = {question.question_id: question for question in survey.questions}
    rows = [row for name in survey.groups for row in _private_rows(name, survey, by_id)]
    if file.suffix not in (".csv", ".jsonl"):
        raise UserError(f"--write {file}: is written as .csv or .jsonl")
    if file.suffix == ".jsonl":
        replace_file(file, _lines(rows))
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(column for row in rows for column in row)))
    writer.writeheader()
    for row in rows:
        lists = {k: json.dumps(cell, ensure_ascii=False) for k, cell in row.items() if isinstance(cell, list | tuple)}
        writer.writerow(row | lists)
    replace_file(file, text.getvalue().encode())


def _public_row(question: Question) -> dict[str, object]:
    return {
        "question_id": question.question_id,
        "question": question.text,
        "options": question.options,
        "ordinal": question.ordinal,
    }


def _private_rows(group: str, survey: Survey, by_id: Mapping[str, Question]) -> Iterator[dict[str, object]]:
    known = {"n": survey.respondents.get(group, {}), "refusal_rate": survey.refusal_rates.get(group, {})}
    for question_id, shares in survey.answers[group].items():
        more = {column: values[question_id] for column, values in known.items() if question_id in values}
        yield _public_row(by_id[question_id]) | {"group": group, "distribution": shares.tolist()} | more


def _lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
