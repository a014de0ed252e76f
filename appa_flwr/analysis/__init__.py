"""Aggregation rules, fairness, scores, ceilings, group differences: for server and researchers, no group may enter."""
