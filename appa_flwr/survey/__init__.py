"""Surveys: the in-memory type, readers, the generated population, the split and the export. Imported by both sides."""
