"""The paper's grid: many runs from one file, with shared parts made once, and tables with intervals."""
