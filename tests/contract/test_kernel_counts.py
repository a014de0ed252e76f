"""A GPU's work cannot creep up unseen: kernels and host waits of each phase are bounded, counted without a GPU."""

from __future__ import annotations

import pytest

from experiments.benchmarks import engine

BOUNDS = {  # kernels and waits, a few above what there are
    "gemma-2-2b": {"a token": (2_400, 0.2), "reference": (20_500, 18), "update": (31_700, 31)},
    "Llama-3.2-3B": {"a token": (1_600, 0.2), "reference": (16_200, 18), "update": (25_800, 31)},
    "Qwen3-0.6B": {"a token": (2_050, 0.2), "reference": (18_900, 18), "update": (30_700, 31)},
}


@pytest.mark.parametrize(
    "name", ["gemma-2-2b", *(pytest.param(name, marks=pytest.mark.long) for name in ("Llama-3.2-3B", "Qwen3-0.6B"))]
)
def test_kernels_and_waits_stay_below_their_bounds(name):
    (cell,) = [cell for cell in engine.paper_cells() if cell.varied == name and cell.work.shared_prefix]
    found = engine.count(cell)
    assert set(found.index) == set(BOUNDS[name])
    for phase, (kernels, waits) in BOUNDS[name].items():
        assert 0.5 * kernels < found.loc[phase, "kernels"] <= kernels  # far fewer: the bound is to be lowered
        assert found.loc[phase, "waits"] <= waits
