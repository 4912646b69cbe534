"""Training steps by torch.compile: one graph without breaks, and the values of the plain loop."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from test_graphed import data, small

from whet.training import FinetuneConfig, finetune

HOW = {"epochs": 2, "batch": 64, "lr": 0.02, "distill": 0.5, "seed": 3}


def same(a, b, **how):
    return all(np.allclose(t.array(), b.network.constants[n].array(), **how) for n, t in a.network.constants.items() if t.weight is not None)


def test_a_compiled_step_is_one_graph_and_trains_as_a_plain_one(monkeypatch):
    """Traced and differentiated as on a GPU; its kernels are PyTorch's own, so no C++ compiler is needed."""
    made = []
    trace = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda module, **how: made.append(how) or trace(module, **how))
    plain, compiled = (finetune(small(), data(), FinetuneConfig(**HOW, device="cpu", compile=c), teacher=small(1)) for c in (False, True))
    assert made == [{"dynamic": False}]  # once, not at every step
    assert same(plain, compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for PyTorch")
def test_a_compiled_step_is_recorded():
    torch.backends.cudnn.allow_tf32 = False
    how = {**HOW, "epochs": 5, "device": "cuda", "views": 2}
    plain, compiled = (finetune(small(), data(), FinetuneConfig(**how, compile=c), teacher=small(1)) for c in (False, True))
    assert same(plain, compiled, rtol=2e-3, atol=2e-4)
