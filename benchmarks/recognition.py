"""Which constructs of transformers and modern convolutional networks are recognized, in models as PyTorch's two exporters write them.

    python benchmarks/recognition.py [--networks bert,swin,...] [--exporters torchscript,dynamo] [--opset 18] [--level 1] [--folder FOLDER]

A process exports each network (small, random weights, batch 2; kept in FOLDER), imports it, applies the passes of an engine for the GPU (level 3; no
GPU is needed), and builds an engine for the CPU at --level. A row:
    found       `recognized` of `expected`, in words; attention that is written out counts as a softmax of the module
    expected    calls of attention, softmax, layer norm, RMS norm, GELU and SiLU that the PyTorch module makes, counted while it runs
    recognized  layers of the lowered network for the GPU that compute them, inside fused layers too
    left        its layers that only move values or compute elementwise, by kind: each is a kernel of its own. Views are not counted, nor are
                Transposes between images and rows of pixels, which are views of images that are stored with channels last
    error       maximum difference from ONNX Runtime relative to the largest value: of the CPU engine, and of the passes for the GPU in NumPy
A network that PyTorch cannot export is listed with the exporter's message and does not count. Needs torch, torchvision, timm and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _networks import EXPORTERS, export
from _record import alone, provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
RESULT = Path(__file__).parent / "results" / "cpu" / "recognition.json"
TOLERANCE = 1e-4
BATCH = 2
#: layers that do the work of a network; every other one is left over
WORK = (
    "ActivatedNorm", "Attention", "AveragePool", "Conv", "ConvSum", "ConvTranspose", "DepthwiseThenPointwise", "GatedProduct", "Gather", "Gemm",
    "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "InstanceNormalization", "LSTM", "LayerNormalization", "MatMul", "MaxPool",
    "NormThenProduct", "PoolGemm", "RMSNormalization", "Resize", "ResponseNorm", "SqueezeExcite", "UnitRows",
)  # fmt: skip
VIEWS = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
KINDS = ("attention", "softmax", "layer_norm", "rms_norm", "gelu", "silu")


@contextlib.contextmanager
def counted(net: Any) -> Iterator[Counter[str]]:
    """Counts the calls of a module's forward that are to be recognized."""
    import torch
    from torch.overrides import TorchFunctionMode

    counts: Counter[str] = Counter()
    names = {"scaled_dot_product_attention": "attention", "softmax": "softmax", "layer_norm": "layer_norm", "rms_norm": "rms_norm"}
    names |= {"gelu": "gelu", "silu": "silu", "native_layer_norm": "layer_norm"}

    class Count(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kind = names.get(getattr(func, "__name__", ""))
            if kind is not None:
                counts[kind] += 1
                with torch._C.DisableTorchFunction():  # functions that call each other count once
                    return func(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def count(kind: str) -> Any:
        return lambda *_: counts.update([kind])

    written_out = {"NewGELUActivation": "gelu", "FastGELUActivation": "gelu", "BloomGelu": "gelu", "QuickGELUActivation": "silu"}
    hooks = []
    for part in net.modules():
        kind = type(part).__name__
        if kind in written_out:
            hooks.append(part.register_forward_hook(count(written_out[kind])))
        elif kind.lower().endswith(("rmsnorm", "t5layernorm")) and type(part) is not torch.nn.RMSNorm and "timm" not in type(part).__module__:
            hooks.append(part.register_forward_hook(count("rms_norm")))
    with Count():
        yield counts
    for hook in hooks:
        hook.remove()


def all_layers(net: Any) -> Iterator[Any]:
    """The layers of a network and of the bodies of its fused layers."""
    for layer in net.layers:
        yield layer
        for region in layer.regions.values():
            yield from all_layers(region)


def recognized(net: Any) -> dict[str, int]:
    """How often each kind of KINDS is computed in a lowered network; a softmax outside attention is a softmax."""
    found: Counter[str] = Counter()
    inside = 0
    for layer in all_layers(net):
        if layer.composite == "Attention":
            found["attention"] += 1
            inside += sum(x.op == "Softmax" for x in all_layers(layer.regions["body"]))
        name = {"LayerNormalization": "layer_norm", "RMSNormalization": "rms_norm", "Gelu": "gelu", "Swish": "silu", "Softmax": "softmax"}
        if layer.op in name:
            found[name[layer.op]] += 1
        if layer.op == "Mul":  # in an epilogue a SiLU stays a Sigmoid and a product
            gates = [t.maker.inputs[0] for t in layer.inputs if t is not None and t.maker is not None and t.maker.op == "Sigmoid"]
            found["silu"] += any(x in layer.inputs or (x.maker and set(x.maker.inputs) & set(layer.inputs)) for x in gates)
    found["softmax"] -= inside
    return {k: n for k in KINDS if (n := found[k])}


def is_view(layer: Any) -> bool:
    """True for a layer that moves nothing, as the Transposes between images and rows of pixels do if images are stored with channels last."""
    if layer.op != "Transpose":
        return layer.op in VIEWS
    perm, last = tuple(layer.attrs["perm"]), layer.output.type.rank - 1
    return last > 2 and perm in ((0, *range(2, last + 1), 1), (0, last, *range(1, last)))


def left_over(net: Any) -> dict[str, int]:
    """The layers that are neither work nor views, by kind."""
    kinds = Counter(layer.composite or layer.op for layer in net.layers if not is_view(layer))
    return {k: n for k, n in sorted(kinds.items()) if k not in WORK}


def deviation(outputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference relative to the largest value; infinite if a value is NaN or infinite."""
    worst = 0.0
    for name, ref in expected.items():
        a, b = np.asarray(outputs[name], np.float64), np.asarray(ref, np.float64)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) if a.shape == b.shape else np.inf
        worst = max(worst, float(error) if np.isfinite(error) else np.inf)
    return float(f"{worst:.2g}")


def exported(name: str, exporter: str, folder: Path, opset: int) -> tuple[Path, dict[str, np.ndarray], dict[str, int]]:
    """The model's file, its inputs, and the calls that the module makes; made once."""
    import torch

    model, data = folder / f"{name}-{exporter}-{opset}.onnx", folder / f"{name}-{exporter}-{opset}.npz"
    if not data.exists():
        from _recognition_networks import NETWORKS

        torch.manual_seed(0)
        net, named = NETWORKS[name](BATCH)
        net.eval()
        with torch.no_grad(), counted(net) as counts:
            net(*named.values())
        export(net, named, str(model), (exporter,), opset)
        np.savez(data, **{n: v.numpy() for n, v in named.items()}, expected=np.array([counts[k] for k in KINDS]))
    with np.load(data) as arrays:
        numbers = dict(zip(KINDS, arrays["expected"].tolist(), strict=True))
        return model, {n: arrays[n] for n in arrays.files if n != "expected"}, {k: n for k, n in numbers.items() if n}


def measure_row(name: str, exporter: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a network: `stage` is the last thing that was done."""
    row: dict[str, Any] = {"stage": "export"}
    try:
        model, feeds, row["expected"] = exported(name, exporter, Path(args.folder), args.opset)
        row["stage"] = "import"
        import onnxruntime as ort

        from whet.builder import BuildConfig, build
        from whet.builder.lowering import lower_network
        from whet.frontends import network_from_onnx
        from whet.ops import run_network
        from whet.runtime import Runtime

        net = network_from_onnx(model)
        feeds = {t.name: feeds[t.name] for t in net.inputs}
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        read = {i.name for i in session.get_inputs()}
        wanted = dict(zip([o.name for o in session.get_outputs()], session.run(None, {n: a for n, a in feeds.items() if n in read}), strict=True))
        row["stage"] = "passes"
        lowered, log = lower_network(net, BuildConfig(backend="cuda"))
        row |= {"recognized": recognized(lowered), "left": left_over(lowered), "layers": len(lowered.layers)}
        names = ("recognize_attention", "recognize_layer_norm", "recognize_rms_norm", "recognize_gelu")
        row["skipped"] = list(dict.fromkeys(text for (name, _), text in log.skipped.items() if name in names))[:3]
        with np.errstate(all="ignore"):
            row["error_passes"] = deviation(run_network(lowered, feeds), wanted)
        row["stage"] = "build"
        if args.level >= 0:
            plan = build(net, BuildConfig(threads=1, timing_cache="", optimization_level=args.level))
            row["numpy_layers"] = dict(Counter(x.op for x in plan.network.layers if plan.choices[x.name].tactic == "cpu/numpy_reference"))
            with Runtime().load(plan) as engine, engine.create_context() as context:
                row["error"] = deviation(context.run(feeds), wanted)
        row |= {"stage": "done", **described(row)}
    except Exception as e:  # noqa: BLE001 - exporters, torch and builds raise exceptions of many classes; each is a row
        row["message"] = f"{type(e).__name__}: {e}"[:400]
    return row


def described(row: dict[str, Any]) -> dict[str, str]:
    """The row's counts in words, for the table of the docs."""
    want, have = dict(row["expected"]), row.get("recognized", {})
    cores = want.pop("softmax", 0) + want.pop("attention", 0)
    said = [f"attention or softmax {have.get('attention', 0)} + {have.get('softmax', 0)} of {cores}"] if cores else []
    said += [f"{k.replace('_', ' ')} {have.get(k, 0)} of {n}" for k, n in want.items()]
    return {"found": ", ".join(said), "kernels_left": ", ".join(f"{k} {n}" for k, n in row.get("left", {}).items()) or "none"}


def is_recognized(row: dict[str, Any]) -> bool:
    """True if every construct of a row is computed by a layer of its kind, and no softmax is left outside of attention."""
    want, have = row["expected"], row.get("recognized", {})
    cores = want.get("attention", 0) + want.get("softmax", 0)
    return have.get("attention", 0) >= cores and not have.get("softmax") and all(have.get(k, 0) >= want.get(k, 0) for k in KINDS[2:])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over the models that were exported."""
    counted_rows = [r for r in rows if r["stage"] != "export"]
    fine = [r for r in counted_rows if r["stage"] == "done"]
    right = sum(max(r.get("error", 0.0), r["error_passes"]) <= TOLERANCE for r in fine)
    found = {"models": len(counted_rows), "networks": len({r["network"] for r in counted_rows}), "built": len(fine), "right": right}
    return found | {"recognized": sum(is_recognized(r) for r in fine), "not_exported": len(rows) - len(counted_rows)}


def main() -> None:
    from _recognition_networks import NETWORKS

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--networks", default=",".join(NETWORKS))
    p.add_argument("--exporters", default=",".join(EXPORTERS))
    p.add_argument("--opset", type=int, default=18)
    p.add_argument("--level", type=int, default=1, help="builderOptimizationLevel of the engine for the CPU; -1: none is built")
    p.add_argument("--timeout", type=float, default=300.0, help="seconds for a network")
    p.add_argument("--folder", help="where models are kept; a temporary folder if not given")
    p.add_argument("--out", default=str(RESULT))
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, __file__, "--worker", "--folder", args.folder or temporary, "--level", str(args.level), "--opset", str(args.opset)]
        worker = Worker(command, args.timeout)
        for name in args.networks.split(","):
            for exporter in args.exporters.split(","):
                row = {"network": name, "exporter": exporter, "opset": args.opset} | worker.row(f"{name}:{exporter}")
                print(json.dumps(row), flush=True)
                add_row(Path(args.out), row, list(NETWORKS))
        worker.process.kill()


def serve(args: argparse.Namespace) -> None:
    """A worker: a row for each line of standard input. Other output, such as the exporters', goes to standard error, that of native code too."""
    warnings.simplefilter("ignore")
    rows, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(measure_row(*line.strip().split(":"), args)), file=rows, flush=True)


class Worker:
    """A process that measures rows, and a new one after one that crashed or took too long."""

    def __init__(self, command: list[str], timeout: float) -> None:
        self.command, self.timeout = command, timeout
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def row(self, request: str) -> dict[str, Any]:
        """The row of NETWORK:EXPORTER."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(request, file=self.process.stdin, flush=True)
        timer = threading.Timer(self.timeout, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        code = self.process.wait()
        self.process = self._start()
        return {"stage": "crash", "message": f"the process ended by {code}, or after {self.timeout:g} s"}


def add_row(path: Path, row: dict[str, Any], order: list[str]) -> None:
    """Writes the result file with `row` in place of an older one of the same model."""

    def key(r: dict[str, Any]) -> tuple[str, str, int]:
        return r["network"], r["exporter"], r["opset"]

    with alone(path):
        rows = [r for r in (json.loads(path.read_text())["rows"] if path.exists() else []) if key(r) != key(row)] + [row]
        rows.sort(key=lambda r: (order.index(r["network"]) if r["network"] in order else len(order), r["exporter"], r["opset"]))
        versions = provenance(("numpy", "onnxruntime", "torch", "torchvision", "timm", "transformers"))
        result = {**versions, "tolerance": TOLERANCE, "summary": summary(rows), "rows": rows}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
