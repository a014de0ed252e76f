"""Named child seeds."""

from appa_flwr.core.seeds import child_seed


def test_a_known_seed():
    # printf '0\037ppo' | sha256sum begins 6de6a8950640cccf; its first 63 bits are the seed
    assert child_seed(0, "ppo") == 0x6DE6A8950640CCCF // 2
