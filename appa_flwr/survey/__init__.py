"""Surveys: the in-memory type, readers, the generated population, the split and the export. Imported by both sides.

Axis letters: G groups, Q questions, K answer options, R respondents.
"""
