"""Whole networks on a GPU through the builder: engines of the zoo's networks, verified, timed as isolated replays of their CUDA graph.

Usage: python3 benchmarks/gpu_engines.py compile|run [--fp32|--noTF32] [--pure] resnet50:1 bert_base:8:sequence=128 ... (results in $OUT)
FP16 is permitted unless --fp32 (TF32 permitted) or --noTF32 is given; --pure excludes libraries.
`compile` fills the kernel cache (WHET_CUDA_CACHE) and needs no GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from _record import provenance

sys.path.insert(0, "src")
from whet import zoo
from whet.backends import get_backend
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.builder.candidates.enumerate import list_candidates
from whet.builder.lowering import lower_network
from whet.builder.precision.permissions import Permissions
from whet.engine.schema import encode
from whet.frontends.onnx import network_from_onnx
from whet.network import Network
from whet.runtime import bind
from whet.tactics import find_epilogue_steps, get_root_layer, list_tactics
from whet.tactics.cuda._device.kernel import match_epilogue
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import from_config, get_conv_shape

CONFIG = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="")


def network(name: str, batch: int, **options: int) -> Network:
    """The zoo's network at a fixed batch."""
    return network_from_onnx(zoo.build(name, batch=batch, **options))


def kernels(net: Network) -> set[str]:
    """Texts of all tensor-core kernels that a build of `net` would try."""
    machine = CompileOnlyGpu(executes=True)
    texts = set()
    lowered, _ = lower_network(net, CONFIG)
    tactics = [t for t in list_tactics("cuda") if t.name in ("cuda/conv", "cuda/stem_as_channels", "cuda/gemm")]
    for layer in lowered.layers:
        for o in list_candidates(layer, tactics, machine, Permissions.of(CONFIG)).options:
            axis = layer.outputs[0].type.rank - 1 if "gemm" in o.tactic.name else 1
            kind = match_epilogue(layer, find_epilogue_steps(layer), axis).post_ops.activation[0]
            tile = from_config(o.config)
            im2col = "stem" in o.tactic.name or (get_root_layer(layer).op == "Conv" and not get_conv_shape(layer).plain and not tile.halo)
            texts.add(emit_conv_source(tile, Features(im2col, kind, out_f32=o.signature.outputs[0].dtype.name == "f32")))
    return texts


def compile_all(wanted: list[tuple[str, int]]) -> None:
    texts = set().union(*(kernels(network(*w)) for w in wanted))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        total = sum(len(code) for code in pool.map(compile_cubin, sorted(texts)))
    print(len(texts), "kernels", round(total / 1e6, 1), "MB")


def engines(wanted: list[tuple], config: BuildConfig = CONFIG) -> list[dict]:
    """A row of results per network; verified against the reference."""
    machine, rows = get_backend("cuda"), []
    for name, batch, *rest in wanted:
        net, begun = network(name, batch, **(rest[0] if rest else {})), time.perf_counter()
        plan = build(net, config)
        took = time.perf_counter() - begun
        bound = bind(plan, machine)
        bound.run()
        times = bound.seconds(60)[10:]
        layers = [
            {
                "layer": layer.name,
                "op": layer.composite or layer.op,
                "tactic": plan.choices[layer.name].tactic,
                "config": dict(plan.choices[layer.name].config),
                "us": round(us * 1e6, 2),
            }
            for layer, us in zip(plan.network.layers, bound.run_timed(), strict=True)
        ]
        rows.append(
            {
                "network": name,
                "batch": batch,
                "ms": round(statistics.median(times) * 1e3, 4),
                "min_ms": round(min(times) * 1e3, 4),
                "build_s": round(took, 1),
                "allowed": list(config.precisions) or list(config.tactic_sources),
                "verification": encode(plan.report.verification),
                "bytes": bound.nbytes(),
                "state": machine.state(),
                "layers": layers,
            }
        )
        print({k: v for k, v in rows[-1].items() if k not in ("layers", "state", "verification")}, flush=True)
        with open(os.environ.get("OUT", ".") + "/engines.json", "w") as out:
            json.dump({**provenance(("numpy", "cuda-bindings")), "device": machine.describe()["model"], "rows": rows}, out, indent=1)
    return rows


if __name__ == "__main__":
    flags = [w for w in sys.argv[2:] if w.startswith("--")]
    asked = []
    for word in (w for w in sys.argv[2:] if not w.startswith("--")):
        net_name, size, *more = word.split(":")
        asked.append((net_name, int(size), {k: int(v) for k, v in (m.split("=") for m in more)}))
    sources = (("-TF32",) if "--noTF32" in flags else ()) + (("-CUBLASLT", "-CUDNN") if "--pure" in flags else ())
    wide = {"--fp32", "--noTF32"} & set(flags)
    chosen = replace(CONFIG, precisions=() if wide else ("fp16",), tactic_sources=sources)
    if sys.argv[1] == "compile":
        compile_all([(n, b) for n, b, _ in asked])
    else:
        engines(asked, chosen)
