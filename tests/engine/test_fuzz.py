"""Mutated engine files, a seeded sample of benchmarks/fuzz_engine.py: each raises EngineError or gives a good engine."""

import pytest
from mutants import EDITS, RAW, assemble, mutant, sections_of
from trial import attempt, base_engines


@pytest.fixture(scope="module")
def bases():
    return base_engines()


def test_the_good_ones_run(bases):
    assert [attempt(b) for b in bases] == ["opened and ran"] * len(bases)
    assert assemble(sections_of(bases[0])) == bases[0]


@pytest.mark.parametrize("block", range(8))
def test_mutants(bases, block):
    for seed in range(100 * block, 100 * block + 100):
        kind, data, base = mutant(seed, bases)
        outcome = attempt(data)
        assert not outcome.startswith("BAD"), (seed, kind, outcome)
        if kind in RAW and data != base:
            assert outcome.startswith("refused"), (seed, kind, outcome)


@pytest.mark.parametrize("kind", sorted(EDITS))
def test_edits_reach_checks_beyond_the_checksums(bases, kind):
    """A kind of edit whose files are all refused for a checksum would not test anything deeper."""
    import random

    reasons = {attempt(EDITS[kind](random.Random(s), bases[0])) for s in range(12)}
    assert any("its digest does not match" not in r for r in reasons), reasons
