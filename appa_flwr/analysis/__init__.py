"""Aggregation rules, fairness, scores, ceilings, group differences: for server and researchers, never for groups."""
