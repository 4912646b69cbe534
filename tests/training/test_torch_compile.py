"""whet.compile and torch.compile(backend="whet"): the values of eager mode, dynamic shapes, fallbacks with their reasons, options."""

import importlib
import importlib.metadata
import logging
import threading
import tomllib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn

import whet
from whet.errors import BackendError, FrontendError, UsageError, WhetError
from whet.torch_compile import CompileOptions, Input
from whet.torch_compile.engine_call import Signature, match_none

ROOT = Path(__file__).parents[2]
QUICK = {"optimization_level": 0, "timing_cache": "", "threads": 1}
LOG = "whet.torch_compile"
pytestmark = [
    pytest.mark.filterwarnings("ignore::whet.runtime.EngineWarning"),  # other shapes than the tuned ones may use other kernels
    pytest.mark.usefixtures("shared_registry"),
]


class Residual(nn.Module):
    """A convolutional network with a skip connection and batch norms."""

    def __init__(self, channels=8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Linear(channels, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.stem(x)))
        y = torch.relu(y + self.conv(y))
        return self.head(y.mean((2, 3)))


class Encoder(nn.Module):
    """Token ids to a dict of tensors, with arguments by name, as Hugging Face's models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, activation="gelu")

    def forward(self, input_ids, attention_mask=None, scale=1.0, return_all=False):
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None].to(x.dtype)
        y = self.layer(x) * scale
        pooled = y[:, 0]
        return {"last": y, "pooled": pooled, "same": pooled, "note": "encoder"} if not return_all else {"last": y, "all": (x, y)}


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args).eval()


def close(got, wanted, tolerance=2e-5):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == LOG and r.levelno >= logging.WARNING]


@pytest.fixture(scope="module")
def residual():
    module = seeded(Residual)
    return module, whet.compile(module, (torch.randn(2, 3, 8, 8),), dynamic_batch=(1, 2, 4), **QUICK)


# whet.compile


@torch.no_grad()
def test_compiled_module_has_eager_values_at_every_batch_of_its_profile(residual):
    module, fast = residual
    for n in (1, 2, 3, 4):
        x = torch.randn(n, 3, 8, 8)
        close(fast(x), module(x))
    x = torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2)  # not contiguous
    close(fast(x), module(x))
    assert fast.fallbacks == 0
    assert fast.plan.network.inputs[0].shape[0] != 2


@torch.no_grad()
def test_results_are_new_tensors(residual):
    module, fast = residual
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    first = fast(x)
    fast(y)
    close(first, module(x))


@torch.no_grad()
def test_kernels_use_the_tensors_memory_and_copy_only_what_they_cannot(residual):
    module, fast = residual
    values = torch.randn(2, 3, 8, 8)
    signature = fast.engine_call.signature([values])
    fast(values)
    (slot,) = signature.idle[0]
    slot.sources[0].fill_(7.0)
    shifted = torch.empty(values.numel() + 1)[1:].view(values.shape).copy_(values)  # 4 bytes after an aligned address
    columns = values.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    for x, copied in ((values, False), (shifted, True), (columns, True), (values, False)):
        slot.sources[0].fill_(7.0)
        close(fast(x), module(values))
        assert torch.equal(slot.sources[0], values) == copied
    assert slot.addressed.direct == list(fast.engine.inputs) + list(fast.engine.outputs)


@torch.no_grad()
@pytest.mark.parametrize("guarded", [True, False])
def test_calls_after_a_remembered_one_take_other_tensors(residual, monkeypatch, guarded):
    module, fast = residual
    if not guarded:  # another version of torch
        monkeypatch.setattr("whet.torch_compile.engine_call.torch_guards", None)
    values = torch.randn(2, 3, 8, 8)
    negative = torch.complex(values, -values).conj().imag  # torch negates it when it is read
    others = {
        "batch": torch.randn(3, 3, 8, 8), "columns": values.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2), "negative": negative,
        "parameter": nn.Parameter(values), "gradients": values.clone().requires_grad_(), "of the last": values,
    }  # fmt: skip
    assert negative.is_neg()
    for name, other in others.items():
        fast.engine_call.latest.matches = match_none  # those of another test
        close(fast(values), module(values))
        assert fast.engine_call.latest.matches(values) == guarded
        assert fast.engine_call.latest.matches(other) == (guarded and name == "of the last"), name
        close(fast(other), module(other))
        close(fast(values), module(values))
    before = fast.fallbacks
    close(fast(values.double().float()), module(values))
    with pytest.raises(RuntimeError):  # the text is torch's own
        fast(values.double())  # runs in torch, which refuses it too
    assert fast.fallbacks == before + 1


@torch.no_grad()
def test_arguments_may_share_their_memory_and_be_returned():
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + 2 * y, x

    fast = whet.compile(Sum(), (torch.randn(2, 40), torch.randn(2, 40)), **QUICK)
    x = torch.randn(2, 40)
    for _ in range(3):
        three, same = fast(x, x)
        close(three, 3 * x)
        close(same, x)
        assert same.data_ptr() != x.data_ptr()
    close(fast(torch.ones(1, 40).expand(2, 40), x)[0], 1 + 2 * x)
    assert fast.fallbacks == 0


@torch.no_grad()
def test_threads_share_a_module_and_idle_contexts_are_bounded(residual):
    module, fast = residual
    wrong = []

    def work(seed):
        x = torch.randn(1 + seed % 4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        wanted = module(x)
        wrong.extend(seed for _ in range(30) if not torch.allclose(fast(x), wanted, atol=1e-4))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    call = fast.engine_call
    assert 1 <= call.contexts == sum(len(i) for s in call.signatures.values() for i in s.idle.values()) <= 8


@torch.no_grad()
def test_a_call_on_a_gpu_takes_no_context_with_cpu_memory(residual, monkeypatch):
    """torch's default stream on a GPU has the address 0, which stands for the CPU elsewhere."""
    _, fast = residual
    call, streams = fast.engine_call, []

    class GpuSlot:
        def run(self, tensors, stream):
            streams.append(stream)
            return []

    monkeypatch.setattr(call, "device", torch.device("cuda", 0))
    monkeypatch.setattr("whet.torch_compile.engine_call.make_stream_getter", lambda device: lambda: 0)
    monkeypatch.setattr(call, "new_slot", lambda signature: GpuSlot())
    signature = Signature(call, [(1, 16)], "")
    for run in (signature.run, signature.run_matching, signature.run_matching):
        run([torch.zeros(1, 16)])
    assert streams == [0, 0, 0]


