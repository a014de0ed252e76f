"""Three groups that score five questions, three of them held out: what the server makes of their scores is tested."""

from __future__ import annotations

import numpy as np
from fake_groups import scoring_node
from fakes import catalogue_of, random_tables

GROUPS = ("A", "B", "C")
CATALOGUE = catalogue_of([2, 3, 4, 3, 5], train=[True, False, False, True, False])
TEST_J = np.array([1, 2, 4])
TABLES = random_tables(CATALOGUE.option_QK, GROUPS, seed=1)
"""Group -> its targets."""
TRUTHS = random_tables(CATALOGUE.option_QK, GROUPS, seed=2)
"""Group -> its survey answers."""
NODES = {g: scoring_node({name: TABLES[name]}, {name: TRUTHS[name]}) for g, name in enumerate(GROUPS)}
