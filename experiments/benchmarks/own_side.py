"""Our PPO engine on a workload; the counterpart of `trl_side`.

    python -m experiments.benchmarks.own_side WORKLOAD.json RESULT.json

Axis letters: J rollouts, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from appa_flwr.config import Config, Scalar
from experiments.benchmarks import workload as plan
from experiments.benchmarks.measure import Measured, Recorder, main
from experiments.benchmarks.workload import EOS_ID, PAD_ID, Workload
from server_app.models.base import load_model
from server_app.models.policy import ppo_models
from server_app.ppo.engine import PPOEngine

KEYS: dict[str, Scalar] = {
    "policy.tuning": "lora",
    "lora.rank": plan.LORA_RANK,
    "lora.alpha": plan.LORA_ALPHA,
    "lora.policy-targets": ",".join(plan.LORA_TARGETS),
    "lora.value-targets": ",".join(plan.LORA_TARGETS),
    "ppo.epochs": plan.PPO_EPOCHS,
    "ppo.num-mini-batches": 1,  # as many optimizer steps as TRL really takes
    "rollout.temperature": plan.TEMPERATURE,
    "ppo.learning-rate": plan.LEARNING_RATE,
    "ppo.value-learning-rate": plan.LEARNING_RATE,
    "ppo.scheduler": "linear",
}
"""What differs from our run config's defaults."""


@contextmanager
def keeping_to_plan(model: PreTrainedModel, *, ends: bool) -> Iterator[None]:
    """While it lasts, one rollout from the model ends each row where the workload says.

    It watches which positions go into the decoder and changes the logits that come out of the head, once a token, and
    needs to know nothing of how the engine orders, splits or shortens its rows. The prompt's pass may leave the
    positions to the model: they are not needed before an answer may end.
    """
    position_J, number = torch.empty(0), 0

    def before_decoder(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal position_J
        if kwargs.get("position_ids") is not None:
            position_J = kwargs["position_ids"][:, -1] + 2  # counted from 0, and of the token before

    def after_head(_: Any, args: tuple[Any, ...], logits: Tensor) -> None:
        nonlocal number
        number += 1
        plan.steer(logits if logits.ndim == 2 else logits[:, -1], position_J, number=number, ends=ends)

    hooks = [
        model.base_model.register_forward_pre_hook(before_decoder, with_kwargs=True),
        model.get_output_embeddings().register_forward_hook(after_head),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def make_engine(workload: Workload) -> PPOEngine:
    """The engine as a run with these keys would build it."""
    config = Config.load({**KEYS, "rollout.response-length": workload.response_length, **workload.config})
    model = load_model(config, workload.model, quantized=config.policy.quantization == "nf4")
    return PPOEngine(
        ppo_models(config, model),
        config.ppo,
        config.rollout,
        num_iterations=len(workload.batches),
        stop_ids=[EOS_ID],
        pad_id=PAD_ID,
        seed=workload.seed,
    )


def measure(workload: Workload) -> Measured:
    """Run the workload's updates.

    Raises:
        RuntimeError: answers have other lengths than planned.
    """
    torch.manual_seed(workload.seed)
    engine = make_engine(workload)
    recorder = Recorder(workload, [engine.models.policy_parameters(), engine.models.value_parameters()])
    hook = register_optimizer_step_post_hook(recorder.count_step)
    phase = recorder.stopwatch.phase
    recorder.start()
    for prompts in workload.batches:
        with phase("rollout"), keeping_to_plan(engine.models.policy(), ends=workload.ends):
            rollout = engine.rollout(prompts)
        with phase("reference"):
            reference = engine.reference_pass(rollout.sequences)
        with phase("update"):
            engine.update(rollout, reference, plan.even_share(rollout.sequences.response_JT, rollout.sequences.mask_JT))
        recorder.close(rollout.sequences.mask_JT.sum(1).tolist())
    hook.remove()
    return recorder.measured("torch", "transformers", "peft")


if __name__ == "__main__":
    main(measure)
