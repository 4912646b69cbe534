"""Mutated engine files, a seeded part of what benchmarks/fuzz_engine.py tries: EngineError, or a good engine with the same answers; nothing else."""

import random

import pytest
from corpus import family_engines
from mutants import EDITS, RAW, SAME_ANSWERS, assemble, mutant, sections_of
from trial import answers_of, attempt, base_engines, refuse_marked_configs

from support.selection import with_long_variants


@pytest.fixture(scope="module")
def bases():
    return base_engines()


@pytest.fixture(scope="module")
def corpus(bases):
    """Engines of whole networks, and of one tactic of every family of both backends; with their answers."""
    with pytest.MonkeyPatch.context() as patch:
        engines = [*bases, *family_engines(patch, per_family=1).values()]
        refuse_marked_configs(patch)
        yield {data: answers_of(data) for data in engines}


def test_the_good_ones_run(bases, corpus):
    assert [attempt(b) for b in bases] == ["opened and ran"] * len(bases)
    assert {attempt(data, answers) for data, answers in corpus.items()} == {"opened and ran"}
    assert assemble(sections_of(bases[0])) == bases[0]


@pytest.mark.parametrize("block", with_long_variants(range(8), every=8))
def test_mutants(corpus, block):
    """500 files each; for more than 10,000 there is benchmarks/fuzz_engine.py."""
    engines = list(corpus)
    for seed in range(500 * block, 500 * block + 500):
        kind, data, base = mutant(seed, engines)
        outcome = attempt(data, corpus[base] if kind in SAME_ANSWERS else None)
        assert not outcome.startswith("BAD"), (seed, kind, outcome)
        if kind in RAW and data != base:
            assert outcome.startswith("refused"), (seed, kind, outcome)


@pytest.mark.parametrize("kind", sorted(EDITS))
def test_edits_reach_checks_beyond_the_checksums(bases, kind):
    """If all files of a kind of edit were refused for a checksum, it would not test anything deeper."""
    reasons = {attempt(EDITS[kind](random.Random(s), bases[0])) for s in range(12)}
    assert any("its digest does not match" not in r for r in reasons), reasons
