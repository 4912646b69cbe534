"""Models and engines above 2 GiB, the most that one protobuf message holds: the weights are in external files, an engine file has no such limit."""

import os
import shutil

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

import whet
from whet.errors import FrontendError
from whet.frontends import check_file, network_from_onnx

WIDTH, LAYERS = 8192, 9  # weights of 256 MiB each
NEEDED = 8 * 2**30  # bytes of disk, and of memory: 2.3 GB for the weights and as much for the engine file, and what the build needs


def write_layers(folder, files):
    """m.onnx with LAYERS products and Relus, its weights in `files` files; returns its output for the input `x` of ones, in float64."""
    inits, nodes, value, name = [], [], np.ones((1, WIDTH)), "x"
    first = (np.random.default_rng(0).standard_normal((WIDTH, WIDTH), dtype=np.float32) * np.float32((2 / WIDTH) ** 0.5)).astype("<f4")
    for i in range(LAYERS):
        block = np.roll(first, i, axis=0)
        t = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH], data_location=TensorProto.EXTERNAL)
        location = f"w{i % files}.bin"
        with open(folder / location, "ab") as f:
            for key, v in (("location", location), ("offset", str(f.tell())), ("length", str(block.nbytes))):
                t.external_data.add(key=key, value=v)
            f.write(block.tobytes())
        inits.append(t)
        nodes += [helper.make_node("MatMul", [name, t.name], [f"h{i}"]), helper.make_node("Relu", [f"h{i}"], [f"r{i}"])]
        name, value = f"r{i}", np.maximum(sum(value[:, j : j + 1024] @ block[j : j + 1024].astype(np.float64) for j in range(0, WIDTH, 1024)), 0)
    infos = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, WIDTH))] for n in ("x", name)]
    graph = helper.make_graph(nodes, "large", *infos, inits)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "m.onnx")
    return value


@pytest.mark.slow
def test_a_model_above_2_gib_builds_runs_and_reads_back(tmp_path):
    if shutil.disk_usage(tmp_path).free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of disk")
    if psutil.virtual_memory().available < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of memory")
    want, x = write_layers(tmp_path, files=3), np.ones((1, WIDTH), np.float32)
    options = {"optimization_level": 0, "threads": 1, "timing_cache": "", "progress": whet.builder.Silent(), "verify": False}  # compared below
    with whet.build(tmp_path / "m.onnx", **options) as engine:
        np.testing.assert_allclose(engine(x), want, rtol=1e-3, atol=1e-4 * want.max())
        engine.save(tmp_path / "m.engine")
    assert os.path.getsize(tmp_path / "m.engine") > 2**31
    with whet.load(tmp_path / "m.engine") as engine:
        np.testing.assert_allclose(engine(x), want, rtol=1e-3, atol=1e-4 * want.max())


def test_a_file_above_the_limit_of_protobuf_says_so(tmp_path):
    with open(tmp_path / "m.onnx", "wb") as f:
        f.truncate(2**31 + 8)  # sparse: no disk is used
    for read in (network_from_onnx, check_file, whet.build):
        with pytest.raises(FrontendError, match=r"2147483656 bytes; a protobuf message has at most 2147483647. Save it again with external data"):
            read(tmp_path / "m.onnx")
