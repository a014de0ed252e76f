"""Basics for every package: errors, files, seeds, Markdown tables. Both sides may enter."""
