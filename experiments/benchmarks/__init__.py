"""Time and memory: our PPO engine alone and beside TRL, PluralLLM, Flower's messages, many groups."""
