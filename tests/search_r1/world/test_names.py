import random

import pytest

from search_r1.world.names import FINAL_SYLLABLES, INITIAL_SYLLABLES, SPLIT_SHARES, NamePool, split_of, stems_of


def test_splits_partition_all_stems():
    by_split = {split: set(stems_of(split)) for split in SPLIT_SHARES}
    n_possible = len(INITIAL_SYLLABLES) * len(FINAL_SYLLABLES)
    assert sum(len(stems) for stems in by_split.values()) == n_possible - 1  # "Lake" is reserved
    assert len(set().union(*by_split.values())) == n_possible - 1


def test_shares_are_respected():
    n_possible = len(INITIAL_SYLLABLES) * len(FINAL_SYLLABLES)
    for split, share in SPLIT_SHARES.items():
        assert len(stems_of(split)) / n_possible == pytest.approx(share / 100, abs=0.02)


def test_owner_of_a_stem_is_frozen():
    # crc32 modulo 100 is 0, 30 and 91: a moved stem would leak from one split into another.
    assert (split_of("Befi"), split_of("Torvan"), split_of("Zulo")) == ("test", "train", "practice")


def test_pool_draws_without_replacement_until_exhausted():
    pool = NamePool("dev", random.Random(0))
    n = len(stems_of("dev"))
    assert len({pool.draw() for _ in range(n)}) == n
    with pytest.raises(IndexError, match="exhausted"):
        pool.draw()


def test_unknown_split_lists_the_known_ones():
    with pytest.raises(KeyError, match="practice"):
        stems_of("validation")
