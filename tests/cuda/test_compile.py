"""Kernels compile for Hopper without a GPU, and their machine code is what was meant: tensor cores, bulk copies, no spills."""

import re
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import compile as compiler
from whet.backends.cuda.compile import compile_cubin
from whet.errors import BackendError
from whet.tactics.cuda._conv import ConvShape, conv_configs, conv_source
from whet.tactics.cuda._conv_config import ConvConfig, configs_for
from whet.tactics.cuda._source import ACTIVATIONS, source

try:
    compiler.nvrtc()
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

# wgs, mi, bn, ...: each way through the kernel at least once
CONVS = [
    (ConvConfig(1, 1, 32, stages=4, sk=4), True, "clip", False, False),
    (ConvConfig(1, 1, 16, stages=8, sk=8), False, "clip", True, False),
    (ConvConfig(1, 1, 64, stages=6, direct=1), True, "silu", False, False),
    (ConvConfig(1, 1, 64, stages=6, direct=1), False, "clip", False, True),
    (ConvConfig(1, 1, 32, stages=9, sk=4, halo=1), False, "clip", False, False),
    (ConvConfig(2, 1, 64, stages=6, direct=1, halo=2), False, "hardswish", True, False),
    (ConvConfig(3, 1, 128, stages=4), True, "clip", False, False),
    (ConvConfig(2, 2, 128, stages=3), False, "gelu", False, False),
    (ConvConfig(2, 1, 256, stages=3), True, "clip", False, False),
    (ConvConfig(1, 2, 64, stages=2, blocks=3), False, "clip", False, False),
    (ConvConfig(2, 1, 32, bk=32, stages=4, blocks=2), True, "leaky_relu", False, False),
    (ConvConfig(1, 1, 16, bk=16, stages=4, direct=1), True, "clip", False, False),
]
OTHERS = [
    ("first.cu", {"C": 3, "R": 7, "TAPS": 8, "STRIDE_H": 2, "STRIDE_W": 2, "TH": 8, "TW": 16, "BLOCKS": 2, "BN": 64, "FROM": 0, "NHWC": 0, "ACT": 0,
                  "BF16": 0}),
    ("depthwise.cu", {"TYPE": 1, "R": 3, "S": 3, "STRIDE": 2, "WIDE": 2, "TALL": 4, "ACT": 0}),
    ("depthwise.cu", {"TYPE": 0, "R": 5, "S": 5, "STRIDE": 1, "WIDE": 1, "TALL": 1, "ACT": 1}),
    ("pool.cu", {"TYPE": 1, "MAX": 1, "R": 3, "S": 3}),
    ("pool.cu", {"TYPE": 2, "MAX": 0, "R": 0, "S": 0}),
    ("reformat.cu", {"FROM": 0, "TO": 1, "UNIT": 16}),
    ("stem.cu", {"FROM": 1, "TO": 1, "CP": 8, "NHWC": 1}),
    ("pointwise.cu", {"TYPE": 1, "LAST": 1, "STEPS": "for (int e = 0; e < 8; ++e) x.v[e] = activate<3>(x.v[e], Act{0.f, 0.f});"}),
]  # fmt: skip


def disassembler():
    beside = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(beside) if beside.exists() else None)


def sass(code, tmp_path):
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump here: install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(code)
    return subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("config", "im2col", "activation", "bf16", "f32"), CONVS, ids=lambda v: str(v))
def test_convolutions_use_what_hopper_has(config, im2col, activation, bf16, f32, tmp_path):
    text = sass(compile_cubin(conv_source(config, im2col, activation, bf16, f32), cached=False), tmp_path)
    assert "HGMMA" in text, "products run on the tensor cores"
    assert ("UTMALDG.4D.IM2COL" if im2col else "UTMALDG") in text, "inputs come by bulk copies"
    assert not re.search(r"\b(LDL|STL)\b", text), "nothing spills"
    assert "BRA.U.ANY" not in text, "addresses of copies and products are uniform: no loops over lanes"
    assert ("UTMASTG" in text) == (config.sk == 1 and not config.direct)
    loop = text[text.index("HGMMA") : text.rindex("HGMMA")]
    assert "R2UR" not in loop, "descriptors stay in uniform registers"


@pytest.mark.parametrize(("name", "constants"), OTHERS, ids=lambda v: v if isinstance(v, str) else "")
def test_other_kernels_do_not_spill(name, constants, tmp_path):
    text = sass(compile_cubin(source(name, constants), name=name, cached=False), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", text)
    if constants.get("TYPE") == 1 or name == "first.cu":
        assert re.search(r"(LDG|STG)\.E\.128|STG\.E\.128", text), "16-byte accesses"


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_compiles(kind):
    assert compile_cubin(conv_source(ConvConfig(1, 1, 16, bk=16, stages=2, direct=1), False, kind, False), cached=False).startswith(b"\x7fELF")


@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(1, 14, 14, 256, 256, 3, 3, pad=(1, 1, 1, 1)),
        ConvShape(1, 7, 7, 512, 2048),
        ConvShape(128, 56, 56, 64, 64, 3, 3, pad=(1, 1, 1, 1)),
        ConvShape(3, 57, 41, 72, 40, 3, 3, (2, 1), (2, 1, 0, 1), (1, 2)),
        ConvShape(1, 1, 1, 2048, 1000),
        ConvShape(2, 112, 112, 16, 96),
    ],
    ids=str,
)
def test_every_shape_has_candidates_that_fit(shape):
    found = conv_configs(shape)
    assert found
    assert len(set(found)) == len(found)
    for config in found:
        assert config.valid()
        assert config.shared + 1024 <= 228 * 1024
        assert (config.bm % config.sk, config.bn % 16) == (0, 0)


def test_a_config_that_cannot_be_held_is_not_valid():
    good = ConvConfig(2, 2, 128, stages=3)
    assert good.valid()
    assert not replace(good, stages=6).valid(), "shared memory"
    assert not replace(good, bn=256).valid(), "registers"
    assert all(c.valid() for c in configs_for(6272, 512, 512, 9))


def test_a_kernel_that_does_not_compile_shows_the_log():
    with pytest.raises(BackendError, match=r"(?s)does not compile for sm_90a.*nonsense"):
        compile_cubin("nonsense", name="broken.cu", cached=False)


def test_the_cache_is_keyed_by_text_and_target_and_refuses_others_folders(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    monkeypatch.setenv("WHET_CUDA_CACHE", str(folder))
    text = 'extern "C" __global__ void f() {}'
    first = compile_cubin(text)
    assert [p.suffix for p in folder.iterdir()] == [".cubin"]
    assert compile_cubin(text) == first
    next(folder.iterdir()).write_bytes(b"kept")
    assert compile_cubin(text) == b"kept", "read from the cache, not compiled again"
    assert compiler.cache_key(text, "sm_90a") != compiler.cache_key(text, "sm_90")
    assert compiler.cache_key(text, "sm_90a") != compiler.cache_key(text + " ", "sm_90a")
    folder.chmod(0o777)
    with pytest.raises(BackendError, match="can be written by others"):
        compile_cubin(text)
