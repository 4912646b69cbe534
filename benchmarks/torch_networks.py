"""Networks of timm and transformers through whet.compile with a dynamic batch: errors beside torch's own, and the time of a call beside the engine's.

    python benchmarks/torch_networks.py [--networks resnet18,bert,...] [--level N] [--threads N] [--rounds N]

Needs pip install timm transformers. Weights are random (seeded): nothing is downloaded. Batches are 1 to 4, inputs seeded; images have 64 x 64
pixels if the network takes them (`side` in its row). A row:
    error         max|a - b| / max|b| of whet's FP32 outputs against torch in float64, over batches 1, 2 and 4
    torch_error   the same of torch in float32: the bar is LIMIT times it
    engine_us     median time of the engine's launches alone, batch 1
    call_us       median time of fast(x), calls and launches interleaved
    overhead_us   the median of their differences (no times with --rounds=0)
The row `linear` is three small layers, whose overhead is not hidden by the noise of a long run. Writes results/cpu/torch_networks.json after each
row, and keeps the rows of networks that are not in --networks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from _record import alone, provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
RESULT = Path(__file__).parent / "results" / "cpu" / "torch_networks.json"
LIMIT = 4.0  # of a kernel that sums in another order than torch's
OVERHEAD_US = 5.0
SIDE, SIDES = 64, {"vgg11": 224, "swin_tiny_patch4_window7_224": 224, "vit": 224}  # pixels of images; vgg11 has a layer for 7 x 7 features
SIZED = ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224")  # their weights depend on the number of pixels
TIMM = (
    "resnet18", "resnet50", "mobilenetv2_100", "mobilenetv3_small_100", "efficientnet_b0", "regnety_002", "densenet121", "convnext_atto", "vgg11",
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "ghostnet_100", "mobilevit_xxs",
)  # fmt: skip
TRANSFORMERS = ("bert", "distilbert", "gpt2", "t5_encoder", "vit")


def timm_network(name: str) -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
    """A network and a function that makes its arguments for a batch."""
    import timm
    import torch

    side = SIDES.get(name, SIDE)
    module = timm.create_model(name, pretrained=False, **({"img_size": side} if name in SIZED else {}))
    return module, lambda n: (torch.randn(n, 3, side, side),)


def transformers_network(name: str) -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
    """The same, with few layers: their kinds count here, not their number."""
    import torch
    import transformers as hf

    words = {"vocab_size": 1000}
    sizes: dict[str, Any] = {
        "bert": lambda: hf.BertModel(hf.BertConfig(num_hidden_layers=2, **words)),
        "distilbert": lambda: hf.DistilBertModel(hf.DistilBertConfig(n_layers=2, **words)),
        "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(n_layer=2, use_cache=False, **words)),
        "t5_encoder": lambda: hf.T5EncoderModel(hf.T5Config(num_layers=2, d_model=256, d_ff=512, **words)),
        "vit": lambda: hf.ViTModel(hf.ViTConfig(num_hidden_layers=2)),
    }
    module = sizes[name]()
    return module, (lambda n: (torch.randn(n, 3, 224, 224),)) if name == "vit" else (lambda n: (torch.randint(0, 1000, (n, 32)),))


def linear() -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
    """Three small layers."""
    import torch

    parts = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)]
    return torch.nn.Sequential(*parts), lambda n: (torch.randn(n, 64),)


def fill_zeros(module: Any) -> None:
    """Small random values for parameters that are zero at the start: behind a zero scale or head, an error could not be seen."""
    import torch

    with torch.no_grad():
        for p in module.parameters():
            if not p.any():
                p.normal_(std=0.02)


def tensors(result: Any) -> list[Any]:
    """The floating-point tensors of a result."""
    import torch
    from torch.utils import _pytree as pytree

    flat = pytree.tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)
    return [t for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]


def error(got: Any, wanted: Any) -> float:
    """max|a - b| / max|b| over the tensors of two results."""
    pairs = zip(tensors(got), tensors(wanted), strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def measure(name: str, level: int, threads: int, rounds: int) -> dict[str, Any]:
    """The row of a network."""
    import torch

    import whet

    torch.manual_seed(0)
    module, arguments = linear() if name == "linear" else transformers_network(name) if name in TRANSFORMERS else timm_network(name)
    module = module.eval()
    fill_zeros(module)
    fast = whet.compile(module, arguments(2), dynamic_batch=(1, 1, 4), optimization_level=level, threads=threads, timing_cache="")
    row: dict[str, Any] = {"network": name, "threads": threads, "level": level}
    with torch.no_grad():
        batches = [arguments(n) for n in (1, 2, 4)]
        found, single = [fast(*a) for a in batches], [module(*a) for a in batches]
        module = module.double()
        exact = [module(*[t.double() if t.is_floating_point() else t for t in a]) for a in batches]
        row["error"] = max(error(a, b) for a, b in zip(found, exact, strict=True))
        row["torch_error"] = max(error(a, b) for a, b in zip(single, exact, strict=True))
        row["fallbacks"] = fast.fallbacks
        row["layers"] = len(fast.plan.network.layers)
        if rounds:
            row |= _overhead(fast, batches[0], rounds)
            row["overhead_met"] = row["overhead_us"] <= OVERHEAD_US
    if batches[0][0].dim() == 4:
        row["side"] = batches[0][0].shape[-1]
    row["within"] = row["fallbacks"] == 0 and row["error"] <= LIMIT * row["torch_error"]
    return row


def _overhead(fast: Any, arguments: tuple[Any, ...], rounds: int) -> dict[str, float]:
    with fast.engine.create_context() as context:
        context.run({n: t.numpy() for n, t in zip(fast.engine.inputs, arguments, strict=True)})
        launches = context.launches()
        calls, runs = [], []
        for _ in range(rounds):
            start = perf_counter()
            launches.run()
            middle = perf_counter()
            fast(*arguments)
            end = perf_counter()
            runs.append(1e6 * (middle - start))
            calls.append(1e6 * (end - middle))
    over = median(c - r for c, r in zip(calls, runs, strict=True))
    return {"engine_us": round(median(runs), 2), "call_us": round(median(calls), 2), "overhead_us": round(over, 2)}


def main() -> None:
    """Measures the networks one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(("linear", *TIMM, *TRANSFORMERS)))
    parser.add_argument("--level", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=300)
    o = parser.parse_args()
    for name in o.networks.split(","):
        try:
            row = measure(name, o.level, o.threads, o.rounds)
        except Exception as e:  # noqa: BLE001 - one row says what failed, the others follow
            row = {"network": name, "failed": f"{type(e).__name__}: {e}"[:400], "within": False}
        print(json.dumps(row), flush=True)
        with alone(RESULT):
            old = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
            rows = [r for r in old if r["network"] != name] + [row]
            data = provenance(["whet", "torch", "timm", "transformers", "onnx", "numpy", "llvmlite", "onednn-cpu-gomp"]) | {
                "limit": LIMIT, "within": sum(r["within"] for r in rows), "networks": len(rows), "rows": rows,
            }  # fmt: skip
            RESULT.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
