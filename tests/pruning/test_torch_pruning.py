"""Externally pruned models: a real run of Torch-Pruning, 2:4 masks, unstructured zeros. All are imported unchanged and get the same report."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")
pytest.importorskip("onnxscript", reason="the extra 'export' is not installed: pip install onnxscript")

from torch import nn

import whet
from whet.errors import FrontendError
from whet.ops import run_network
from whet.pruning import compute_zero_fraction, count_flops, count_params, groups
from whet.pruning.latency_cost import lower_to_static_layers, measure_latency_sum
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.sparsity import list_eligible_layers
from whet.sparsity.report import describe_zeros

pytestmark = pytest.mark.usefixtures("shared_registry")
EXAMPLE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block: Torch-Pruning must cut both inputs of its sum alike."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def model(width=32):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), Block(width), Block(width),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))  # fmt: skip
    for m in made.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.running_mean, std=0.1)
    return made.eval()


def latency(net):
    """The lowered layers at one sample, and the sum of their times in ms by the null machine, whose times depend on shapes only."""
    config = whet.BuildConfig(backend="null", timing_cache="", profiles=(({net.inputs[0].name: (1, 3, 16, 16)},) * 3,))
    layers = lower_to_static_layers(net, config)
    with Meter(config, LatencyTable(), layers) as meter:
        return layers, measure_latency_sum(net, meter)


@pytest.fixture(scope="module")
def unpruned():
    made = model()
    return made, whet.from_torch(made, EXAMPLE)


def same(module, net, x):
    with torch.no_grad():
        want = module(x).numpy()
    got, = run_network(net, {net.inputs[0].name: x.numpy()}).values()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) < 1e-5


def test_a_module_is_imported_with_names_batch_norms_and_dynamic_batch(unpruned):
    module, net = unpruned
    assert [x.op for x in net.layers].count("BatchNormalization") == 5
    assert {"3.conv1.weight", "3.bn1.running_var", "7.bias"} <= set(net.constants)
    assert str(net.inputs[0].type) == "f32[N,3,16,16]"
    assert same(module, net, torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2)))
    assert groups(net)  # and it can be pruned
    assert set(net.to_torch().weight_names().values()) == {n for n, _ in module.named_parameters()} | {
        n for n, b in module.named_buffers() if b.is_floating_point()
    }


@pytest.mark.parametrize(("pruner", "importance", "ratio"), [
    pytest.param("MagnitudePruner", "MagnitudeImportance", "pruning_ratio", marks=pytest.mark.slow),
    ("GroupNormPruner", "GroupMagnitudeImportance", "pruning_ratio"),
    ("MagnitudePruner", "MagnitudeImportance", "ch_sparsity"),  # the parameter name of the old API, deprecated since 1.3
])
@pytest.mark.filterwarnings("ignore")
def test_torch_pruning_runs_and_its_model_gets_the_usual_report(pruner, importance, ratio, unpruned):
    tp = pytest.importorskip("torch_pruning", reason="pip install torch-pruning")
    module = model()
    score = getattr(tp.importance, importance)(p=2)
    getattr(tp.pruner, pruner)(module, EXAMPLE, importance=score, ignored_layers=[module[-1]], **{ratio: 0.5}).step()
    net = whet.from_torch(module, EXAMPLE)
    operations, parameters = tp.utils.count_ops_and_params(module, EXAMPLE)
    assert count_params(net) == parameters  # both count weights, biases and gammas, not the running statistics
    assert count_params(net) < 0.3 * count_params(unpruned[1])
    assert count_flops(net) < 0.3 * count_flops(unpruned[1])
    convolutions = sum(2 * np.prod(x.output.shape[1:]) * np.prod(x.inputs[1].shape[1:]) for x in net.layers if x.op == "Conv")
    assert 0.9 < 2 * operations / convolutions < 1.2  # they count multiply-adds, whet counts single operations
    assert same(module, net, EXAMPLE)
    (layers, small), (_, large) = latency(net), latency(unpruned[1])
    assert small < large  # a quarter of the arithmetic
    assert layers


OLD = """
import sys
sys.path[:0] = sys.argv[1:3]
import importlib.util, torch, torch_pruning as tp
spec = importlib.util.spec_from_file_location("models", sys.argv[3])
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
module = models.model()
strategy = tp.strategy.L1Strategy()
graph = tp.DependencyGraph().build_dependency(module, example_inputs=models.EXAMPLE)
for conv in [m for m in module.modules() if isinstance(m, torch.nn.Conv2d)]:
    graph.get_pruning_plan(conv, tp.prune_conv_out_channel, idxs=strategy(conv.weight, amount=0.4)).exec()
