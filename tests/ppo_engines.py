"""Small PPO engines in double precision, whose updates can be compared to the last digits."""

from __future__ import annotations

import torch
from fakes import PREFIX, PROMPTS, WIDE_WINDOW, tiny_causal_lm

from appa_flwr.config.sections import PPOSection
from server_app.policy.models import FullModels, LoraModels
from server_app.policy.ppo import PPOEngine

SETTINGS = PPOSection(
    learning_rate=1e-3,
    num_mini_batches=2,
    micro_batch_tokens=1000,
    epochs=2,
    baseline="value",
    response_length=6,
    temperature=0.9,
    answers_per_question=1,
)
STOPS = tuple(range(1, 12))
EPSILON = 1e-2
"""Adam's, large beside the models' gradients, which are cut to a norm of 1 or less.

The norms of the models and some positions are float32 whatever the weights are, so two ways to one gradient, or two
processors, differ in it by some 1e-7. At Adam's own 1e-8 a gradient that small takes a whole step either way; here two
steps differ by step size x difference / EPSILON, some 2e-8 for each of the four.
"""
BATCH = PROMPTS * 3
LONG_BATCH = [PREFIX + prompt for prompt in BATCH]


def make(tuning="full", *, vocabulary=61, **changes):
    # Double precision, and an Adam that does not turn a vanishing gradient's rounding error into a whole step.
    num_iterations = changes.pop("num_iterations", 10**6)  # so many that the step size stays as it is
    assert changes.keys() <= PPOSection.model_fields.keys()
    settings = SETTINGS.model_copy(update=changes)
    model = tiny_causal_lm(vocabulary=vocabulary, window=WIDE_WINDOW).double()
    if tuning == "full":
        models = FullModels(model, value=settings.baseline == "value")
    else:
        torch.manual_seed(4)
        models = LoraModels(model, rank=2, targets=["q_proj", "v_proj"], value=settings.baseline == "value")
    stops = STOPS if vocabulary > len(STOPS) else (1,)
    engine = PPOEngine(
        models,
        settings,
        num_iterations=num_iterations,
        stop_ids=stops,
        seed=7,
    )
    for group in engine._optimizer.param_groups:
        group["eps"] = EPSILON
    return engine


def iterate(engine, score_J, times=1, prompts=BATCH):
    for _ in range(times):
        rollout = engine.rollout(prompts)
        stats = engine.update(rollout, engine.reference_pass(rollout.sequences), score_J)
    return stats


def weights(engine):
    parameters = engine.models.policy_parameters + engine.models.value_parameters
    return torch.cat([p.detach().flatten() for p in parameters])


def some_scores():
    return torch.rand(len(BATCH), generator=torch.Generator().manual_seed(1))
