"""Several processes as torchrun starts them, here two on the CPU: the weights of one process with the same batch, files written once."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from whet.errors import UsageError
from whet.network import Network, parse_type
from whet.training import FinetuneConfig, TrainingData, finetune
from whet.training.distributed import Workers, read_workers

HOW = {"epochs": 3, "batch": 32, "lr": 0.05, "device": "cpu", "batch_norms": "keep"}


def net():
    rng = np.random.default_rng(0)
    made = Network("small")
    x = made.add_input("x", parse_type("f32[N,6]"))
    w1, b1 = (made.constant(0.4 * rng.standard_normal(s).astype(np.float32), n) for s, n in (((16, 6), "w1"), ((16,), "b1")))
    y = made.add("Gemm", x, w1, b1, transB=1)
    w2 = made.constant(0.4 * rng.standard_normal((3, 16)).astype(np.float32), "w2")
    made.mark_output(made.add("Gemm", made.add("Relu", y), w2, transB=1), "y")
    return made


def data():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1000, 6)).astype(np.float32)
    return TrainingData({"x": x}, x[:, :3].argmax(1))


CODE = """
import os, sys, numpy as np, torch
sys.path.insert(0, {here!r})
from test_distributed import HOW, data, net
from whet.training import FinetuneConfig, finetune
torch.set_num_threads(1)
children = []
for rank in (0, 1):  # both have the libraries that this process imported; it has computed nothing, so that it has no threads
    children.append(os.fork())
    if children[-1] == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        done = finetune(net(), data(), FinetuneConfig(**HOW, accumulate={accumulate}, checkpoint={checkpoint!r}, log={log!r}))
        np.savez({out!r} + str(rank), **{{n: t.array() for n, t in done.network.constants.items()}})
        os._exit(0)
codes = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
sys.exit(str(codes) if any(codes) else 0)
"""


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_processes_train_as_one(accumulate, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    paths = {"checkpoint": str(tmp_path / "c.safetensors"), "log": str(tmp_path / "log.csv"), "out": str(tmp_path / "r")}
    code = CODE.format(here=os.path.dirname(__file__), accumulate=accumulate, **paths)
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **own}, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    one = finetune(net(), data(), FinetuneConfig(**HOW, accumulate=accumulate))
    found = [dict(np.load(tmp_path / f"r{rank}.npz")) for rank in range(2)]
    for name, t in one.network.constants.items():
        np.testing.assert_array_equal(found[0][name], found[1][name])
        np.testing.assert_allclose(found[0][name], t.array(), rtol=1e-4, atol=1e-5)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4


def test_each_process_has_its_share_of_a_batch(monkeypatch):
    at = torch.arange(7)
    parts = [Workers(rank, 3, rank).share(at).tolist() for rank in range(3)]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]]
    assert read_workers() == Workers()
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert read_workers() == Workers(1, 2, 1)
    assert not read_workers().first
    with pytest.raises(UsageError, match="batch=33 is shared by 2 processes"):
        finetune(net(), data(), FinetuneConfig(**{**HOW, "batch": 33}))
    with pytest.raises(UsageError, match="work in one process only"):
        finetune(net(), data(), FinetuneConfig(**HOW, seconds=5.0))
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UsageError, match="torchrun sets"):
        read_workers()
