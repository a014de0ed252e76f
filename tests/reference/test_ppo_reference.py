"""Our PPO functions on a rollout of TRL 1.12's PPO trainer, tensor by tensor.

TRL's ways, which the masks below carry over: the policy counts tokens up to and including the end token; values and
per-token rewards count one token further, where there is room, and the score sits on that one; per-token rewards are
whitened without shifting their mean; a loss is the token mean of a micro-batch of 4.

Axis letters: J rollouts, T response tokens.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from server_app.policy import losses as ppo

RECORDED = Path(__file__).parent / "trl112_rollout.npz"  # the first rollout, with four of its micro-batches
GAMMA, LAMBDA, KL, CLIP, CLIP_VALUE = 1.0, 0.95, 0.05, 0.2, 0.2
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDED) as file:
        found = {key: torch.from_numpy(file[key]) for key in file.files}
    return found | {"policy_mask": ~found["padding_mask"], "value_mask": ~found["padding_mask_p1"]}


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_rewards(recorded):
    # some rows end early and some never do, so both places of the score are met
    assert {0, 1} == set((recorded["value_mask"].sum(1) - recorded["policy_mask"].sum(1)).tolist())
    shaped_JT = ppo.shaped_rewards(
        recorded["scores"], recorded["logprobs"], recorded["ref_logprobs"], recorded["value_mask"], kl_coefficient=KL
    )
    mean = ppo.masked_mean(shaped_JT, recorded["value_mask"])
    close(ppo.whiten(shaped_JT, recorded["value_mask"]) + mean * recorded["value_mask"], recorded["rewards"])


def test_advantages_and_returns(recorded):
    advantage_JT, return_JT = ppo.gae(
        recorded["rewards"], recorded["values"], recorded["value_mask"], gamma=GAMMA, gae_lambda=LAMBDA
    )
    close(return_JT, recorded["returns"])
    close(ppo.whiten(advantage_JT, recorded["policy_mask"]), recorded["advantages"])


def test_losses_of_every_micro_batch(recorded):
    found = []
    for m, rows in enumerate(recorded["micro_inds"]):
        policy, *_ = ppo.policy_loss(
            recorded["micro_new_logprobs"][m],
            recorded["logprobs"][rows],
            recorded["advantages"][rows],
            torch.ones_like(recorded["advantages"][rows]),
            recorded["policy_mask"][rows],
            clip_range=CLIP,
        )
        value = ppo.value_loss(
            recorded["micro_vpred"][m],
            recorded["values"][rows],
            recorded["returns"][rows],
            recorded["value_mask"][rows],
            clip_range=CLIP_VALUE,
        )
        # TRL divides the two by different counts
        policy_mean, value_mean = (
            policy / recorded["policy_mask"][rows].sum(),
            value / recorded["value_mask"][rows].sum(),
        )
        total = ppo.full_loss(policy=policy_mean, value=value_mean, num_tokens=1)
        found.append([policy_mean, value_mean, total])
    expected = torch.stack([recorded[f"micro_{name}"] for name in ("pg_loss", "vf_loss", "loss")], 1)
    close(torch.tensor(found), expected)
