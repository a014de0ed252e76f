"""PluralLLM's phases on the server: pretraining, sums over groups, scores."""
