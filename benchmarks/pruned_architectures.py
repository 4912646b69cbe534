"""Structured pruning over architectures of timm, torchvision and transformers, and over small networks of other families, with random weights:
each is exported, pruned by ratio and by FLOPs, and the cut network is compared with the original with its removed channels set to zero.

    python benchmarks/pruned_architectures.py [--only NAME,..] [--workers N] [--limit SECONDS] [--total SECONDS] [--out FILE.json] [--resume]

Each architecture runs in a process of its own, which may be killed after --limit seconds. A row has the share of parameters (ratio 0.5) and of
FLOPs (target 0.6) that is kept, the largest difference relative to the largest output (ONNX Runtime), and the error text of a failure.
`--resume` keeps the rows of FILE.json that succeeded at any commit; every row names its own, and its machine. Needs timm,
torchvision, transformers and onnxscript.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _small_architectures
from _record import describe_origin, provenance

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

PACKAGES = ("whet", "numpy", "onnx", "onnxruntime", "torch", "timm", "torchvision", "transformers")

RATIO, FLOPS = 0.5, 0.6
#: timm model: image size
TIMM: dict[str, int] = {
    "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64, "res2net50_26w_4s": 64, "resnest14d": 64, "skresnet18": 64, "ecaresnet26t": 64,
    "legacy_seresnet18": 64, "gcresnext26ts": 64, "densenet121": 64, "dla34": 64, "dpn48b": 64, "vgg11_bn": 64, "mobilenetv2_050": 64,
    "mobilenetv3_small_050": 64, "mobilenetv4_conv_small": 64, "efficientnet_b0": 64, "tf_efficientnetv2_b0": 64, "efficientnet_lite0": 64,
    "mnasnet_small": 64, "mixnet_s": 64, "ghostnet_050": 64, "regnetx_002": 64, "regnety_002": 64, "hrnet_w18_small": 64, "inception_v3": 96,
    "selecsls42": 64, "cspresnet50": 64, "cspdarknet53": 64, "repvgg_a0": 64, "rexnet_100": 64, "hardcorenas_a": 64, "fbnetc_100": 64,
    "spnasnet_100": 64, "semnasnet_050": 64, "lcnet_050": 64, "tinynet_e": 64, "nf_resnet26": 64, "convnext_atto": 64, "convnextv2_atto": 64,
    "edgenext_xx_small": 64, "mobileone_s0": 64, "ese_vovnet19b_dw": 64, "gernet_s": 64, "botnet26t_256": 256, "visformer_tiny": 224,
    "fastvit_t8": 64, "repghostnet_050": 64, "starnet_s1": 64, "inception_next_atto": 64, "vit_tiny_patch16_224": 64,
    "deit_tiny_distilled_patch16_224": 64,
    "swin_tiny_patch4_window7_224": 224, "crossvit_9_240": 240, "levit_128s": 224, "mobilevit_xxs": 64, "mobilevitv2_050": 64,
    "maxvit_rmlp_pico_rw_256": 256, "coatnet_pico_rw_224": 224, "pvt_v2_b0": 64, "twins_svt_small": 64, "xcit_nano_12_p16_224": 64,
    "poolformer_s12": 64, "mixer_s32_224": 224, "resmlp_12_224": 224, "gmlp_s16_224": 224, "efficientformer_l1": 224, "efficientvit_b0": 64,
    "efficientvit_m0": 224, "tiny_vit_5m_224": 224, "eva02_tiny_patch14_224": 224, "volo_d1_224": 224, "pit_ti_224": 224, "convit_tiny": 224,
    "focalnet_tiny_srf": 224, "davit_tiny": 64, "mvitv2_tiny": 224, "repvit_m0_9": 64, "gcvit_xxtiny": 224, "caformer_s18": 64,
}  # fmt: skip
TORCHVISION: dict[str, int] = {
    "alexnet": 64, "squeezenet1_1": 64, "shufflenet_v2_x0_5": 64, "googlenet": 64, "mnasnet0_5": 64, "efficientnet_v2_s": 64, "swin_v2_t": 64,
}  # fmt: skip
_TEXT = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
#: transformers model class: (config class, options)
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", _TEXT),
    "RobertaModel": ("RobertaConfig", _TEXT),
    "AlbertModel": ("AlbertConfig", {**_TEXT, "embedding_size": 32}),
    "ElectraModel": ("ElectraConfig", {**_TEXT, "embedding_size": 32}),
    "DistilBertModel": ("DistilBertConfig", {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}),
    "GPT2Model": ("GPT2Config", {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "LlamaModel": ("LlamaConfig", {**_TEXT, "num_key_value_heads": 2}),
    "Qwen2Model": ("Qwen2Config", {**_TEXT, "num_key_value_heads": 2}),
    "T5EncoderModel": ("T5Config", {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}),
}


def networks() -> list[str]:
    """All names, with the package in front."""
    families = (("timm", TIMM), ("torchvision", TORCHVISION), ("transformers", TRANSFORMERS), ("small", _small_architectures.NETWORKS))
    return [f"{package}/{name}" for package, names in families for name in names]


def module_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The module in eval mode with calibrated batch norms and without zero scales, and example inputs of a batch of two."""
    import torch

    torch.manual_seed(0)
    package, _, model = name.partition("/")
    if package == "transformers":
        import transformers

        config, options = TRANSFORMERS[model]
        net = getattr(transformers, model)(getattr(transformers, config)(**options, attn_implementation="eager"))

        class First(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, ids: Any) -> Any:
                more = {"use_cache": False} if model in ("GPT2Model", "LlamaModel", "Qwen2Model") else {}
                return self.net(input_ids=ids, **more)[0]

        return First().eval(), (torch.randint(1, 100, (2, 16)),)
    if package == "small":
        net, inputs = _small_architectures.make(model)
        return _initialized(net, inputs), inputs
    size = (TIMM if package == "timm" else TORCHVISION)[model]
    if package == "timm":
        import timm

        more: dict[str, Any] = {"img_size": size} if model.startswith(("vit", "deit")) else {}
        try:
            net = timm.create_model(model, pretrained=False, num_classes=20, exportable=True, **more)
        except TypeError:
            net = timm.create_model(model, pretrained=False, num_classes=20)
    else:
        import torchvision

        more = {"aux_logits": False, "init_weights": True} if model == "googlenet" else {}
        net = getattr(torchvision.models, model)(weights=None, num_classes=20, **more)
    x = torch.randn(4, 3, size, size)
    return _initialized(net, (x,)), (x[:2],)


