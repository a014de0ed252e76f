"""The policy: its base, SFT, log-probabilities, sampling and PPO. `federation` alone talks to the groups."""
