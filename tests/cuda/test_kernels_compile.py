"""Every CUDA tactic's kernel compiles without a GPU. Tactics are discovered in the folders, layers in the samples of the ops."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, SAMPLES, sample_layer

from support.compiler_flags import COMPILER_FLAGS
from whet.backends.cuda import compile as compiler
from whet.backends.cuda.compile import compile_cubin
from whet.builder.candidates.compile_ahead import list_configs_with_texts
from whet.errors import BackendError
from whet.ops import OPS
from whet.tactics import Args, list_tactics
from whet.tactics.cuda._device.kernel import GpuKernel

try:
    compiler.load_nvrtc()
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

NO_SAMPLES = {"cuda/reformat"}  # converts formats between layers; test_compile.py compiles its kernel
COMPOSED = {"cuda/decomposed"}  # launches the kernels of other tactics
OURS = [t for t in list_tactics("cuda") if t.name not in COMPOSED and not type(t).__module__.startswith("whet.tactics.cuda.library.")]


def first_case(tactic):
    """The first sample that a tactic accepts, with its signature and configuration, and the kernel texts that it lists."""
    named = [c for c in SAMPLES if c[0] in tactic.ops or "*" in tactic.ops or OPS[c[0]].name == "Fused"] or SAMPLES
    for op, i in named:
        layer, _ = sample_layer(op, i)
        if tactic.why_not(layer):
            continue
        for signature in tactic.signatures(layer, HOPPER):
            if tactic.refuses(layer, signature, HOPPER) is None:
                for config, texts in list_configs_with_texts(tactic, layer, signature, HOPPER):
                    return layer, signature, config, texts
    return None


@COMPILER_FLAGS
@pytest.mark.parametrize("tactic", OURS, ids=lambda t: t.name)
def test_the_kernel_of_a_tactic_compiles(tactic, flags):
    case = first_case(tactic)
    if case is None:
        assert tactic.name in NO_SAMPLES, f"no sample of an op is computed by {tactic.name}"
        return
    layer, signature, config, texts = case
    if texts:
        assert compile_cubin(texts[0], flags=flags).startswith(b"\x7fELF")
        return
    kernel = tactic.plan(layer, signature, config, HOPPER)
    assert isinstance(kernel, GpuKernel)
    addresses = lambda sizes: tuple(0x1000 * (i + 1) if n else 0 for i, n in enumerate(sizes))  # noqa: E731
    packed = tuple(0x9000 for _ in kernel.packed)
    kernel.launches(Args(addresses(kernel.inputs), addresses(kernel.outputs), packed, 0x8000))  # compiles the kernels that it launches
