"""The prompts of a run's questions, as each training engine reads its rows; the answers are scored by `question_id`.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from appa_flwr.config import Config
from appa_flwr.core.files import replaced_folder, writing
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from server_app.federation.catalogue import divided_questions

Row = dict[str, Any]

ENGINES: Mapping[str, Callable[[Row], Row]] = {
    "openrlhf": lambda row: {"input": row["prompt"], "label": row["question_id"]},
    "slime": lambda row: {"prompt": row["prompt"], "label": row["question_id"]},
    "nemo-gym": lambda row: {
        "responses_create_params": {"input": row["prompt"]},
        "question_id": row["question_id"],
        "agent_ref": {"type": "responses_api_agents", "name": "simple_agent"},
    },
    "verl": lambda row: {
        "data_source": "appa",
        "prompt": row["prompt"],
        "ability": "opinion",
        "reward_model": {"style": "rule", "ground_truth": row["question_id"]},
        "extra_info": {"question_id": row["question_id"]},
    },
}
"""Engine -> a row of its file; verl's is Parquet, the others' JSONL. TRL reads the data set's own rows."""


def rows(config: Config, questions: Sequence[Question], *, plain: bool) -> list[Row]:
    """A row a question: the prompt as messages of a chat, or as plain text."""
    found = []
    for question in questions:
        text = formats.prompt(config.task, question.text, question.options, style=config.prompt_style)
        prompt = text if plain else [{"role": "user", "content": text}]
        found.append({"prompt": prompt, "question_id": question.question_id, "options": list(question.options)})
    return found


def export(config: Config, folder: Path, *, plain: bool = False) -> dict[str, int]:
    """Write `dataset/`, which `datasets.load_from_disk` loads, and a file an engine and split; split -> its rows.

    Raises:
        UserError: the survey cannot be read, or the folder not be written.
    """
    asked, unanswered, train = divided_questions(config)
    learned = [*(question for question in asked if question.question_id in train), *unanswered]
    held_out = [question for question in asked if question.question_id not in train]
    splits = {"train": rows(config, learned, plain=plain), "test": rows(config, held_out, plain=plain)}
    with replaced_folder(folder / "dataset") as beside:
        DatasetDict({name: Dataset.from_list(found) for name, found in splits.items()}).save_to_disk(beside)
    for split, found in splits.items():
        for engine, shaped in ENGINES.items():
            made, path = Dataset.from_list([shaped(row) for row in found]), folder / f"{engine}.{split}"
            with writing(path):
                if engine == "verl":
                    made.to_parquet(f"{path}.parquet")
                else:
                    made.to_json(f"{path}.jsonl", force_ascii=False)
    return {name: len(found) for name, found in splits.items()}
