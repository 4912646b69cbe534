"""NVIDIA's Python samples for TensorRT, unchanged, with whet.trt as `tensorrt` on the CPU: which run, and the requirements of the others.

    python benchmarks/tensorrt_samples.py CHECKOUT [--samples name,...] [--data FOLDER]

Needs pip install torchvision pillow cuda-bindings polygraphy. CHECKOUT is a checkout of github.com/NVIDIA/TensorRT; nothing is fetched, and no file
of it is copied. Models and images that a sample would download come from the folder of real data (--data or WHET_DATA): SqueezeNet 1.1 in place of
ResNet-50, photos of its three classes, and the first images of MNIST. Writes results/cpu/tensorrt_samples.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _record import alone, provenance

SOURCE = Path(__file__).resolve().parents[1] / "src"
RESULT = Path(__file__).parent / "results" / "cpu" / "tensorrt_samples.json"
MNIST = Path("/tmp/mnist/data/MNIST/raw")  # the path in the sample
LIMIT = 1500  # seconds
NOT_RUN = {
    "aliased_io_plugin": "kernels in Triton",
    "attention_mdtrt": "several GPUs",
    "cute_dsl_plugin": "kernels in CuTe",
    "dds_faster_rcnn": "shapes that depend on data",
    "detectron2": "Detectron 2, and a plugin of NVIDIA's library for NMS",
    "engine_refit_onnx_bidaf": "a model that it downloads; tests/trt/test_trt_refitter.py refits in its way",
    "non_zero_plugin": "shapes that depend on data",
    "onnx_custom_plugin": "a plugin in C++, which nvcc compiles",
    "onnx_packnet": "a repository that it downloads; it only converts a model",
    "python_plugin": "kernels in CuPy, Numba, Triton or CUDA C++, or tensors on a GPU; tests/trt/test_trt_plugins.py runs such a plugin on the CPU",
    "quickly_deployable_plugins": "the decorators of tensorrt.plugin, which are not served",
    "refactored": "notebooks, without a script",
    "sample_weight_stripping": "engines without weights (STRIP_PLAN), which are not served",
    "strongly_type_autocast": "NVIDIA's ModelOpt, and a model that it downloads",
}


def prepare_classifier(folder: Path, data: Path) -> list[str]:
    """The files of the ResNet-50 samples: a trained network of one image, three photos and the labels. A sample takes one photo at random; SqueezeNet
    calls the tiger cat a coyote, in ONNX Runtime too, so "Incorrectly recognized" is a sample that ran."""
    import onnx

    sample = np.load(data / "imagenet_sample" / "imagenet1000_224.npz")
    names = [str(n).partition("_")[2].replace("_", " ") for n in sample["name"]]
    ends = np.cumsum(sample["len"].astype(np.int64))
    for file, label in (("binoculars.jpeg", "binoculars"), ("reflex_camera.jpeg", "reflex camera"), ("tabby_tiger_cat.jpg", "tiger cat")):
        i = next(k for k, n in enumerate(names) if n.lower() == label)
        (folder / file).write_bytes(sample["jpeg"][ends[i] - sample["len"][i] : ends[i]].tobytes())
    (folder / "class_labels.txt").write_text("\n".join(n.lower() for n in names))
    model = onnx.load(data / "imagenet_sample" / "squeezenet1.1.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, folder / "ResNet50.onnx")
    return ["-d", str(folder)]


def prepare_mnist(folder: Path, data: Path) -> list[str]:
    """The first images of MNIST in the files that torchvision would download."""
    arrays = np.load(data / "mnist" / "mnist_20k_10k.npz")
    MNIST.mkdir(parents=True, exist_ok=True)
    for name, part, n in (("train", "train", 3200), ("t10k", "test", 500)):
        images, labels = arrays[f"x_{part}"][:n], arrays[f"y_{part}"][:n].astype(np.uint8)
        for kind, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            head = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            (MNIST / f"{name}-{kind}").write_bytes(head + array.tobytes())
    return []


def prepare_nothing(folder: Path, data: Path) -> list[str]:
    """A sample that needs no data."""
    return []


SAMPLES = {
    "introductory_parser_samples": ("onnx_resnet50.py", prepare_classifier, "orrectly recognized "),
    "network_api_pytorch_mnist": ("sample.py", prepare_mnist, "Prediction: "),
    "simple_progress_monitor": ("simple_progress_monitor.py", prepare_classifier, "orrectly recognized "),
    "stream_writer": ("build.py", prepare_nothing, "Engine deserialized successfully"),
}


def run_sample(name: str, checkout: Path, data: Path) -> dict[str, Any]:
    """Runs a sample. Returns True if it succeeded, and its last line."""
    script, prepare, wanted = SAMPLES[name]
    path = checkout / "samples" / "python" / name / script
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "whet.trt", str(path), *prepare(Path(folder), data)]
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": folder}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
        lines = [line for line in io.StringIO(re.sub(r"\x1b\[\d*[A-Za-z]", "", done.stdout).replace(folder, "FOLDER")) if line.strip()]
        row = {"sample": name, "runs": done.returncode == 0 and wanted in done.stdout, "said": next((x.strip() for x in lines if wanted in x), "")}
        if not row["runs"]:
            row["said"] = (done.stderr or done.stdout)[-300:].replace(str(checkout), "CHECKOUT").replace(folder, "FOLDER")
        if "Test Case: " in done.stdout:  # the label, and the prediction below it
            row["said"] = ", ".join(x.strip() for x in lines[-2:])
    return row


def main() -> None:
    """Runs the samples one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--samples", default=",".join(SAMPLES))
    parser.add_argument("--data", type=Path, default=os.environ.get("WHET_DATA"))
    o = parser.parse_args()
    found = {p.name for p in (o.checkout / "samples" / "python").iterdir() if p.is_dir()}
    if unknown := found - set(SAMPLES) - set(NOT_RUN):
        print(f"neither run nor excluded: {', '.join(sorted(unknown))}", file=sys.stderr)
    for name in o.samples.split(","):
        row = run_sample(name, o.checkout.resolve(), o.data)
        print(json.dumps(row), flush=True)
        with alone(RESULT):
            old = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
            rows = [r for r in old if r["sample"] in SAMPLES and r["sample"] != name] + [row]
            rows = sorted(rows, key=lambda r: r["sample"])
            rows += [{"sample": n, "runs": False, "said": f"not run: it needs {why}"} for n, why in NOT_RUN.items()]
            data = provenance(["whet", "torch", "torchvision", "cuda-bindings", "polygraphy", "onnx", "numpy"])
            RESULT.write_text(json.dumps(data | {"run": sum(r["runs"] for r in rows), "samples": len(rows), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
