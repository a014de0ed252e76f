"""Sources that `survey` may name, each turned into one table: a file, a folder of OpinionQA, the hub's data set."""

from __future__ import annotations

import os
from pathlib import Path

from appa_flwr.config import HUB_SURVEY
from appa_flwr.core.errors import UserError
from appa_flwr.survey import globalqa, opinionqa, tidy
from appa_flwr.survey.tables import SurveyTable, read_table


def open_source(source: str | os.PathLike[str]) -> SurveyTable:
    """The rows of a survey, one per question and group.

    Args:
        source: a .csv, .tsv, .jsonl or .parquet file in our own columns, tidy or in GlobalOpinionQA's, a folder in
            OpinionQA's layout, or the hub id `HUB_SURVEY`.

    Raises:
        UserError: it cannot be opened, or holds no such survey.
    """
    if str(source) == HUB_SURVEY:
        return globalqa.from_hub()
    path = Path(source)
    try:
        has_waves = path.is_dir() and bool(opinionqa.waves(path))
    except OSError as error:  # such as a folder of somebody else's
        raise UserError(f"{source}: cannot be read ({error.strerror})") from None
    if has_waves:
        return opinionqa.read_folder(path)
    table = read_table(source)
    if tidy.is_tidy(table):
        return tidy.by_group(table)
    return globalqa.by_country(table) if globalqa.is_globalqa(table) else table
