"""A small real case: scikit-learn's digits (8x8) and a perceptron trained on them, as a model, data files and a recipe."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network, parse_type

RECIPE = {
    "model": "model.onnx",
    "data": {"calibrate": "calibrate.npz", "score": "score.npz", "judge": "judge.npz"},
    "target": {"engine_size": "0.6x", "accuracy_drop": 2},
    "space": {"width": {"step": 0.25, "most": 0.75}, "precision": ["fp32"]},
    "scout": {"samples": 64, "rows": 512, "level": 1, "seconds": 0.05},
    "survivor": {"samples": 128, "rows": 1024, "level": 2, "seconds": 0.1, "count": 2},
    "search": {"trials": 5, "seed": 3},
    "finetune": False,
    "threads": 1,
    "baselines": ["fp32"],
}


def read_network(case: Path) -> Network:
    """The network of a case's model."""
    return network_from_onnx(case / "model.onnx")


@cache
def perceptron() -> tuple[Network, dict[str, np.ndarray]]:
    """A trained network of digits [N,64] -> scores [N,10], and the data: 1000 to train on, then 400 and 397 others."""
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    x, y = load_digits(return_X_y=True)
    at = np.random.RandomState(0).permutation(len(x))
    x, y = (x[at] / 16).astype(np.float32), y[at].astype(np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it stops before convergence, which is accurate enough
        trained = MLPClassifier((96, 64), max_iter=25, random_state=0).fit(x[:1000], y[:1000])
    net = Network("digits")
    value = net.add_input("x", parse_type("f32[N,64]"))
    for k, (w, b) in enumerate(zip(trained.coefs_, trained.intercepts_, strict=True)):
        weights = net.constant(w.astype(np.float32), f"w{k}"), net.constant(b.astype(np.float32), f"b{k}")
        value = net.add("Gemm", value, *weights, name=f"dense{k}")
        if k < 2:
            value = net.add("Relu", value, name=f"relu{k}")
    net.mark_output(value)
    return net, {"x": x, "y": y}


@pytest.fixture(scope="session")
def case(tmp_path_factory) -> Path:
    """A folder with model.onnx, calibrate.npz, score.npz, judge.npz and recipe.yaml (JSON is YAML)."""
    folder = tmp_path_factory.mktemp("case")
    net, d = perceptron()
    save_onnx(net, folder / "model.onnx")
    np.savez(folder / "calibrate.npz", x=d["x"][:256])
    np.savez(folder / "score.npz", x=d["x"][1000:1400], labels=d["y"][1000:1400])
    np.savez(folder / "judge.npz", x=d["x"][1400:], labels=d["y"][1400:])
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    return folder


def recipe_with(case: Path, out: Path, **changes):
    """The case's recipe with changed values; `search.trials` is written search__trials."""
    from whet.search import recipe_from

    plain = json.loads(json.dumps(RECIPE)) | {"out": str(out)}
    for name, value in changes.items():
        *way, last = name.split("__")
        place = plain
        for step in way:
            place = place.setdefault(step, {})
        place[last] = value
    return recipe_from(plain, case)
