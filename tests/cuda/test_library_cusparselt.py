"""The cuSPARSELt pack: its switch, sizes and weights that it refuses, and on a GPU its products against the reference."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, reference
from test_tactics import layer_of as layer_of_sample

from whet.builder.candidates.tactic_sources import get_family, list_enabled_tactics
from whet.composites._two_four_samples import make_sparse_conv_sample, make_sparse_matmul_sample
from whet.errors import BackendError
from whet.ops._base import Sample
from whet.tactics import get_tactic
from whet.tactics.cuda.library import _cusparselt

TACTIC = get_tactic("cuda/cusparselt_half")
CASES = {
    "matmul": make_sparse_matmul_sample("f32[3,64,256]", 96, "Relu"),
    "gelu": make_sparse_matmul_sample("f32[192,512]", 160, "Gelu"),
    "1x1": make_sparse_conv_sample("f32[2,64,8,8]", 96, 1, added="before"),
}


def test_it_is_used_by_name_only():
    assert get_family(TACTIC) == "CUSPARSELT"
    assert TACTIC not in list_enabled_tactics("cuda")
    assert TACTIC in list_enabled_tactics("cuda", ["+CUSPARSELT"])


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_planned(name):
    _, layer, _ = layer_of_sample("Fused", CASES[name])
    assert TACTIC.why_not(layer) is None
    for signature in TACTIC.signatures(layer, HOPPER):
        assert TACTIC.refuses(layer, signature, HOPPER) is None
        kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
        assert "cuSPARSELt" in kernel.implementation


def test_other_sizes_and_weights_are_refused():
    _, layer, _ = layer_of_sample("Fused", make_sparse_matmul_sample("f32[3,256]", 96, "Relu"))
    assert "of 16 rows" in TACTIC.refuses(layer, TACTIC.signatures(layer, HOPPER)[0], HOPPER)
    _, layer, _ = layer_of_sample("Fused", make_sparse_conv_sample("f32[2,64,8,8]", 96, 3, pads=(1, 1, 1, 1)))
    assert "expands no windows" in TACTIC.refuses(layer, TACTIC.signatures(layer, HOPPER)[0], HOPPER)
    _, layer, _ = layer_of_sample("MatMul", Sample(["f32[64,64]", "const f32[64,64]"], {}))
    assert "weights are not 2:4" in TACTIC.why_not(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_its_products_match_the_reference(gpu, name):
    if _cusparselt.load_library() is None:
        pytest.skip("libcusparseLt is not installed")
    _, layer, arrays = layer_of_sample("Fused", CASES[name])
    ran = 0
    for signature in TACTIC.signatures(layer, gpu):
        for config in TACTIC.configs(layer, signature, gpu):
            kernel = TACTIC.plan(layer, signature, config, gpu)
            try:
                got, fed = compute(gpu, layer, arrays, signature, kernel)
            except BackendError as e:
                if "has no algorithm" not in str(e):
                    raise
                continue
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            ran += 1
    assert ran >= 2, "an algorithm in f16 and in bf16"
    assert _cusparselt.get_version().startswith("cusparseLt ")
