"""The order of steps: permitted and refused sequences, with a reason and a remedy, recorded in the model's file."""

import numpy as np
import pytest

from whet.errors import PruneError
from whet.frontends import network_from_onnx, onnx_from_network
from whet.network import Weight, parse_network
from whet.pruning import PruneConfig, prune
from whet.pruning.order import KEY, STEPS, check_order, note, read_history
from whet.sparsity import two_four

NET = """network n source
in %x: f32[N,3,8,8]
const %w1: f32[8,3,3,3] = seed(1)
const %w2: f32[4,8,1,1] = seed(2)
%a: f32[N,8,8,8] = Conv(%x, %w1, pads=(1, 1, 1, 1))
%b: f32[N,8,8,8] = Relu(%a)
%y: f32[N,4,8,8] = Conv(%b, %w2)
out %y
"""


def after(*steps: str):
    """A network with these steps in its record."""
    net = parse_network(NET)
    for step in steps:
        note(net, step)
    return net


@pytest.mark.parametrize(
    ("done", "step"),
    [
        ((), "prune"), ((), "finetune"), ((), "calibrate"), (("prune",), "recover"), (("prune",), "finetune"),
        (("prune",), "prune"),  # several rounds of pruning are fine
        (("prune", "recover"), "calibrate"), (("prune", "finetune"), "calibrate"), (("prune", "finetune"), "prune"),
        (("prune", "finetune", "prune"), "recover"), (("finetune",), "recover"),
    ],
)  # fmt: skip
def test_permitted_steps(done, step):
    check_order(after(*done), step)


@pytest.mark.parametrize(
    ("done", "step", "why"),
    [
        (("prune",), "calibrate", "neither recovered nor fine-tuned since"),
        (("prune", "finetune", "prune"), "calibrate", "neither recovered nor fine-tuned since"),  # calibration before the last cut does not help
        (("prune", "finetune"), "recover", "was fine-tuned after it was cut"),
        *((("calibrate",), step, "quantized already") for step in STEPS),
        (("prune", "finetune", "calibrate"), "prune", "pruning changes the activations"),
        (("calibrate",), "finetune", "fine-tuning moves the weights"),
        (("calibrate",), "calibrate", "already contains its ranges"),
    ],
)
def test_refused_steps(done, step, why):
    net = after(*done)
    with pytest.raises(PruneError, match=f"{why}.*insist=True") as e:
        check_order(net, step)
    assert str(e.value)[-1] == "."
    check_order(net, step, insist=True)


def test_pruning_checks_the_order_and_the_file_keeps_the_record():
    net = after("prune", "finetune", "calibrate")
    with pytest.raises(PruneError, match="quantized already"):
        prune(net, PruneConfig(ratio=0.5, multiple=2))
    assert prune(net, PruneConfig(ratio=0.5, multiple=2, insist=True)).share > 0.3
    again = network_from_onnx(onnx_from_network(net))
    assert [s["step"] for s in read_history(again)] == ["prune", "finetune", "calibrate"]


def test_a_model_with_quantize_nodes_is_not_pruned():
    net = parse_network(NET)
    scale, zero = net.constant(np.float32(0.1), "sc"), net.constant(np.int8(0), "zp")
    y = net.outputs.pop()
    net.mark_output(net.add("DequantizeLinear", net.add("QuantizeLinear", y, scale, zero), scale, zero))
    with pytest.raises(PruneError, match="Prune the floating-point model"):
        prune(net)


def test_a_foreign_record_counts_as_none():
    net = parse_network(NET)
    for text in ("no json", "3", '["x", {"step": "dance"}]'):
        net.metadata[KEY] = text
        assert read_history(net) == []


def patterned(w2=True):
    """Its second convolution has 2:4 zeros."""
    net = parse_network(NET)
    if w2:
        w = net.constants["w2"]
        w.weight = Weight(two_four(w.array(), 1))
    return net


def test_cuts_would_break_2_4_zeros():
    check_order(patterned(False), "prune")
    net = patterned()
    with pytest.raises(PruneError, match=r"1 layers have 2:4 weights \(y\), and cutting input channels .* Prune first.*insist=True"):
        prune(net, PruneConfig(ratio=0.5, multiple=1))
    with pytest.raises(PruneError, match="recovery refits all weights including the zeros"):
        check_order(net, "recover")
    assert prune(net, PruneConfig(ratio=0.5, multiple=1, insist=True)).channels == (8, 4)
    for step in ("finetune", "calibrate"):
        check_order(net, step)
    net.constants["w2"].weight = Weight(np.zeros((4, 8, 1, 1), np.float32))
    check_order(net, "prune")  # an all-zero weight has no pattern to lose
