"""What only the server knows: the policy, SFT, rollouts, PPO, strategies and checkpoints."""
