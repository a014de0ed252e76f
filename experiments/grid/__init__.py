"""The paper's grid: many runs from one file, what they share made once, and their tables with intervals."""
