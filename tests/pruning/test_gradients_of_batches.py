"""Gradients over samples: those of a network of a fixed batch are of the whole batches; the batch size changes nothing."""

import numpy as np
import pytest

from whet.network import parse_network
from whet.pruning import groups
from whet.pruning.reconstruction import compute_reconstruction_scores
from whet.pruning.sensitivity import compute_gates, compute_mean_absolute_gradients

TEXT = """network n source
in %x: f32[N,6]
const %w: f32[6,8] = seed(1)
const %v: f32[8,4] = seed(2)
%h = MatMul(%x, %w)
%r = Relu(%h)
%y = MatMul(%r, %v)
out %y
"""
X = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
LABELS = np.array([0, 3, 1, 2, 0])


def gradients(fixed, count, **options):
    net = parse_network(TEXT.replace("N,", f"{fixed},") if fixed else TEXT)
    return compute_mean_absolute_gradients(net, {x.name: x for x in net.layers if x.op == "MatMul"}, {"x": X[:count]}, LABELS[:count], **options)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_a_fixed_batch_takes_whole_batches(batch):
    got, want = gradients(batch, 5), gradients(0, 5 // batch * batch)
    assert got.keys() == want.keys() == {"h", "y"}
    for name, g in want.items():
        assert got[name] == pytest.approx(g, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_the_batch_of_the_computation_changes_nothing(batch):
    for name, g in gradients(0, 5).items():
        assert gradients(0, 5, batch=batch)[name] == pytest.approx(g, rel=1e-4, abs=1e-6)


def test_gradients_are_those_of_the_cross_entropy():
    """By hand: softmax minus one-hot, backwards through two products and a Relu; absolute values per sample, then their mean."""
    net = parse_network(TEXT)
    w, v = (net.constants[n].array().astype(np.float64) for n in ("w", "v"))
    wanted = {"h": np.zeros_like(w), "y": np.zeros_like(v)}
    for x, label in zip(X.astype(np.float64), LABELS, strict=True):
        h = np.maximum(x @ w, 0)
        z = h @ v
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        p[label] -= 1
        wanted["y"] += np.abs(np.outer(h, p)) / len(X)
        wanted["h"] += np.abs(np.outer(x, (v @ p) * (h > 0))) / len(X)
    for name, g in gradients(0, 5).items():
        assert g == pytest.approx(wanted[name], rel=1e-4, abs=1e-6)


def test_gates_are_of_every_sample():
    net = parse_network(TEXT)
    found = groups(net)
    whole = compute_gates(net, found, [], {"x": X}, LABELS)
    parts = compute_gates(net, found, [], {"x": X}, LABELS, batch=2)
    for name, z in whole.z.items():
        assert len(z) == len(X)
        assert parts.z[name] == pytest.approx(z, rel=1e-4, abs=1e-6)
        assert parts.energy[name].shape == whole.energy[name].shape


def test_progress_counts_every_layer_up_to_the_last():
    net = parse_network(TEXT)
    seen = []
    compute_reconstruction_scores(net, groups(net), [], {"x": X}, progress=lambda done, total, text: seen.append((done, total)))
    assert seen == [(n + 1, len(net.layers)) for n in range(len(net.layers))]
