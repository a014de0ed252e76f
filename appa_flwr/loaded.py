"""Trained models in a folder: a run's policy and preference predictor (`appa_flwr.load_run`), or any other policy.

Axis letters: K options.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from peft import PeftModel
from threadpoolctl import threadpool_limits

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import formats
from appa_flwr.run.schema import POLICY, WEIGHTS_FILE, read
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS
from pluralllm.data import group_data
from pluralllm.prediction import GroupPredictor
from pluralllm.training import build
from server_app.evaluation import decode
from server_app.policy.base import load_model, prepare
from server_app.policy.lora_product import round_once
from server_app.predictor.checkpoint import load
from server_app.predictor.pretraining import initial_weights
from server_app.questions import build_catalogue

GROUP = "asked"
BATCH = 16
SUM_TOLERANCE = 0.01  # for shares that were rounded by hand


@dataclass(frozen=True)
class Answer:
    """A policy's answer to a question with K options.

    Attributes:
        text: the policy's text.
        prediction: (K,) a distribution, or for rankings preference scores, K for the first; None if unreadable.
        format_score: in [0, 1].
    """

    text: str
    prediction: npt.NDArray[np.float64] | None
    format_score: float


class LocalModel:
    """A local model, prompted like a run's own policy, with the model's chat template.

    Args:
        source: folder or hub id of a Qwen3, Llama or Gemma-2, or folder of an adapter.
        packed: number format in which an adapter is computed over its base in four bits, as a run by
            `policy.tuning = "qlora"` does. If empty, the model is in float32, with the adapter merged.

    Raises:
        UserError: the model, or the base model that its adapter names, cannot be loaded.
    """

    def __init__(self, source: str, *, packed: str = "") -> None:
        adapter = Path(source) / "adapter_config.json"
        whole = str((read(adapter, dict[str, object]) or {}).get("base_model_name_or_path") or source)
        # Without training no step size is checked. The length of each prompt is checked when it is answered.
        bits = {"policy.tuning": "qlora", "policy.compute-dtype": packed} if packed else {}
        config = Config.load({"run.phases": "serve", "model": whole, "policy.max-sequence-length": 1, **bits})
        self._base = prepare(config, [])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from Transformers, about PEFT
            self._model = load_model(config, self._base.source, quantized=bool(packed))
            if adapter.exists():
                adapted = PeftModel.from_pretrained(self._model, source)
                round_once(adapted)  # as the policy was scored
                self._model = adapted.get_base_model() if packed else adapted.merge_and_unload()

    @torch.inference_mode()
    def answers(self, prompts: Sequence[str], *, answer_tokens: int) -> Iterator[str]:
        """Yield the greedily decoded answer to each prompt; UserError if one does not fit into the model's context."""
        ids = [self._base.ids(text) for text in prompts]
        for start in range(0, len(ids), BATCH):
            yield from decode(self._base, self._model, ids[start : start + BATCH], tokens=answer_tokens)


class Policy:
    """A run's trained policy, which answers questions outside of the run.

    It is in float32; by `policy.tuning = "qlora"` on its base in four bits, as it was scored.

    Raises:
        UserError: the run has no policy, or its base model is missing.
    """

    def __init__(self, run_folder: Path, config: Config) -> None:
        folder = run_folder / POLICY
        if not folder.is_dir():
            raise UserError(f"{run_folder}: has no {POLICY}/; only a run that has finished PPO leaves one")
        packed = config.policy.compute_dtype if config.policy.tuning == "qlora" else ""
        self._config, self._model = config, LocalModel(str(folder), packed=packed)

    def ask(self, question: str, options: Sequence[str]) -> Answer:
        """Answer a question with K options by greedy decoding.

        Raises:
            UserError: fewer than two options, or more than the survey formats allow.
        """
        if not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            raise UserError(f"options: {len(options)} given; a question needs {MIN_OPTIONS} to {MAX_OPTIONS}")
        config = self._config
        prompt = formats.prompt(config.task, question, options, style=config.prompt_style)
        (text,) = self._model.answers([prompt], answer_tokens=config.ppo.response_length)
        parsed = formats.parse(config.task, text, len(options))
        return Answer(text, parsed.prediction, parsed.format_score)


class Predictor:
    """A run's trained preference predictor, also for groups that were not in the run.

    Raises:
        UserError: the run has no predictor, or its survey is missing or has changed.
    """

    def __init__(self, run_folder: Path, config: Config) -> None:
        weights = run_folder / WEIGHTS_FILE
        if not weights.exists():
            raise UserError(f"{run_folder}: has no {WEIGHTS_FILE}; the run ended before PluralLLM was trained")
        here = run_folder.resolve()
        config = Config.load({**config.flat(), "run.output-dir": str(here.parent), "run-name": here.name})
        settings = config.pluralllm
        with threadpool_limits(1):  # as in a run: the number of threads may change the features
            self._catalogue = catalogue = build_catalogue(config)
        trained, _ = load(weights, config, catalogue, initial_weights(config))
        model = build(settings.architecture)
        model.load_state_dict(trained.to_torch_state_dict())
        self._predictor = GroupPredictor(model, catalogue, num_context=settings.num_context_questions, seed=config.seed)

    def predict(self, answers: Mapping[str, npt.ArrayLike]) -> pd.DataFrame:
        """Predict a group's answers to all questions of the run, from its answers to some, or to none.

        `answers` are shares by question id; each of these questions is predicted from the others. The default network
        predicts the mean over groups from fewer than two answers. The result has one row per question and option:
        `question` (its id), `text`, `option`, `share`.

        Raises:
            UserError: an unknown question, or shares that do not fit its options or do not sum to 1.
        """
        options = {question.question_id: question.options for question in self._catalogue.questions}
        shares = {name: np.asarray(share_K, dtype=np.float64) for name, share_K in answers.items()}
        for name, share_K in shares.items():
            if name not in options or share_K.shape != (len(options[name]),):
                wanted = f"has {len(options[name])} options" if name in options else "is none of the run's"
                raise UserError(f"answers: question '{name}' {wanted}")
            if not (share_K >= 0).all() or abs(share_K.sum() - 1.0) > SUM_TOLERANCE:
                raise UserError(f"answers: those to question '{name}' are no shares that sum to 1")
        normalized = {name: share_K / share_K.sum() for name, share_K in shares.items()}
        predicted_QK = self._predictor.targets(group_data(GROUP, normalized, public=self._catalogue))
        rows = [
            (question.question_id, question.text, option, share)
            for question, predicted_K in zip(self._catalogue.questions, predicted_QK, strict=True)
            for option, share in zip(question.options, predicted_K, strict=False)
        ]
        return pd.DataFrame(rows, columns=["question", "text", "option", "share"])
