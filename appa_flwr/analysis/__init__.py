"""Aggregation rules, fairness, scores, ceilings, stakes: for server and researchers, no group may enter."""
