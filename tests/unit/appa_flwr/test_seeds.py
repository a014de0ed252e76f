"""Named child seeds."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from appa_flwr.seeds import child_seed


def test_a_known_seed():
    # printf '0\037ppo' | sha256sum begins 6de6a8950640cccf; its first 63 bits are the seed
    assert child_seed(0, "ppo") == 0x6DE6A8950640CCCF // 2


def test_every_process_finds_the_same_seed():
    code = "from appa_flwr.seeds import child_seed; print(child_seed(3, 'context', 'Kenya', 7))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == child_seed(3, "context", "Kenya", 7)


def test_every_name_has_its_own_seed():
    calls = [
        (0,),
        (1,),
        (0, "a"),
        (0, "b"),
        (0, "a", "b"),
        (0, "ab"),
        (0, "b", "a"),
        (0, 1),
        (0, 1, 1),
        (0, 11),
        (10, 1),
    ]
    assert len({child_seed(*call) for call in calls}) == len(calls)


def test_seeds_spread_over_what_generators_take():
    seeds = [child_seed(seed, "x") for seed in range(500)]
    assert len(set(seeds)) == 500
    assert 0 <= min(seeds) < 2**57
    assert 2**63 - 2**57 < max(seeds) < 2**63
    # each of the 63 bits is set in about half of them: 250, standard deviation 11
    for bit in range(63):
        assert 190 < sum(seed >> bit & 1 for seed in seeds) < 310
    np.random.default_rng(max(seeds))
