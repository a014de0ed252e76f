"""Prompts of a run's questions as rows for trainers; answers are scored by `question_id`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from appa_flwr.config import Config
from appa_flwr.core.files import replace_file
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from server_app.questions import divided_questions, run_survey

Row = dict[str, Any]


def rows(config: Config, questions: Sequence[Question], *, plain: bool) -> list[Row]:
    """One row per question, with the prompt as messages of a chat, or as plain text if `plain`."""
    made = []
    for question in questions:
        text = formats.prompt(config.task, question.text, question.options, style=config.prompt_style)
        prompt = text if plain else [{"role": "user", "content": text}]
        made.append({"prompt": prompt, "question_id": question.question_id, "options": list(question.options)})
    return made


def export(config: Config, folder: Path, *, plain: bool = False) -> dict[str, int]:
    """Write the rows of each split as JSONL, and for verl as Parquet; returns split -> number of rows."""
    asked, unanswered, train = divided_questions(config, run_survey(config))
    learned = [*(question for question in asked if question.question_id in train), *unanswered]
    held_out = [question for question in asked if question.question_id not in train]
    splits = {"train": rows(config, learned, plain=plain), "test": rows(config, held_out, plain=plain)}
    for split, split_rows in splits.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in split_rows)
        replace_file(folder / f"{split}.jsonl", "".join(lines).encode(), parents=True)
        verl = pd.DataFrame([_verl_row(row) for row in split_rows])
        replace_file(folder / f"verl.{split}.parquet", verl.to_parquet(index=False))
    return {name: len(split_rows) for name, split_rows in splits.items()}


def _verl_row(row: Row) -> Row:
    return {
        "data_source": "appa",
        "prompt": row["prompt"],
        "ability": "opinion",
        "reward_model": {"style": "rule", "ground_truth": row["question_id"]},
        "extra_info": {"question_id": row["question_id"]},
    }
