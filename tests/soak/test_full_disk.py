"""Every writer on a full disk: whet's error that names the file, no partial file, and the file that was there before unchanged.

The limit of a file's size (RLIMIT_FSIZE) makes a write fail in the middle, as a full disk does, with EFBIG in place of ENOSPC.
"""

import json
import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import whet
from whet.builder import BuildConfig, build, save_lock
from whet.cli import exec as exec_command
from whet.cli import run as run_command
from whet.cli._summary import Log
from whet.errors import WhetError
from whet.network import Network, parse_type


@contextmanager
def full_disk(most: int = 2000):
    """Files of this process cannot grow beyond `most` bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="module")
def net():
    made = Network("wide")
    x = made.add_input("x", parse_type("f32[1,64]"))
    weight = made.constant(np.random.default_rng(0).standard_normal((64, 64)).astype("f4"), "w")
    made.mark_output(made.add("Relu", made.add("MatMul", x, weight)), "y")
    return made


@pytest.fixture(scope="module")
def plan(net):
    return build(net, BuildConfig(timing_cache="", optimization_level=0))


WRITERS = {
    "engine": lambda path, net, plan: whet.write_engine(plan, path),
    "lock": lambda path, net, plan: save_lock(plan, path),
    "onnx": lambda path, net, plan: whet.save_onnx(net, path),
    "export": lambda path, net, plan: exec_command.write_text_file(path, "x" * 10000, Log(quiet=True)),
    "values": lambda path, net, plan: run_command.save_compared_values(str(path), ({"y": np.ones(4000)}, {"y": np.ones(4000)})),
}


@pytest.mark.parametrize("before", [b"what was there", None])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_on_a_full_disk(writer, before, net, plan, tmp_path):
    path = tmp_path / ("out.npz" if writer == "values" else "out")
    if before is not None:
        path.write_bytes(before)
    with full_disk(), pytest.raises((WhetError, OSError)) as e:
        WRITERS[writer](path, net, plan)
    assert str(path) in str(e.value) or str(path) in str(getattr(e.value, "filename", ""))
    assert [p.name for p in tmp_path.iterdir()] == ([path.name] if before is not None else [])
    if before is not None:
        assert path.read_bytes() == before
    WRITERS[writer](path, net, plan)
    assert path.stat().st_size > 2000


def test_a_build_whose_timing_cache_cannot_grow_is_not_harmed(net, tmp_path):
    cache = tmp_path / "t.cache"
    said = []
    with full_disk(4096):
        try:
            build(net, BuildConfig(timing_cache=str(cache), avg_timing=1, whole_engines=1))
        except WhetError as e:
            said.append(str(e))
    assert all(str(cache) in text for text in said)
    build(net, BuildConfig(timing_cache=str(cache), avg_timing=1, whole_engines=1))


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser can write everywhere")
def test_a_read_only_cache_folder_is_no_error(net, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    build(net, BuildConfig(timing_cache=str(folder / "t.cache"), avg_timing=1, whole_engines=1))


def test_the_limit_is_there(tmp_path):
    with full_disk(), pytest.raises(OSError, match="File too large"):
        Path(tmp_path / "x").write_text(json.dumps(list(range(10000))))
