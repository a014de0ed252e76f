"""The policy of a run's folder, loaded to be asked (`appa_flwr.load_run(...).policy()`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import formats
from appa_flwr.public import Answer
from appa_flwr.run.run_files import POLICY
from appa_flwr.survey.cells import MAX_OPTIONS, MIN_OPTIONS
from appa_flwr.survey.types import Question
from server_app.evaluation import greedy
from server_app.models import base, exports
from server_app.ppo.rollouts import sample

ADAPTER = "adapter_config.json"


class AskedPolicy:
    """The policy that a run has left in its folder, in float32.

    Raises:
        UserError: there is none, or the base model that its adapter names is no longer there.
    """

    def __init__(self, run_folder: Path, config: Config) -> None:
        folder = run_folder / POLICY
        if not folder.is_dir():
            raise UserError(f"{run_folder}: has no {POLICY}/; only a run that has ended with PPO leaves one")
        adapter = folder / ADAPTER
        source = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else str(folder)
        self._config = Config.load({**config.flat(), "model": source, "policy.compute-dtype": "float32"})
        self._base = base.prepare(self._config, [])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Transformers' about PEFT
            if adapter.exists():
                self._model = exports.merged(self._config, self._base, folder)
            else:
                self._model = base.load_model(self._config, source, quantized=False)
        self._decoding = greedy(self._model, self._base, self._config)

    def ask(self, question: str, options: Sequence[str]) -> Answer:
        """See `appa_flwr.public.Policy`."""
        asked = Question("asked", question, tuple(options))
        if not MIN_OPTIONS <= len(asked.options) <= MAX_OPTIONS:
            raise UserError(f"options: {len(asked.options)} given; a question needs {MIN_OPTIONS} to {MAX_OPTIONS}")
        decoded = sample(self._model, [self._base.prompt_ids(self._config, asked)], self._decoding).sequences
        (text,) = self._base.texts(decoded.response_JT, decoded.mask_JT)
        parsed = formats.parse(self._config.task, text, len(asked.options))
        return Answer(text, parsed.prediction, parsed.format_score)
