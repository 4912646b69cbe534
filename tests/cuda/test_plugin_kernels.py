"""A plugin package's kernels (CUDA C++, and Triton where it is installed) on the GPU."""

import importlib.util

import pytest

from support.plugin_package import OP, install, model, run


@pytest.mark.gpu
def test_plugin_kernels_agree_with_the_reference_and_are_built(gpu, tmp_path):
    (tmp_path / "site").mkdir()
    installed = install(tmp_path / "site")
    (tmp_path / "m.onnx").write_bytes(model())
    code = f"""
import numpy as np, whet
from whet.plugins import check_samples
print(sorted({{c.tactic for c in check_samples({OP!r}, backend="cuda")}}))
engine = whet.build({str(tmp_path / "m.onnx")!r}, shapes={{"x": (2, 3, 12, 10)}}, backend="cuda")
x = np.random.default_rng(1).standard_normal((2, 3, 12, 10)).astype("f4")
from whet.ops import run_network
want = run_network(whet.network_from_onnx({str(tmp_path / "m.onnx")!r}), {{"x": x}})["y"]
print(float(np.abs(np.asarray(engine(x)) - want).max() / np.abs(want).max()))
"""
    out = run(code, installed).stdout.splitlines()
    assert "cuda/whet_deformable.gather" in out[0]
    assert ("cuda/whet_deformable.triton" in out[0]) == (importlib.util.find_spec("triton") is not None)
    assert float(out[1]) < 2e-3  # TF32 convolutions around it
