"""whet and its peers on one GPU in one run: FP16 networks as whet's engines, torch eager in a CUDA graph, torch.compile max-autotune.

GPU time of isolated replays, inputs on the device, random data (whet reads f32 images as they come, torch f16 channels-last ones).
Usage: python3 benchmarks/gpu_peers.py resnet50:1 resnet50:128 ...     results in $OUT/peers.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

from gpu_engines import engines


def torch_times(name: str, batch: int) -> dict[str, float]:
    """Median ms of 50 replays by events: "eager" (CUDA graph) and "compile"."""
    import torch
    import torch._inductor.config as inductor
    import torchvision

    inductor.conv_1x1_as_mm = True
    inductor.max_autotune_conv_backends = "ATEN"  # cuDNN wins its convolutions against Inductor's own
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    torch._dynamo.reset()
    model = getattr(torchvision.models, name)(weights=None).eval().half().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)

    def median(run) -> float:
        times = []
        for i in range(60):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            run()
            b.record()
            b.synchronize()
            if i >= 10:
                times.append(a.elapsed_time(b))
        return statistics.median(times)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = model(x)
    found = {"eager_ms": median(graph.replay)}
    del kept
    started = time.perf_counter()
    compiled = torch.compile(model, mode="max-autotune")
    for _ in range(3):
        compiled(x)
    torch.cuda.synchronize()
    found["compile_s"] = time.perf_counter() - started
    found["compile_ms"] = median(lambda: compiled(x))
    return found


if __name__ == "__main__":
    asked = [(name, int(batch)) for name, batch in (word.split(":") for word in sys.argv[1:])]
    rows = [{k: v for k, v in row.items() if k != "layers"} for row in engines(asked)]
    for row in rows:
        row |= {k: round(v, 4) for k, v in torch_times(row["network"], row["batch"]).items()}
        print(
            f"{row['network']:14} batch {row['batch']:4}  whet {row['ms']:.4f} ms (built in {row['build_s']} s)  torch eager {row['eager_ms']:.4f}"
            f"  compile {row['compile_ms']:.4f} (in {row['compile_s']:.0f} s)  lead {min(row['eager_ms'], row['compile_ms']) / row['ms']:.2f}x",
            flush=True,
        )
        with open(os.environ.get("OUT", ".") + "/peers.json", "w") as out:
            json.dump(rows, out, indent=1)