def test_hooks_of_a_compiled_module_run(residual):
    _, fast = residual
    seen = []
    x = torch.randn(2, 3, 8, 8)
    with fast.register_forward_hook(lambda module, args, result: seen.append((len(args), result.shape))):
        fast(x)
    fast(x)
    with nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(module is fast)):
        fast(x)
    assert seen == [(1, (2, 5)), True]


def test_a_call_in_inference_mode_does_not_spoil_later_ones(residual):
    module, fast = residual
    x = torch.randn(4, 3, 8, 8)
    with torch.inference_mode():
        fast(x)
    close(fast(x), module(x).detach())


@torch.no_grad()
def test_arguments_that_do_not_fit_run_in_torch_with_one_warning(residual, caplog):
    module, fast = residual
    x = torch.randn(5, 3, 8, 8)
    before = fast.fallbacks
    close(fast(x), module(x), 0)
    fast(x)
    assert fast.fallbacks == before + 2
    (line,) = warnings_of(caplog)
    assert "Residual runs in torch for these arguments" in line
    assert "axis 0: 5, but profile 0 takes 1 to 4" in line


@pytest.mark.slow
@torch.no_grad()
def test_structures_arguments_by_name_and_constants(caplog):
    module = seeded(Encoder)
    ids, mask = torch.randint(0, 20, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    shapes = {"input_ids": {0: torch.export.Dim("n", min=1, max=3), 1: torch.export.Dim("t", min=2, max=8)}}
    shapes["attention_mask"] = shapes["input_ids"]
    fast = whet.compile(module, (ids,), kwarg_inputs={"attention_mask": mask, "scale": 2.0}, dynamic_shapes=shapes, **QUICK)
    for n, t in ((2, 6), (3, 8), (1, 2)):
        ids, mask = torch.randint(0, 20, (n, t)), torch.ones(n, t, dtype=torch.int64)
        mask[:, -1] = 0
        got, wanted = fast(ids, attention_mask=mask, scale=2.0), module(ids, attention_mask=mask, scale=2.0)
        assert list(got) == list(wanted)
        close([got["last"], got["pooled"]], [wanted["last"], wanted["pooled"]])
        assert got["same"] is got["pooled"]
        assert got["note"] == "encoder"
    assert fast.fallbacks == 0
    close(fast(ids, attention_mask=mask, scale=3.0)["last"], module(ids, attention_mask=mask, scale=3.0)["last"])
    assert "3.0, and the engine was built for 2.0" in warnings_of(caplog)[-1]
    fast(ids)
    assert "not nested, or not named, as the example inputs" in warnings_of(caplog)[-1]
    fast(ids.int(), attention_mask=mask, scale=2.0)
    assert "torch.int32, the engine takes torch.int64" in warnings_of(caplog)[-1]


@pytest.mark.slow
@torch.no_grad()
def test_an_input_is_given_by_its_shapes_and_16_bit_modules_keep_their_type():
    module = seeded(Residual).to(torch.bfloat16)
    fast = whet.compile(module, Input((1, 3, 8, 8), (1, 3, 8, 8), (3, 3, 8, 8), torch.bfloat16), bf16=True, **QUICK)
    x = torch.randn(3, 3, 8, 8, dtype=torch.bfloat16)
    got = fast(x)
    assert got.dtype == torch.bfloat16
    close(got.float(), module.float()(x.float()), 0.03)
    assert fast.fallbacks == 0
    with pytest.raises(UsageError, match="not min, opt and max of one rank, in ascending order"):
        Input((2, 3), (1, 3))


@pytest.mark.slow
def test_int8_takes_samples():
    module = seeded(Residual)
    samples = [(torch.randn(2, 3, 8, 8),) for _ in range(2)]
    fast = whet.compile(module, samples[0], int8=True, calibration=samples, **{**QUICK, "optimization_level": 1})
    assert {row.what for row in fast.plan.report.precision_choice} >= {"floating point", "int8"}
    got, wanted = fast(*samples[1]), module(*samples[1]).detach()
    assert (got - wanted).norm() < 0.1 * wanted.norm()


def test_what_cannot_be_compiled_is_refused_with_its_reason():
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, not function"):
        whet.compile(lambda x: x, torch.ones(2))
    with pytest.raises(UsageError, match=r"no option 'fp61'. Did you mean 'fp16'"):
        whet.compile(nn.ReLU(), torch.ones(2), fp61=True)
    with pytest.raises(UsageError, match="int8 needs ranges: give calibration="):
        CompileOptions(int8=True)
    with pytest.raises(FrontendError, match="cannot trace"):
        whet.compile(DataDependent(), torch.ones(2), **QUICK)
    with pytest.raises(FrontendError, match=r"changes module.count in place"):
        whet.compile(Counting(), torch.ones(2), **QUICK)
    with pytest.raises(UsageError, match="takes no tensors"):
        whet.compile(nn.ReLU(), (), **QUICK)


def test_training_modes_are_kept():
    module = seeded(Residual)
    module.train()
    module.norm.eval()
    whet.compile(module, (torch.randn(2, 3, 8, 8),), **QUICK)
    assert module.training
    assert not module.norm.training


class DataDependent(nn.Module):
    """A Python branch on data."""

    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Counting(nn.Module):
    """Writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


# torch.compile


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()


@pytest.fixture
def engine_names(monkeypatch):
    """The names of what engines were built for."""
    from whet.torch_compile import dynamo

    names = []
    original = dynamo.build_call

    def counted(*args, **kwargs):
        names.append(kwargs["name"])
        return original(*args, **kwargs)

    monkeypatch.setattr(dynamo, "build_call", counted)
    return names


@pytest.mark.slow
@torch.no_grad()
def test_torch_compile_runs_engines_at_static_then_dynamic_shapes(engine_names, caplog):
    module = seeded(nn.Linear, 4, 3)
    fast = torch.compile(module, backend="whet", options=QUICK)
    for n in (2, 3, 4, 6, 2):
        x = torch.randn(n, 4)
        close(fast(x), module(x))
    assert engine_names == ["graph", "graph"]  # torch marks the batch as dynamic at its second size
    assert warnings_of(caplog) == []
    x = torch.randn(13, 4)  # more than 4 times the size that the second engine was built for
    close(fast(x), module(x), 1e-6)
    assert "axis 0: 13, but profile 0 takes 2 to 12" in warnings_of(caplog)[-1]
    assert engine_names == ["graph", "graph"]


@pytest.mark.slow
@torch.no_grad()
def test_marked_axes_bound_the_profile(engine_names):
    module = seeded(Residual)
    x = torch.randn(2, 3, 8, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=12)
    fast = torch.compile(module, backend="whet", options=QUICK)
    fast(x)
    x = torch.randn(12, 3, 8, 8)
    close(fast(x), module(x))
    assert engine_names == ["graph"]


def test_gradients_run_in_torch(engine_names, caplog):
    module = seeded(Residual)
    fast = torch.compile(module, backend="whet", options=QUICK)
    x = torch.randn(2, 3, 8, 8)
    fast(x).sum().backward()
    assert module.head.weight.grad is not None
    assert engine_names == []
    assert "its gradients are needed" in warnings_of(caplog)[-1]


@pytest.mark.slow
@torch.no_grad()
def test_changed_weights_get_another_engine(engine_names):
    module = seeded(nn.Linear, 4, 3)
    fast = torch.compile(module, backend="whet", options=QUICK)
    x = torch.randn(2, 4)
    close(fast(x), module(x))
    module.weight.mul_(2)
    close(fast(x), module(x))
    assert len(engine_names) == 2


@pytest.fixture(scope="module")
def odd_op():
    """A custom op of torch without an ONNX translation."""

    @torch.library.custom_op("whet_test::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0).cumsum(0)

    @odd.register_fake
    def _(x):
        return torch.empty_like(x)

    return odd


@pytest.mark.slow
@torch.no_grad()
def test_unsupported_operations_run_in_torch_between_engines(engine_names, caplog, odd_op):
    first, second = seeded(nn.Linear, 4, 4), seeded(nn.Linear, 4, 2)

    def model(x):
        y = torch.tanh(torch.relu(first(x)) + 1)
        y = odd_op(y)
        return torch.sigmoid(second(y)) * 2, y

    fast = torch.compile(model, backend="whet", options={**QUICK, "min_block_size": 2})
    for _ in range(2):
        x = torch.randn(3, 4)
        close(fast(x), model(x))
    assert [n for n in engine_names if n != "graph"] == ["submod_0", "submod_2"]
    (line,) = warnings_of(caplog)
    assert line.startswith("torch runs odd")
    with pytest.raises(WhetError):
        torch.compile(model, backend="whet", options={**QUICK, "require_full_compilation": True})(x)


@pytest.mark.slow
@torch.no_grad()
def test_named_operations_stay_in_torch_and_small_blocks_too(engine_names, caplog):
    fast = torch.compile(lambda x: torch.relu(x).cumsum(0) + 1, backend="whet", options={**QUICK, "torch_executed_ops": ["cumsum"]})
    x = torch.randn(3, 4)
    close(fast(x), torch.relu(x).cumsum(0) + 1)
    assert "no run of 5 operations (min_block_size) is supported" in warnings_of(caplog)[-1]


@pytest.mark.slow
@torch.no_grad()
def test_graph_breaks_in_place_writes_and_numbers(caplog):
    linear = seeded(nn.Linear, 4, 4)

    def broken(x):
        y = torch.relu(linear(x))
        torch._dynamo.graph_break()
        return torch.tanh(y) + 1, x.shape[0], x

    x = torch.randn(3, 4)
    got = torch.compile(broken, backend="whet", options=QUICK)(x)
    close(got[0], broken(x)[0])
    assert got[1] == 3
    assert got[2] is x

    def writing(x):
        x.add_(1)
        return x * 2

    x, y = torch.ones(3), torch.ones(3)
    close(torch.compile(writing, backend="whet", options=QUICK)(x), writing(y))
    close(x, y)
    assert "in place" in warnings_of(caplog)[-1]


def test_torch_finds_the_backend_by_its_entry_point():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    module, _, function = declared["whet"].partition(":")
    assert getattr(importlib.import_module(module), function) is torch._dynamo.lookup_backend("whet")
    with pytest.raises(Exception, match="no option 'fp61'"), torch.no_grad():
        torch.compile(nn.ReLU(), backend="whet", options={"fp61": True})(torch.ones(2))


def test_without_torch_the_error_names_the_extra(monkeypatch):
    import whet.torch_compile

    monkeypatch.setattr(whet.torch_compile, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install 'whet\[export\]'"):
        whet.torch_compile.compile(nn.ReLU(), (torch.ones(2),))


def test_engines_are_saved_and_run_without_torch(residual, tmp_path):
    module, fast = residual
    path = whet.write_engine(fast.plan, tmp_path / "residual.engine")
    x = torch.randn(2, 3, 8, 8)
    (name,) = fast.engine.inputs
    (got,) = whet.Runtime().load(path or tmp_path / "residual.engine").create_context().run({name: x.numpy()}).values()
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=2e-5, atol=2e-5)
