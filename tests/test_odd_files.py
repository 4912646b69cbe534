"""Readers of files, given files that nobody means to give: whet's error in one line that names the file, in seconds, without a flood of memory."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="two of the readers read training data and checkpoints: they need the extra 'train'")
import whet
from whet.array_files import read_arrays
from whet.builder.lock.lock import read_lock
from whet.cli._infer import read_input_file
from whet.engine import read_engine
from whet.errors import CalibrationError, WhetError
from whet.frontends import check_onnx, network_from_caffe, network_from_file, network_from_onnx
from whet.network import parse_network
from whet.precision.cache import read_cache
from whet.pruning import load_recipe as load_pruning
from whet.pruning.latency_table import LatencyTable
from whet.runtime.shape_trace import read_trace
from whet.search import load_recipe
from whet.search.recipe.data import load_labelled, load_unlabelled
from whet.sparsity.patterns import read_template
from whet.training.checkpoint import read_state
from whet.training.data import read_training_data

NET = parse_network("network n source\nin %x: f32[N,4]\nconst %w: f32[4,4] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n")

READERS = {
    "onnx": (".onnx", network_from_onnx),
    "check": (".onnx", check_onnx),
    "caffe": (".prototxt", network_from_caffe),
    "file": (".bin", network_from_file),
    "engine": (".engine", read_engine),
    "load": (".engine", whet.load),
    "trace": (".json", read_trace),
    "training data": (".npz", lambda p: read_training_data(str(p), NET)),
    "checkpoint": (".pt", read_state),
    "calibration": (".cache", lambda p: read_cache(p, NET)),
    "pruning": (".json", load_pruning),
    "latency": (".json", LatencyTable),
    "recipe": (".yaml", load_recipe),
    "samples": (".npz", lambda p: load_unlabelled(str(p), NET, 10)),
    "labels": (".csv", lambda p: load_labelled(str(p), NET, "the data")),
    "template": (".yaml", read_template),
    "lock": (".json", read_lock),
    "input": (".bin", lambda p: read_input_file(Path(p), "x", (1, 4), np.dtype("f4"))),
    "arrays": (".npy", lambda p: read_arrays(p, CalibrationError)),
}
CONTENTS = {
    "empty": b"",
    "zeros": bytes(5000),
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "long integer": b'{"format": 1, "a": ' + b"9" * 100_000 + b"}",
    "no numbers": b'{"format": NaN, "version": Infinity}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "Latin-1": b'{"a": "\xe9"}',
    "list": b"[]",
    "text": b'"x"',
    "null": b"null",
    "surrogate": b'{"a": "\\ud800"}',
    "a long line": b"a," * 1_000_000,
    "aliases": b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(12)),
    "code": b"!!python/object/apply:os.system ['touch executed']\n",
    "a list of itself": b"&a [*a]\n",
}


def make_file(kind, ending, folder):
    path = folder / f"given{ending}"
    if kind in CONTENTS:
        path.write_bytes(CONTENTS[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "long name":
        return folder / ("given" + "n" * 300 + ending)
    elif kind == "null character":
        return f"{folder}/given\0{ending}"
    elif kind == "endless device":
        return "/dev/zero"
    return path


@pytest.fixture
def limited():
    """4 GiB of address space more than there is, and 30 seconds."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (4 << 30), before[1]))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("longer than 30 seconds"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_refuses_odd_files_by_name(reader, limited, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ending, read = READERS[reader]
    kinds = [*CONTENTS, "missing", "folder", "link to itself", "long name", "null character", "endless device"]
    for kind in kinds if reader != "latency" else [k for k in kinds if k != "missing"]:  # a table that is new is no error
        (folder := tmp_path / kind.replace(" ", "_")).mkdir()
        path = make_file(kind, ending, folder)
        try:
            read(path)
        except WhetError as e:
            said = str(e)
        else:
            pytest.fail(f"{kind}: it was read")
        assert ("zero" if kind == "endless device" else "given") in said, (kind, said[:300])
        assert len(said) < 1500, (kind, len(said))
        assert "\n" not in said, (kind, said[:300])
    assert not os.path.exists("executed")
