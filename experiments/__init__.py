"""The paper's grid, ablations, comparisons and benchmarks."""
