"""whet.compile on a GPU: kernels use torch's tensors on its current stream, and alternating addresses capture no new graphs."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable())),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def compiled():
    import whet

    torch.manual_seed(0)
    parts = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)]
    module = torch.nn.Sequential(*parts).eval().cuda()
    return module, whet.compile(module, (torch.randn(4, 64, device="cuda"),), dynamic_batch=(1, 4, 8), optimization_level=1, timing_cache="")


@torch.no_grad()
def test_values_are_right_for_kept_and_dropped_outputs_on_any_stream(compiled):
    module, fast = compiled
    kept = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for k in range(6):
                x = torch.randn(1 + k % 3, 64, device="cuda")
                kept.append((x, fast(x)))
        stream.synchronize()
    for x, y in kept:
        torch.testing.assert_close(y, module(x), rtol=2e-3, atol=2e-3)
    assert fast.fallbacks == 0


@torch.no_grad()
def test_repeated_calls_capture_few_graphs(compiled, monkeypatch):
    from whet.backends.cuda import executor

    captured = []
    graph = executor.Graph
    monkeypatch.setattr(executor, "Graph", lambda *args: captured.append(1) or graph(*args))
    _, fast = compiled
    x = torch.randn(5, 64, device="cuda")
    y = None
    for _ in range(50):
        y = fast(x)  # while y is alive, the next output has another address
    torch.cuda.synchronize()
    assert y is not None
    assert 1 <= len(captured) <= 4


@torch.no_grad()
def test_inputs_that_kernels_cannot_use_are_copied(compiled):
    module, fast = compiled
    values = torch.randn(4, 64, device="cuda")
    shifted = torch.empty(257, device="cuda")[1:].view(4, 64).copy_(values)
    columns = values.t().contiguous().t()
    for x in (shifted, columns):
        torch.testing.assert_close(fast(x), module(values), rtol=2e-3, atol=2e-3)
    assert fast.fallbacks == 0
