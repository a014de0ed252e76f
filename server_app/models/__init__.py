"""The language model: its base, its supervised fine-tuning, the adapters on it and the card that goes with it."""
