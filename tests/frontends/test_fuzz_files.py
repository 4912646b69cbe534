"""Mutated models and data files, a seeded part of the mutants of benchmarks/fuzz_files.py: whet's errors or a file that is read; nothing else."""

import json
import random
import warnings
from pathlib import Path

import pytest
from google.protobuf.message import Message
from test_onnx_fuzz import seeds

from support import datasets, mutations
from whet.errors import WhetError

FILES_PER_KIND = 12


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "case"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        from fuzz_files import Targets

        return Targets(folder, infer_types=False)  # a process per file would use up the time


def test_mutated_files(targets):
    kinds = ["onnx", "cache", "lock", "recipe", "auto", "table", "calibration", *(["caffe"] if datasets.root() else [])]
    tried = read = 0
    while tried < FILES_PER_KIND * len(kinds):
        rng = random.Random(tried)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                targets.attempt(kinds[tried % len(kinds)], rng)
                read += 1
            except WhetError:
                pass
        tried += 1
    assert 0 < read < tried


def test_mutations_are_reproducible_and_reach_every_level():
    model = list(seeds())[2]
    made = [mutations.mutate_message(random.Random(k), model).SerializeToString() for k in range(200)]
    assert made == [mutations.mutate_message(random.Random(k), model).SerializeToString() for k in range(200)]
    original = model.SerializeToString()
    assert sum(m != original for m in made) > 150
    assert isinstance(model, Message)
    tree = {"a": [1, 2, {"b": 3}], "c": "d"}
    texts = {mutations.mutate_json(random.Random(k), tree) for k in range(100)}
    assert len(texts) > 50
    assert tree == {"a": [1, 2, {"b": 3}], "c": "d"}
    assert any(isinstance(json.loads(t), dict) and json.loads(t).get("c") == "d" for t in texts)
