"""Samplers of `whet auto` compared at an equal number of trials: the hypervolume that each reaches on real networks, over several seeds.

    python benchmarks/search_samplers.py record --data FOLDER --model resnet8 --trials 200 --table FILE.json [--limit SECONDS]
    python benchmarks/search_samplers.py compare --tables FILE.json .. --out benchmarks/results/cpu/search_samplers.json [--trials 40] [--seeds 10]

`record` runs real trials at random points of the space that `whet auto` searches (widths by class and depth, FP32): prune by L1, recover on 64
unlabelled images, top-1 on test images, and FLOPs as cost, which no load of the machine disturbs. It resumes. `compare` fits a model to these trials
(extra trees on FLOPs and on accuracy; its cross-validated error is in the result) and lets every sampler search it: random, Optuna's TPE as it comes
(`TPESampler()` and with `multivariate=True`), its NSGA-II, and the samplers of whet with the points that its search tries first. `hypervolume` is the
area in (share of the FLOPs, points of accuracy lost) below the original's FLOPs and 10 points, as a share of that rectangle, averaged over the seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from _record import provenance
from pruning_defaults import normalized, top1

from whet.frontends import network_from_onnx
from whet.pruning import count_flops
from whet.pruning.depth import branches
from whet.search.recipe.recipe import Effort, recipe_from
from whet.search.recipe.space import SearchSpace, search_space
from whet.search.stages.prepare import prepare_candidate
from whet.search.study.study import make_sampler
from whet.search.study.surrogate import Reference, hypervolume

FILES = {"resnet8": "cifar10/resnet8_mlperftiny.onnx", "resnet20": "cifar10/resnet20_cifar10.onnx", "vit_mnist": "mnist/vit_mnist.onnx"}
LOSS, SCALE = 10.0, 2.0  # points of accuracy: the largest loss of interest, and a permitted one
IMAGES, TESTED = 64, 500
SAMPLERS = ("random", "Optuna TPE", "Optuna TPE, multivariate", "Optuna NSGA-II", "whet tpe", "whet gp")
Evaluate = Callable[[dict[str, Any]], tuple[float, float]]


def load(data: Path, model: str) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """The network, test images and labels, and images to recover on."""
    net = network_from_onnx(data / FILES[model])
    if model.endswith("mnist"):
        arrays = np.load(data / "mnist" / "mnist_20k_10k.npz")
        some = np.random.default_rng(0).choice(len(arrays["x_test"]), TESTED, replace=False)
        tested, pool = ((a[:, None].astype(np.float32) / 255 - 0.1307) / 0.3081 for a in (arrays["x_test"][some], arrays["x_train"][:1000]))
        return net, tested.astype(np.float32), arrays["y_test"][some], pool.astype(np.float32)
    arrays = np.load(data / "cifar10" / "cifar10_lossless.npz")
    plain = model == "resnet8"  # it takes pixels as they are
    prepared = (lambda a: np.ascontiguousarray(a.transpose(0, 3, 1, 2), np.float32)) if plain else normalized
    return net, prepared(arrays["x_test"][:TESTED]), arrays["y_test"][:TESTED], prepared(arrays["x_train"][:1000])


def space_of(net: Any, data: Path, model: str, order: list[str]) -> SearchSpace:
    """The space of a search with widths and depth."""
    source = str(data / FILES[model])
    plain = {"model": source, "data": {"calibrate": str(data / "mnist"), "score": str(data / "mnist")}, "target": {"accuracy_drop": SCALE},
             "space": {"precision": "fp32"}, "baselines": "fp32"}  # fmt: skip
    return search_space(net, recipe_from(plain), order)


def record(args: argparse.Namespace) -> None:
    """Appends real trials to the table until it has --trials of them or the time is up."""
    start = time.monotonic()
    net, images, labels, pool = load(args.data, args.model)
    order = [b.name for b in branches(net)]
    space = space_of(net, args.data, args.model, order)
    dimensions = {d.name: list(d.values) or [round(d.least + i * d.step, 6) for i in range(round((d.most - d.least) / d.step) + 1)]
                  for d in space.dimensions}  # fmt: skip
    table: dict[str, Any] = {
        **provenance(("whet", "numpy", "onnxruntime")), "model": args.model, "tested": TESTED, "images": IMAGES, "dimensions": dimensions, "rows": []
    }  # fmt: skip
    if args.table.exists():
        table = json.loads(args.table.read_text())
    else:
        table["original"] = [count_flops(net), top1(net, images, labels)]
    rng = np.random.default_rng(1)
    points = space.seeds()
    for _ in range(args.trials):  # deep cuts everywhere lose all accuracy: the largest share varies, so that all losses occur
        most = rng.random()
        points.append({k: v[int(rng.random() * (most if len(v) > 2 else 1) * len(v))] for k, v in table["dimensions"].items()})
    points = [{**{k: v[0] for k, v in table["dimensions"].items()}, **p} for p in points[: args.trials]]
    for params in points:
        if any(r["params"] == params for r in table["rows"]) or time.monotonic() - start > args.limit:
            continue
        candidate = space.candidate(params)
        some = np.random.default_rng(0).choice(len(pool), IMAGES, replace=False)
        made = prepare_candidate(net, candidate, space.kept(candidate), {net.inputs[0].name: pool[some]}, Effort(), say=lambda what: None)
        table["rows"].append({"params": params, "flops": count_flops(made.network), "top1": top1(made.network, images, labels)})
        args.table.write_text(json.dumps(table) + "\n")
    print(f"{args.model}: {len(table['rows'])} trials recorded", flush=True)


def fitted(table: dict[str, Any]) -> tuple[Evaluate, dict[str, float]]:
    """A model of the trials, (share of FLOPs, top-1) of a point, and the cross-validated error of both."""
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.model_selection import cross_val_predict

    names = list(table["dimensions"])
    x = np.array([[r["params"][n] for n in names] for r in table["rows"]], float)
    flops, best = table["original"]
    y = np.array([(r["flops"] / flops, r["top1"]) for r in table["rows"]])
    logarithmic = np.log1p(np.maximum(best - y[:, 1], 0))  # the cliff of the accuracy
    made = [ExtraTreesRegressor(300, min_samples_leaf=1, random_state=0) for _ in range(2)]
    guessed = [cross_val_predict(m, x, v, cv=10) for m, v in zip(made, (y[:, 0], logarithmic), strict=True)]
    for m, v in zip(made, (y[:, 0], logarithmic), strict=True):
        m.fit(x, v)
    near = best - y[:, 1] < 2 * LOSS
    errors = {"flops_error": float(np.abs(guessed[0] - y[:, 0]).mean()),
              "top1_error": float(np.abs(best - np.expm1(guessed[1]) - y[:, 1])[near].mean()), "near": int(near.sum())}  # fmt: skip
    known: dict[tuple, tuple[float, float]] = {}

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        key = tuple(params[n] for n in names)
        if key not in known:
            row = np.array([key], float)
            known[key] = float(made[0].predict(row)[0]), float(best - np.expm1(made[1].predict(row)[0]))
        return known[key]

    return evaluate, errors


def run(sampler: str, seed: int, trials: int, table: dict[str, Any], evaluate: Evaluate, seeds: list[dict[str, Any]]) -> list[float]:
    """The hypervolume after each trial of one search."""
    best, startup = table["original"][1], max(4, min(10, trials // 3))
    plain = {
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "Optuna TPE": lambda: optuna.samplers.TPESampler(seed=seed),
        "Optuna TPE, multivariate": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True),
        "Optuna NSGA-II": lambda: optuna.samplers.NSGAIISampler(seed=seed),
    }
    reference = Reference(1.0, LOSS - best, SCALE)
    made = plain[sampler]() if sampler in plain else make_sampler(optuna, sampler.removeprefix("whet "), seed, startup, -1, reference)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=made)
    for point in seeds[: max(1, trials // 2)] if sampler not in plain else ():
        study.enqueue_trial(point)
    reached, values = [], []
    for _ in range(trials):
        trial = study.ask()
        params = {}
        for name, choices in table["dimensions"].items():
            if name == "depth":
                params[name] = trial.suggest_categorical(name, choices)
            else:
                params[name] = round(trial.suggest_float(name, choices[0], choices[-1], step=round(choices[1] - choices[0], 6)), 6)
        cost, accuracy = evaluate(params)
        trial.set_user_attr("misses", [max(0.0, (best - accuracy) / SCALE - 1)])
        study.tell(trial, [cost, accuracy])
        values.append((cost, -accuracy))
        reached.append(hypervolume(np.array(values), (1.0, LOSS - best)) / LOSS)
    return reached


def compare(args: argparse.Namespace) -> None:
    """Runs all samplers on the models of the tables."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = []
    for path in args.tables:
        table = json.loads(path.read_text())
        evaluate, errors = fitted(table)
        net, *_ = load(args.data, table["model"])
        seeds = space_of(net, args.data, table["model"], [b.name for b in branches(net)]).seeds()
        seeds = [{**{k: v[0] for k, v in table["dimensions"].items()}, **p} for p in seeds]
        of_random: np.ndarray | None = None
        for sampler in args.samplers:
            start = time.perf_counter()
            reached = np.array([run(sampler, seed, args.trials, table, evaluate, seeds) for seed in range(args.seeds)])
            of_random = reached if of_random is None else of_random
            last, half = reached[:, -1], reached[:, args.trials // 2 - 1]
            paired = last - of_random[:, -1]
            rows.append({
                "model": table["model"], "recorded": len(table["rows"]), "dimensions": len(table["dimensions"]), "sampler": sampler,
                "trials": args.trials, "seeds": args.seeds, "hypervolume": round(float(last.mean()), 4),
                "interval": round(float(1.96 * last.std(ddof=1) / np.sqrt(len(last))), 4), "at_half": round(float(half.mean()), 4),
                "above_random": round(float(paired.mean()), 4), "each": [round(float(v), 4) for v in last],
                "seconds": round(time.perf_counter() - start, 1), **{k: round(v, 4) for k, v in errors.items()},
            })  # fmt: skip
            print(rows[-1], flush=True)
            if args.out:
                args.out.write_text(json.dumps({**provenance(("whet", "numpy", "optuna", "onnxruntime")), "rows": rows}, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["record", "compare"])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/ and mnist/")
    parser.add_argument("--model", choices=list(FILES))
    parser.add_argument("--table", type=Path, help="file of recorded trials")
    parser.add_argument("--tables", type=Path, nargs="+", default=[])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no trial starts")
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record(args) if args.stage == "record" else compare(args)


if __name__ == "__main__":
    main()
