"""Networks exported by PyTorch itself, unprepared, on one GPU: whet's FP16 engine against torch eager and torch.compile, interleaved.

    python benchmarks/gpu_networks.py [--rows bert_base_128:1,vit_b_16:32,...] [--exporter torchscript|dynamo] [--peers eager,compile]
                                      [--budget SECONDS] [--limit SECONDS A ROW] [--layers] [--without PASS,...] [--lock FILE]

Each row is a process of its own: the network with random weights (seed 0) is exported to ONNX at a fixed batch, built at FP16 with verification
(cold caches), and timed in rounds that alternate between whet's engine, torch eager in FP16 (channels last for images) and torch.compile
(max-autotune); all are GPU times of isolated replays of a CUDA graph. `error` is the greatest difference from torch in FP32 on the CPU,
relative to the greatest output; `build_s` includes verification. A row that fails states the error. Results: $OUT/gpu_networks.json.
--layers adds the time of each layer of whet's engine in us (consecutive launches of the same layer overlap, as in the network), with its kernel.
--without times a second engine, built without these passes, interleaved with the others. --lock makes commands that run at once take turns from
the build on, so that one exports while another uses the GPU.
Needs torch, torchvision and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

#: makes (module with one output, named inputs) for a batch
Maker = Callable[[int], tuple[Any, dict[str, Any]]]
ROUNDS, REPLAYS = 7, 30
DEFAULT = (
    "bert_base_128:1", "vit_b_16:1", "convnext_tiny:1", "swin_t:1", "bert_base_128:32", "vit_b_16:32", "convnext_tiny:32", "bert_base_384:1",
    "gpt2_512:1", "llama_block_512:1", "distilbert_128:1", "t5_small_encoder_128:1", "clip_image:1", "clip_text:1", "whisper_tiny_encoder:1",
    "regnet_y_800mf:1", "efficientnet_b0:1", "densenet121:1", "mobilenet_v3_large:1", "shufflenet_v2_x1_0:1", "inception_v3:1",
    "resnext50_32x4d:1", "segformer_b0:1",
)  # fmt: skip


def text(batch: int, length: int, vocabulary: int) -> Any:
    import torch

    return torch.randint(1, vocabulary, (batch, length))


def hugging_face(config: str, model: str, inputs: Callable[[Any, int], dict[str, Any]], **options: Any) -> Maker:
    """A maker of (module with one output, named inputs) of a transformers model with its default attention implementation."""

    def make(batch: int) -> tuple[Any, dict[str, Any]]:
        import torch
        import transformers

        settings = getattr(transformers, config)(**options)
        net = getattr(transformers, model)(settings)
        named = inputs(settings, batch)

        class First(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, *values: Any) -> Any:
                return self.net(**dict(zip(named, values, strict=True)), **CALL.get(model, {}))[0]

        return First(), named

    return make


CALL: dict[str, dict[str, Any]] = {"GPT2Model": {"use_cache": False}, "LlamaModel": {"use_cache": False}}


def ids(length: int, mask: bool = False) -> Callable[[Any, int], dict[str, Any]]:
    def inputs(settings: Any, batch: int) -> dict[str, Any]:
        import torch

        named = {"input_ids": text(batch, length, settings.vocab_size)}
        if mask:
            named["attention_mask"] = (torch.arange(length)[None] < length - 5 * torch.arange(1, batch + 1)[:, None] % 40).long()
        return named

    return inputs


def pixels(name: str, size: int, channels: int = 3) -> Callable[[Any, int], dict[str, Any]]:
    def inputs(settings: Any, batch: int) -> dict[str, Any]:
        import torch

        return {name: torch.randn(batch, channels, size, size)}

    return inputs


def sound(settings: Any, batch: int) -> dict[str, Any]:
    import torch

    return {"input_features": torch.randn(batch, settings.num_mel_bins, 2 * settings.max_source_positions)}


def torchvision_network(name: str, size: int = 224) -> Maker:
    """A maker of a torchvision classifier; batch norms are calibrated on random images so that values keep their scale."""

    def make(batch: int) -> tuple[Any, dict[str, Any]]:
        import torch
        import torchvision

        options = {"init_weights": False, "aux_logits": True} if name == "inception_v3" else {}
        net = getattr(torchvision.models, name)(weights=None, **options)
        net.train()
        for part in net.modules():
            if isinstance(part, torch.nn.Linear) and not part.weight.any():
                torch.nn.init.normal_(part.weight, std=0.02)  # some heads begin with zeros, which would hide every error
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                part.momentum = None
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        with torch.no_grad():
            net(torch.randn(4, 3, size, size))
        return net, {"x": torch.randn(batch, 3, size, size)}

    return make


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LLAMA = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 8000,
}
NETWORKS: dict[str, Maker] = {
    "bert_base_128": hugging_face("BertConfig", "BertModel", ids(128)),
    "bert_base_128_mask": hugging_face("BertConfig", "BertModel", ids(128, mask=True)),
    "bert_base_384": hugging_face("BertConfig", "BertModel", ids(384)),
    "bert_large_384": hugging_face("BertConfig", "BertModel", ids(384), **LARGE),
    "distilbert_128": hugging_face("DistilBertConfig", "DistilBertModel", ids(128)),
    "roberta_128_mask": hugging_face("RobertaConfig", "RobertaModel", ids(128, mask=True)),
    "gpt2_512": hugging_face("GPT2Config", "GPT2Model", ids(512)),
    "t5_small_encoder_128": hugging_face("T5Config", "T5EncoderModel", ids(128)),
    "llama_block_512": hugging_face("LlamaConfig", "LlamaModel", ids(512), **LLAMA),
    "clip_image": hugging_face("CLIPVisionConfig", "CLIPVisionModel", pixels("pixel_values", 224)),
    "clip_text": hugging_face("CLIPTextConfig", "CLIPTextModel", ids(77)),
    "whisper_tiny_encoder": hugging_face("WhisperConfig", "WhisperEncoder", sound, d_model=384, encoder_layers=4, encoder_attention_heads=6),
    "segformer_b0": hugging_face("SegformerConfig", "SegformerModel", pixels("pixel_values", 512)),
    "deit_s": hugging_face(
        "DeiTConfig", "DeiTModel", pixels("pixel_values", 224), hidden_size=384, num_attention_heads=6, intermediate_size=1536
    ),
    **{
        name: torchvision_network(name)
        for name in (
            "vit_b_16", "swin_t", "convnext_tiny", "regnet_y_800mf", "efficientnet_b0", "efficientnet_b4", "densenet121", "mobilenet_v3_large",
            "shufflenet_v2_x1_0", "resnext50_32x4d", "resnet50",
        )
    },
    "inception_v3": torchvision_network("inception_v3", 299),
}  # fmt: skip


class Stages:
    """Prints each stage of a build with its time on standard error, for rows that are stopped; collects the notes."""

    def __init__(self) -> None:
        self.begun, self.notes = time.perf_counter(), list[str]()

    def stage(self, name: str, total: int) -> None:
        print(f"{time.perf_counter() - self.begun:.1f} s: {name} ({total})", file=sys.stderr, flush=True)

    def step(self, what: str, done: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def layer_times(plan: Any, bound: Any) -> list[tuple[str, str, float, str, str]]:
    """Kind, name, us, kernel and result shape of each layer, with launches."""
    rounds = [bound.run_timed() for _ in range(5)]
    rows = []
    for i, layer in enumerate(plan.network.layers):
        us = statistics.median(r[i] for r in rounds) * 1e6
        if us:
            kernel, shape = plan.choices[layer.name].implementation, "x".join(map(str, layer.outputs[0].shape))
            rows.append((layer.composite or layer.op, layer.name[-60:], round(us, 2), kernel, shape))
    return rows


def row_of(
    name: str, batch: int, exporter: str, peers: list[str], layers: bool = False, without: tuple[str, ...] = (), lock: str = ""
) -> dict[str, Any]:
    """The result of one network; runs in a process of its own."""
    import numpy as np
    import torch
    from _inductor import compiled
    from gpu_peers import by_events, graphed

    from whet.backends import get_backend
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.frontends.onnx import network_from_onnx
    from whet.runtime import Runtime, bind

    torch.manual_seed(0)
    net, named = NETWORKS[name](batch)
    net.eval()
    row: dict[str, Any] = {"network": name, "batch": batch, "exporter": exporter}
    values = tuple(named.values())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        want = net(*values)
        want = want.float().numpy()
        path = f"{folder}/model.onnx"
        begun = time.perf_counter()
        torch.onnx.export(net, values, path, input_names=list(named), output_names=["output"], dynamo=exporter == "dynamo", opset_version=18)
        row["export_s"] = round(time.perf_counter() - begun, 1)
        turn = contextlib.ExitStack()
        if lock:
            fcntl.flock(turn.enter_context(open(lock, "w")), fcntl.LOCK_EX)
        begun = time.perf_counter()
        stages = Stages()
        plan = build(network_from_onnx(path), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""), progress=stages)
        row["build_s"] = round(time.perf_counter() - begun, 1)
        row["phase_s"] = {phase: round(s, 1) for phase, s in plan.report.phase_seconds.items() if s >= 0.1}
        row["notes"] = [n for n in stages.notes if "ban" in n or "wrong" in n]
        row["layers"] = len(plan.network.layers)
        row["layer_kinds"] = _count(layer.composite or layer.op for layer in plan.network.layers)
        write_engine(plan, f"{folder}/model.engine")
        with Runtime().load(f"{folder}/model.engine") as engine:
            got = next(iter(engine.create_context().run({n: v.numpy() for n, v in named.items()}).values()))
        row["error"] = float(f"{np.abs(got.astype(np.float32) - want).max() / max(float(np.abs(want).max()), 1e-9):.2g}")
        bound = bind(plan, get_backend("cuda"))
        bound.run()
        if layers:
            row["layer_us"] = layer_times(plan, bound)
        sides: dict[str, Callable[[int], float]] = {"whet": lambda count: statistics.median(bound.seconds(count)) * 1e3}
        if without:
            other = build(
                network_from_onnx(path), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", passes=tuple(f"-{n}" for n in without))
            )
            other_bound = bind(other, get_backend("cuda"))
            other_bound.run()
            row["without"], row["without_layers"] = without, len(other.network.layers)
            if layers:
                row["without_layer_us"] = layer_times(other, other_bound)
            sides["without"] = lambda count: statistics.median(other_bound.seconds(count)) * 1e3
    device = [v.cuda().half() if v.is_floating_point() else v.cuda() for v in values]
    images = device[0].dim() == 4
    with torch.no_grad():
        fast = net.half().cuda()
        if images:
            fast, device = fast.to(memory_format=torch.channels_last), [v.to(memory_format=torch.channels_last) for v in device]
        for peer in peers:
            begun = time.perf_counter()
            run = fast if peer == "eager" else compiled(fast)
            replay = graphed(lambda run=run: run(*device))
            row[f"{peer}_prepare_s"] = round(time.perf_counter() - begun, 1)
            sides[peer] = lambda count, replay=replay: by_events(replay, count)
        times: dict[str, list[float]] = {s: [] for s in sides}
        for _ in range(ROUNDS):
            for side, measure in sides.items():
                times[side].append(measure(REPLAYS))
    for side, measured in times.items():
        row[f"{side}_ms"] = round(statistics.median(measured), 4)
        if side != "whet":
            row[f"against_{side}"] = round(statistics.median(b / a for a, b in zip(times["whet"], measured, strict=True)), 3)
    return row


def _count(kinds: Any) -> dict[str, int]:
    from collections import Counter

    return dict(Counter(kinds).most_common(12))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", default=",".join(DEFAULT), help="NETWORK:BATCH, separated by commas")
    p.add_argument("--exporter", choices=("torchscript", "dynamo"), default="torchscript", help="torch.onnx.export's two exporters")
    p.add_argument("--peers", default="eager", help="eager, compile or both")
    p.add_argument("--budget", type=float, default=1e9, help="no row begins after this many seconds")
    p.add_argument("--limit", type=float, default=420, help="seconds after which a row is stopped")
    p.add_argument("--layers", action="store_true", help="the time of each layer, too")
    p.add_argument("--without", default="", help="passes, separated by commas, that a second engine is built without")
    p.add_argument("--lock", default="", help="a file that processes lock while they build and measure")
    p.add_argument("--one", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        name, batch = args.one.split(":")
        peers, without = ([q for q in words.split(",") if q] for words in (args.peers, args.without))
        row = row_of(name, int(batch), args.exporter, peers, args.layers, tuple(without), args.lock)
        print("ROW " + json.dumps(row), flush=True)
        return
    from _record import provenance

    begun, rows = time.perf_counter(), []
    for asked in args.rows.split(","):
        if time.perf_counter() - begun > args.budget:
            print("left out:", asked, flush=True)
            continue
        command = [sys.executable, __file__, "--one", asked, "--exporter", args.exporter, "--peers", args.peers]
        command += ["--without", args.without, "--lock", args.lock] + ["--layers"] * args.layers
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
            lines = [line[4:] for line in ended.stdout.splitlines() if line.startswith("ROW ")]
            row = json.loads(lines[0]) if lines else {"failed": ended.stderr.strip()[-600:]}
        except subprocess.TimeoutExpired as stopped:
            reached = (stopped.stderr or b"").decode(errors="replace").strip()[-400:]
            row = {"failed": f"stopped after {args.limit:.0f} s; stages: {reached}"}
        name, batch = asked.split(":")
        rows.append({"network": name, "batch": int(batch), **row})
        print(json.dumps({k: v for k, v in rows[-1].items() if k not in ("layer_us", "without_layer_us")}), flush=True)
        folder = Path(os.environ.get("OUT", "."))
        record = {**provenance(("numpy", "torch", "torchvision", "transformers")), "rows": rows}
        (folder / "gpu_networks.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
