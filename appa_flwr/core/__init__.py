"""Basics for every package: errors, files, seeds, Markdown tables. Imported by both sides."""