def _initialized(net: Any, inputs: tuple[Any, ...]) -> Any:
    """The module in eval mode, with batch norms calibrated on the inputs and without scales that hide a branch."""
    import torch

    for part in net.modules():
        for which, p in part.named_parameters(recurse=False):
            if p.ndim and p.numel() > 1 and not p.any():
                torch.nn.init.normal_(p, mean=1.0 if which == "weight" and p.ndim == 1 else 0.0, std=0.05)
            elif p.ndim <= 1 and p.numel() > 1 and float(p.detach().abs().max()) < 1e-3:
                torch.nn.init.normal_(p, mean=0.5, std=0.1)  # a layer scale that hides its branch
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.momentum = None
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    net.train()
    with torch.no_grad():
        net(*inputs)
    return net.eval()


def outputs_of(net: Any, feeds: dict[str, Any]) -> list[Any]:
    """Outputs by ONNX Runtime."""
    import onnxruntime

    from whet.frontends import onnx_from_network

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(onnx_from_network(net).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def difference(a: list[Any], b: list[Any]) -> float:
    """Largest difference, relative to the largest value of that output."""
    import numpy as np

    return max(float(np.abs(x - y).max() / max(float(np.abs(y).max()), 1e-12)) for x, y in zip(a, b, strict=True))


def examine(name: str) -> dict[str, Any]:
    """The row of one architecture."""
    import torch

    from whet.frontends import network_from_onnx
    from whet.pruning import PruneConfig, Target, count_flops, count_params, groups, prune, zero_channels

    torch.set_num_threads(1)
    row: dict[str, Any] = {"name": name}
    start = time.perf_counter()

    def stage(text: str) -> None:
        row["stage"], row["seconds"] = text, round(time.perf_counter() - start, 1)
        print(json.dumps(row), flush=True)

    stage("export")
    module, inputs = module_of(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        names = ["x"]
        try:
            torch.onnx.export(module, inputs, path, input_names=names, output_names=["y"], opset_version=17, dynamo=False)
        except Exception as e:  # noqa: BLE001 - any failure of the older exporter: the newer one
            row["exporter"] = f"dynamo ({type(e).__name__})"
            torch.onnx.export(module, inputs, path, input_names=names, output_names=["y"], opset_version=18, dynamo=True, verbose=False)
        stage("read")
        net = network_from_onnx(path)
    feeds = {net.inputs[0].name: inputs[0].numpy()}
    original = outputs_of(net, feeds)
    stage("groups")
    channel_groups = groups(net)
    row["groups"], row["params"] = len(channel_groups), count_params(net)
    for what, config in (("ratio", PruneConfig(ratio=RATIO)), ("flops", PruneConfig(target=Target("flops", ratio=FLOPS)))):
        stage(f"prune by {what}")
        done = prune(net, config)
        row[what] = round(count_params(done.cut) / row["params"] if what == "ratio" else count_flops(done.cut) / count_flops(net), 4)
        stage(f"compare by {what}")
        zeroed = zero_channels(net, done.recipe.kept(), channel_groups, removed=done.recipe.removed)
        got, want = outputs_of(done.cut, feeds), outputs_of(zeroed, feeds)
        row[f"{what}_error"], row[f"{what}_change"] = difference(got, want), round(difference(want, original), 4)
    row["stage"] = "done"
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def run_one(name: str, limit: float) -> dict[str, Any]:
    """The row of one architecture, from a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=limit, env=environment)
        lines, failed = done.stdout, done.returncode != 0
        error = done.stderr.strip().splitlines()[-1][:400] if failed and done.stderr.strip() else ""
    except subprocess.TimeoutExpired as e:
        lines = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        failed, error = True, f"over {limit:.0f} s"
    rows = [json.loads(x) for x in lines.splitlines() if x.startswith("{")]
    row = rows[-1] if rows else {"name": name, "stage": "start"}
    return {**row, "error": error or "no output"} if failed else row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one architecture")
    parser.add_argument("--total", type=float, default=1e9, help="seconds after which no architecture starts")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the successful rows of the result file")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(examine(args.one)), flush=True)
        return
    names = args.only.split(",") if args.only else networks()
    if unknown := set(names) - set(networks()):
        parser.error(f"--only: no network is named {', '.join(sorted(unknown))}; names are as in the table, such as timm/vgg11_bn")
    stamp = provenance(PACKAGES)
    rows = json.loads(args.out.read_text())["rows"] if args.resume else []
    rows = [r for r in rows if "error" not in r or r["name"] not in names]
    names = [n for n in names if n not in {r["name"] for r in rows}]
    end, order = time.monotonic() + args.total, networks()

    def work(name: str) -> dict[str, Any] | None:
        left = end - time.monotonic()
        return run_one(name, min(args.limit, left)) if left > 0 else None

    with ThreadPoolExecutor(args.workers) as pool:
        for row in pool.map(work, names):
            if row is not None:
                rows.append({**row, **describe_origin(stamp)})
                print(json.dumps(row), flush=True)
                if args.out:
                    rows.sort(key=lambda r: order.index(r["name"]))
                    counts = {"networks": len(rows), "pruned": sum(r["stage"] == "done" for r in rows)}
                    args.out.write_text(json.dumps({**stamp, "ratio": RATIO, "flops": FLOPS, **counts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
