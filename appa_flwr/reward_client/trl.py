"""The groups' rewards for TRL's `GRPOTrainer` and `RLOOTrainer`, from a served run, in one training process or many."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from appa_flwr.core.errors import UserError
from appa_flwr.reward_client.client import Served

Completion = str | Sequence[Mapping[str, Any]]
"""Plain text, or the messages of a conversation."""

CALLS_A_STEP = 1000
"""A round's number is made of the trainer's step and the call in it, since evaluation calls at the same step."""


class RemoteGroupRewards:
    """A reward function that asks a served run; every call, over all processes, is one round of its rule.

    The data set names each row's question in a column `question_id`, as `appa export prompts` writes it:

        rewards = RemoteGroupRewards("http://127.0.0.1:9200", token)
        GRPOTrainer(model, rewards.group_reward, GRPOConfig(...), dataset).train()

    If a trainer resumes from a checkpoint, the rule's state goes back to the checkpoint's step. `run` is a name for
    this training; concurrent trainings need different names. The other arguments are those of `Served`.
    """

    def __init__(self, url: str = "", token: str = "", *, run: str = "trl", patience: float = 3600.0) -> None:
        self._served, self._run = Served(url, token, patience=patience), run
        self._first: int | None = None
        self._step, self._calls = -1, 0

    # A method instead of `__call__`, since TRL before 1.16 does not detect an async `__call__`.
    async def group_reward(
        self,
        prompts: Sequence[object],
        completions: Sequence[Completion],
        question_id: Sequence[str] | None = None,
        trainer_state: Any = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: object,
    ) -> list[float]:
        """Compute the aggregated reward in [0, 1] of every completion; TRL's trainers call this method.

        Completions are texts or conversations, of which the last message counts; `question_id` is a column of the data
        set. The step of `trainer_state` numbers the rounds. `log_metric` receives the round's fairness index, format
        score, weights and groups' mean rewards, `log_extra` each completion's components.

        Raises:
            UserError: no column `question_id`, or the service refuses the request or does not answer.
        """
        if question_id is None:
            raise UserError("the data set has no column question_id, which names the question of each prompt")
        number = self._next_round(getattr(trainer_state, "global_step", None))
        if self._first is None:
            self._first = number
        part, parts = _process()
        items = [
            {"id": f"{number}/{place:06}", "question_id": name, "completion": _text(completion)}
            for place, (name, completion) in enumerate(
                zip(question_id, completions, strict=True), start=part * len(completions)
            )
        ]
        asked = {"run": self._run, "round": number, "resumed": number == self._first}
        scored = await self._served.ask("POST", "/v1/score", {**asked, "size": parts * len(items), "items": items})
        if log_metric is not None:
            for name, value in scored["metrics"].items():
                if value is not None:
                    log_metric(f"group_reward/{name}", float(value))
        if log_extra is not None:
            for name in ("alignment", "format"):
                log_extra(name, [item["components"][name] for item in scored["items"]])
        return [item["reward"] for item in scored["items"]]

    def _next_round(self, step: int | None) -> int:
        step = self._step + 1 if step is None else step
        self._step, self._calls = step, self._calls + 1 if step == self._step else 0
        return step * CALLS_A_STEP + self._calls + 1


def _process() -> tuple[int, int]:
    """This process's index and the number of processes, from torch or its launcher."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _text(completion: Completion) -> str:
    """Text of a completion: the text, or the last message's content, which may be a list of parts."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
