"""The groups' rewards for verl, from a served run: the file of `reward.custom_reward_function.path`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from appa_flwr.trainers.client import Served


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str | None = None,
    token: str | None = None,
    run: str = "verl",
    **more: Any,
) -> dict[str, Any]:
    """One answer's reward; `url`, `token` and `run` come by verl's `reward_kwargs`.

    Args:
        data_source: not looked at.
        solution_str: the answer.
        ground_truth: the question_id.
        extra_info: not looked at.
        url: see `appa_flwr.trainers.client.Served`, as is `token`.
        token: the bearer token.
        run: a name for this training.
        **more: whatever else verl hands over.

    Raises:
        UserError: the service refuses the answer, or does not reply.
    """
    item = {"id": uuid.uuid4().hex, "question_id": ground_truth, "completion": solution_str}
    scored = await Served(url, token).ask("POST", "/v1/score", {"run": run, "items": [item]})
    assert scored is not None
    return {"score": scored["items"][0]["reward"], **scored["items"][0]["components"]}
