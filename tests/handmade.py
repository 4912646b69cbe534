"""Hand-made engines for the tests of engine, runtime and inspector: NumPy tactics, one arena range per tensor."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from whet.backends import Backend, Buffer, Executable
from whet.engine import ArenaPlan, Choice, EnginePlan, Profile
from whet.network import Network, Origin, Weight, evaluate, format_bytes, parse_type
from whet.ops import bind_symbols
from whet.runtime.kernels import list_library_versions
from whet.tactics import load_tactics


class PlainExecutable(Executable):
    def __init__(self, calls):
        self.calls = calls

    def run(self):
        for c in self.calls:
            c.run()

    def run_timed(self):
        times = []
        for c in self.calls:
            start = perf_counter()
            c.run()
            times.append(perf_counter() - start)
        return times


class PlainStream:
    def __init__(self):
        self.calls = []

    def record(self, call):
        self.calls.append(call)

    def finish(self):
        return PlainExecutable(self.calls)


class PlainBackend(Backend):
    """The smallest host backend: runs recorded calls from Python."""

    name = "cpu"

    def __init__(self, threads: int = 1, model: str = "plain"):
        self.threads, self.model = threads, model

    def allocate(self, nbytes, alignment=64):
        raw = np.zeros(nbytes + alignment, np.uint8)
        start = -raw.ctypes.data % alignment
        view = raw[start : start + nbytes]
        return Buffer(view.ctypes.data, nbytes, view, raw)

    def stream(self):
        return PlainStream()

    def seconds(self, executable, repeats):
        times = []
        for _ in range(repeats):
            start = perf_counter()
            executable.run()
            times.append(perf_counter() - start)
        return times

    def key(self):
        return f"plain {self.model} {self.threads} threads"

    def describe(self):
        return {"cpu": self.model, "threads": self.threads}


def conv_net(batch="N") -> Network:
    """Conv, Relu, Conv, Add of both: dynamic batch, weights with origins (one of them computed)."""
    rng = np.random.default_rng(7)
    net = Network("two convs", "lowered")
    x = net.add_input("x", parse_type(f"f32[{batch},3,8,8]"))
    raw, scale = rng.standard_normal((4, 3, 3, 3)).astype("f4"), rng.random((4, 1, 1, 1)).astype("f4") + np.float32(0.5)
    origin = Origin("Add", args=(Origin("source", "conv1.weight"), Origin("source", "bn1.weight")))
    w1 = net.constant(Weight(raw + scale, origin), "w1")
    w2 = net.constant(Weight(rng.standard_normal((4, 4, 3, 3)).astype("f4"), Origin("source", "conv2.weight")), "w2")
    b2 = net.constant(Weight(rng.standard_normal(4).astype("f4"), Origin("source", "conv2.bias")), "b2")
    a = net.add("Conv", x, w1, pads=(1, 1, 1, 1), sources=["/conv1/Conv"], name="c1")
    r = net.add("Relu", a, sources=["/relu1/Relu"], name="r1")
    c = net.add("Conv", r, w2, b2, pads=(1, 1, 1, 1), sources=["/conv2/Conv"], name="c2")
    net.mark_output(net.add("Add", c, r, sources=["/add/Add"], name="s"), "y")
    net.metadata["whet.sources"] = ""
    net.source = {"conv1.weight": raw, "bn1.weight": scale, "conv2.weight": w2.array(), "conv2.bias": b2.array()}
    return net


def blocked_conv_net() -> Network:
    """Static; the middle tensors are nChw8c (5 channels padded to 8) with Reformat layers around."""
    rng = np.random.default_rng(3)
    net = Network("blocked", "lowered")
    x = net.add_input("x", parse_type("f32[2,5,4,4]"))
    there = dict(source_format="linear", source_dtype="f32", format="nChw8c", dtype="f32")
    back = dict(source_format="nChw8c", source_dtype="f32", format="linear", dtype="f32")
    a = net.add("Reformat", x, name="to", **there)
    w = net.constant(rng.standard_normal((5, 5, 1, 1)).astype("f4"), "w")
    b = net.add("Conv", a, w, name="c", sources=["conv"])
    net.mark_output(net.add("Reformat", b, name="from", **back), "y")
    return net


def choose(net: Network) -> dict[str, Choice]:
    """NumPy tactics for all layers; operands linear unless a Reformat sets another format."""
    formats = {}
    for layer in net.layers:
        if layer.op == "Reformat":
            formats[layer.outputs[0].name] = (layer.attrs["format"], layer.attrs["dtype"])
            if layer.inputs[0].maker is not None:
                formats[layer.inputs[0].name] = (layer.attrs["source_format"], layer.attrs["source_dtype"])

    def stored(t):
        return formats.get(t.name, ("linear", t.dtype.name))

    made = {}
    for layer in net.layers:
        tactic = "cpu/numpy_reformat" if layer.op == "Reformat" else "cpu/numpy_reference"
        ins = tuple(None if t is None or t.is_constant else stored(t) for t in layer.inputs)
        made[layer.name] = Choice(tactic, (), ins, tuple(stored(t) for t in layer.outputs), implementation="numpy")
    return made


def arena_for(net: Network, choices: dict[str, Choice], shapes) -> ArenaPlan:
    env = bind_symbols([(t.name, t.type) for t in net.inputs], shapes)
    stored = {t.name: ("linear", t.dtype.name) for t in net.inputs}
    for layer in net.layers:
        for t, o in zip(layer.outputs, choices[layer.name].outputs, strict=True):
            stored[t.name] = o
    offsets, sizes, at = {}, {}, 0
    for t in net.tensors():
        if t.name not in stored:
            continue
        size = evaluate(format_bytes(t.type, stored[t.name][0]), env)
        offsets[t.name], sizes[t.name] = at, size
        at += -(-size // 64) * 64
    return ArenaPlan(at, offsets, sizes)


def make_plan(net: Network, low=1, opt=2, high=4, backend=None) -> EnginePlan:
    """A plan with one profile over the batch symbol N (static networks have equal shapes)."""
    load_tactics("cpu")
    backend = backend or PlainBackend()
    choices = choose(net)

    def at(n):
        return {t.name: tuple(evaluate(d, {"N": n}) for d in t.shape) for t in net.inputs}

    profile = Profile({k: (at(low)[k], at(opt)[k], at(high)[k]) for k in at(opt)})
    return EnginePlan(
        net, choices, [profile], [arena_for(net, choices, at(high))], "cpu",
        {**backend.describe(), "libraries": list_library_versions(choices, backend)}, backend.key(), backend.threads,
        source_weights=dict(getattr(net, "source", {})),
    )  # fmt: skip
