"""Reward functions for verl, OpenRLHF and slime, which score one answer per call; docs/engines.md shows the setup.

The environment of the engine's workers names the served run: `APPA_URL`, `APPA_TOKEN`, and `APPA_RUN`, a name for the
training (default: the engine's name). Each answer gets an id, so that a repeated request is not a new answer. All
functions raise UserError if the service refuses an answer or does not reply.
"""

import asyncio
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from appa_flwr.core.errors import UserError
from appa_flwr.reward_client.client import RUN, Served

_ENDS = re.compile(r"(?:\s*<[^<>\s]{1,40}>)+\s*$")
"""Special tokens at the end of an answer, such as <|im_end|>, which OpenRLHF's decoding keeps."""


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, float]:
    """The function of verl's `reward.custom_reward_function`: the answer `solution_str` to question `ground_truth`.

    Returns "score", the reward in [0, 1], and its components "alignment" and "format"; verl logs all three.
    """
    reward, components = await _reward("verl", ground_truth, solution_str)
    return {"score": reward, **components}


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """The function of OpenRLHF's `--reward.remote_url FILE`, called in a thread for one answer.

    A query is the prompt followed by the answer, special tokens included; a label is the question_id. The result has
    the reward in [0, 1] as "rewards" and "scores", and its components as "extra_logs".

    Raises:
        UserError: see above; or the query does not contain its prompt, so that the answer cannot be identified.
    """
    (query,), (prompt,), (question_id,) = queries, prompts, labels
    _, there, answer = query.partition(prompt)
    if not there:
        raise UserError("the query does not contain its prompt; if the prompt was cut, raise max_len")
    reward, components = asyncio.run(_reward("openrlhf", question_id, _ENDS.sub("", answer)))
    return {"rewards": reward, "scores": reward, "extra_logs": components}


async def custom_rm(args: Any, sample: Any, **more: Any) -> float:
    """The function of slime's `--custom-rm-path`, without `--group-rm`; the sample's label is the question_id."""
    reward, _ = await _reward("slime", sample.label, sample.response)
    return reward


async def _reward(engine: str, question_id: str, completion: str) -> tuple[float, dict[str, float]]:
    """Score one answer; returns its reward and the components."""
    item = {"id": uuid.uuid4().hex, "question_id": question_id, "completion": completion}
    body = {"run": os.environ.get(RUN) or engine, "items": [item]}
    (scored,) = (await Served().ask("POST", "/v1/score", body))["items"]
    return scored["reward"], scored["components"]
