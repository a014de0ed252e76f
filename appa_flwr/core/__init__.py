"""Basics for every package: errors, files, seeds, array types, Markdown tables. Imported by both sides."""
