"""Opening an engine imports the modules of its own tactics only."""

import json
import os
import subprocess
import sys

import pytest

from whet.tactics import TACTICS, list_modules, load_tactics

_LOAD = """
import json, sys
from whet.tactics import TACTICS, load_tactic
load_tactic(sys.argv[1])
print(json.dumps([n for n in TACTICS if n.startswith("cpu/")]))
"""


def names_after(name):
    done = subprocess.run([sys.executable, "-c", _LOAD, name], capture_output=True, text=True, check=True, env=dict(os.environ))
    return json.loads(done.stdout)


def test_one_tactic_is_imported_without_the_others():
    assert names_after("cpu/onednn_conv") == ["cpu/onednn_conv"]


def test_a_name_without_a_file_imports_all():
    load_tactics("cpu")
    assert set(names_after("cpu/of_a_plugin")) == {n for n, t in TACTICS.items() if type(t).__module__.startswith("whet.tactics.cpu.")}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_tactic_is_found_by_its_name(backend):
    load_tactics(backend)
    for name, t in TACTICS.items():
        if type(t).__module__.startswith(f"whet.tactics.{backend}."):
            assert list_modules(backend)[name.partition("/")[2]] == type(t).__module__