net = models.whet.from_torch(module, models.EXAMPLE)
print(models.same(module, net, models.EXAMPLE), models.count_params(net))
"""


@pytest.mark.skipif("WHET_OLD_TORCH_PRUNING" not in os.environ,
                    reason="pip install --no-deps --target DIR torch-pruning==0.2.8, then WHET_OLD_TORCH_PRUNING=DIR")  # fmt: skip
def test_models_of_the_old_api_are_imported(unpruned):
    """Versions 0.2 and 1.x have the same package name, so the old one runs in its own process."""
    source = str(Path(whet.__file__).parents[1])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", OLD, os.environ["WHET_OLD_TORCH_PRUNING"], source, __file__],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    right, parameters = done.stdout.splitlines()[-1].split()
    assert right == "True"
    assert int(parameters) < 0.5 * count_params(unpruned[1])


def test_masks_of_asp_and_modelopt_are_imported_as_weights(unpruned):
    """Both keep a weight and a mask and multiply them at the end; the exported weights are the products."""
    module = model()
    for m in module.modules():
        if isinstance(m, nn.Conv2d | nn.Linear) and m.weight.shape[1] % 4 == 0:
            w = m.weight.data
            fours = w.movedim(1, -1).reshape(-1, 4)  # along the input channels, as ASP's m4n2_1d does for convolutions
            mask = torch.zeros_like(fours, dtype=torch.bool).scatter_(1, fours.abs().topk(2, 1).indices, True)
            m.weight.data = (fours * mask).reshape(w.movedim(1, -1).shape).movedim(-1, 1).contiguous()
    net = whet.from_torch(module, EXAMPLE)
    yes, no = list_eligible_layers(net)
    assert len(yes) == 5
    assert [reason for reason in no.values()] == ["its reduction axis has 3 elements, no multiple of 4"]
    assert not list_eligible_layers(unpruned[1])[0]
    assert same(module, net, EXAMPLE)


def test_unstructured_zeros_change_no_count_and_no_kernel(unpruned):
    import torch.nn.utils.prune as torch_prune

    module = model()
    for m in module.modules():
        if isinstance(m, nn.Conv2d | nn.Linear):
            torch_prune.l1_unstructured(m, "weight", 0.5)
            torch_prune.remove(m, "weight")
    net = whet.from_torch(module, EXAMPLE)
    assert compute_zero_fraction(net) == pytest.approx(0.5, abs=0.01)
    assert "50% of the weights are zeros in no pattern" in describe_zeros(net)
    assert (count_params(net), count_flops(net)) == (count_params(unpruned[1]), count_flops(unpruned[1]))
    (sparse, zeroed_ms), (dense, unpruned_ms) = latency(net), latency(unpruned[1])
    work = [[(x.op, x.composite, [str(t.type) for t in x.inputs if t is not None]) for x in layers.values()] for layers in (sparse, dense)]
    assert work[0] == work[1]
    assert zeroed_ms == unpruned_ms  # every kernel has the same work; examples/digits/demo.py shows it in milliseconds


class Branching(nn.Module):
    """torch.export cannot trace it: a branch on values."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class FixedBatch(nn.Module):
    """A forward that specializes on the batch of its example."""

    def forward(self, x):
        return x.reshape(2, -1)


def test_an_exporter_error_names_the_module_and_a_remedy():
    bad = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.ReLU(), Branching())).train()
    with pytest.raises(FrontendError, match=r"submodule '1\.1' \(Branching\).*torch\.export.*onnxscript"):
        whet.from_torch(bad, EXAMPLE)
    assert bad.training
    with pytest.raises(FrontendError, match=r"with a dynamic batch.*Give dynamic_batch=False"):
        whet.from_torch(FixedBatch(), torch.zeros(2, 3, 4, 4))
    assert str(whet.from_torch(FixedBatch(), torch.zeros(2, 3, 4, 4), dynamic_batch=False).outputs[0].type) == "f32[2,48]"
    with pytest.raises(FrontendError, match=r"Conv2d itself fails on the example: RuntimeError: .*channels"):
        whet.from_torch(nn.Conv2d(3, 3, 1), torch.zeros(1, 4, 4, 4))
    with pytest.raises(FrontendError, match=r"takes a torch\.nn\.Module, not str"):
        whet.from_torch("model.pt", EXAMPLE)
    with pytest.raises(FrontendError, match="the example is a tensor"):
        whet.from_torch(model(), np.zeros((1, 3, 16, 16)))
