"""An engine file that somebody truncates while it is mapped: an EngineError, where reading the missing pages would end the process (SIGBUS)."""

import subprocess
import sys

import pytest

from whet.builder import BuildConfig, build
from whet.engine import write_engine
from whet.network import parse_network

TEXT = """
network large source
in %x: f32[1,64,8,8]
const %w: f32[512,64,3,3] = seed(1)
const %v: f32[64,512,1,1] = seed(2)
%a = Conv(%x, %w, pads=(1, 1, 1, 1))
%b = Relu(%a)
%y = Conv(%b, %v)
out %y
"""
USE = """
import os, sys, numpy as np, whet
from whet.engine import engine_bytes
from whet.errors import EngineError
path, moment, use = sys.argv[1:]
x = {"x": np.ones((1, 64, 8, 8), np.float32)}
engine = whet.Runtime().load(path)
if moment == "after a run":
    engine.create_context().run(x)
os.truncate(path, 4096)
try:
    if use == "run":
        engine.create_context().run(x)
    elif use == "save":
        engine_bytes(engine.plan)
    else:
        engine.refit({"w": np.ones((512, 64, 3, 3), np.float32)})
    print("done")
except EngineError as e:
    print("refused:", e)
"""


@pytest.mark.parametrize(("moment", "use"), [
    ("before a run", "run"), ("before a run", "save"), ("after a run", "run"), ("after a run", "save"), ("after a run", "refit"),
])  # fmt: skip
def test_a_truncated_file_is_an_error_and_no_crash(moment, use, tmp_path):
    write_engine(build(parse_network(TEXT), BuildConfig(optimization_level=0)), tmp_path / "large.engine")
    done = subprocess.run([sys.executable, "-c", USE, str(tmp_path / "large.engine"), moment, use], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    assert done.stdout.startswith("done" if (moment, use) == ("after a run", "run") else "refused: ") or use == "run", done.stdout
    if use != "run":
        assert "became shorter while it was open" in done.stdout
