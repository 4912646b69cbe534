"""Samplers of `whet auto` compared at an equal number of trials: the hypervolume that each reaches on real networks, over several seeds.

    python benchmarks/search_samplers.py record --data FOLDER --model resnet8 --trials 40 --table FILE.json [--limit SECONDS]
    python benchmarks/search_samplers.py compare --data FOLDER --tables FILE.json .. --out benchmarks/results/cpu/search_samplers.json
        [--trials 40] [--seeds 10]      (rows of other models in the file are kept)
    python benchmarks/search_samplers.py early --data FOLDER --models resnet8 vit_mnist --out benchmarks/results/cpu/search_early_stop.json

Real trials take seconds each, and a comparison needs thousands. So the samplers search a table measured on the real network and images: the loss of
a point is the sum of the reconstruction errors of what it removes (whet's `reconstruction` scores on 64 unlabelled images), its cost the exact
FLOPs. The space is that of `whet auto` in FP32: shares to cut by class of groups, and the number of removed branches.

`took` makes some real trials at random points of the same space (prune, recover on 64 unlabelled images, top-1 on 500 test images) and resumes;
`rank_correlation` is Spearman's between the table's loss and the accuracy that was lost in these trials. Samplers: random, Optuna's TPE as it comes
(`TPESampler()`, and with `multivariate=True`), and those of whet with the points that its search tries first. `hypervolume` is the area below the
original's FLOPs and the loss of an equal cut by half, as a share of that rectangle; `interval` is the half width of the 95 % interval of its mean
over the seeds.

`early` compares the search with and without `search.early_stop` at equal time, in the same table: the time of --trials whole trials. A stopped trial
takes the share of a whole one that passes before the engine is built, `share`: the median over the scouts of a real search of the same model (FP32).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from _record import provenance
from pruning_defaults import normalized, top1

from whet.frontends import network_from_onnx
from whet.pruning import count_flops, groups, importance
from whet.pruning.costs import make_flop_costs
from whet.pruning.depth import branches
from whet.pruning.importance import Samples
from whet.search import search
from whet.search.recipe.recipe import Effort, recipe_from
from whet.search.recipe.space import SearchSpace, search_space
from whet.search.stages.prepare import prepare_candidate
from whet.search.study.study import make_sampler
from whet.search.study.surrogate import Reference, compute_hypervolume

FILES = {"resnet8": "cifar10/resnet8_mlperftiny.onnx", "resnet20": "cifar10/resnet20_cifar10.onnx", "vit_mnist": "mnist/vit_mnist.onnx"}
IMAGES, TESTED = 64, 500
BEFORE_ENGINE = ("reading", "pruning", "recovering", "scoring")  # stages of a scout until its accuracy is known
WHOLE = 4  # whole trials before the first that may be stopped: the default number of survivors
SAMPLERS = ("random", "Optuna TPE", "Optuna TPE, multivariate", "whet tpe", "whet gp")
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
    plain = {"model": source, "data": {"calibrate": str(data / "mnist"), "score": str(data / "mnist")}, "target": {"accuracy_drop": 1},
             "space": {"precision": "fp32"}, "baselines": "fp32"}  # fmt: skip
    return search_space(net, recipe_from(plain), order)


def record(args: argparse.Namespace) -> None:
    """Appends real trials to the table until it has --trials of them or the time is up."""
    start = time.monotonic()
    net, images, labels, pool = load(args.data, args.model)
    order = [b.name for b in branches(net)]
    space = space_of(net, args.data, args.model, order)
    dimensions = dimensions_of(space)
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
        made = prepare_candidate(net, candidate, space.kept(candidate), {net.inputs[0].name: pool[some]}, Effort(), say=lambda stage: None)
        table["rows"].append({"params": params, "flops": count_flops(made.network), "top1": top1(made.network, images, labels)})
        args.table.write_text(json.dumps(table) + "\n")
    print(f"{args.model}: {len(table['rows'])} trials recorded", flush=True)


def tabulated(data: Path, model: str) -> tuple[Evaluate, SearchSpace]:
    """(share of FLOPs, loss) of a point by the measured errors, and the space."""
    net, _, _, pool = load(data, model)
    found, blocks = groups(net), branches(net)
    space = space_of(net, data, model, [b.name for b in blocks])
    some = np.random.default_rng(0).choice(len(pool), IMAGES, replace=False)
    scores = importance(found, "reconstruction", net=net, samples=Samples({net.inputs[0].name: pool[some]}), blocks=blocks)
    lost = {g.name: np.concatenate([[0.0], np.cumsum(np.sort(scores[g.name]))]) for g in found}
    costs = make_flop_costs(net, found, blocks)
    inside = {b.name: {g.name for g in found if set(g.layers) <= set(b.layers)} for b in blocks}
    whole, sizes = costs.total({}), {g.name: g.size for g in found}
    known: dict[str, tuple[float, float]] = {}

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        candidate = space.candidate(params)
        key = space.key(candidate)
        if key not in known:
            kept = space.kept(candidate)
            gone = set().union(*(inside[b] for b in candidate.removed)) if candidate.removed else set()
            loss = sum(float(lost[n][sizes[n] - k]) for n, k in kept.items() if n not in gone) + sum(float(scores[b][0]) for b in candidate.removed)
            known[key] = costs.total(kept, candidate.removed) / whole, loss
        return known[key]

    return evaluate, space


def rank_correlation(table: dict[str, Any], evaluate: Evaluate) -> float:
    """Spearman's correlation of the table's loss and the accuracy lost in the real trials."""
    losses = np.array([(evaluate(r["params"])[1], -r["top1"]) for r in table["rows"]])
    ranks = losses.argsort(0).argsort(0)
    return float(np.corrcoef(ranks.T)[0, 1])


def dimensions_of(space: SearchSpace) -> dict[str, list[Any]]:
    """The values of each dimension."""
    return {d.name: list(d.values) or [round(d.least + i * d.step, 6) for i in range(round((d.most - d.least) / d.step) + 1)]
            for d in space.dimensions}  # fmt: skip


def run(
    sampler: str, seed: int, trials: int, space: SearchSpace, evaluate: Evaluate, bounds: tuple[float, float], stopped: float | None = None
) -> list[float]:
    """The hypervolume after each trial of one search, as a share of the rectangle below `bounds`.

    With `stopped`, trials whose loss is outside take this share of the time, so that more fit in the time of `trials` whole ones.
    """
    startup, dimensions = max(4, min(10, trials // 3)), dimensions_of(space)
    plain = {
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "Optuna TPE": lambda: optuna.samplers.TPESampler(seed=seed),
        "Optuna TPE, multivariate": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True),
    }
    permitted = bounds[1] / 5  # as whet's search sets the reference: five times the permitted loss
    reference = Reference(*bounds, permitted)
    made = plain[sampler]() if sampler in plain else make_sampler(optuna, sampler.removeprefix("whet "), seed, startup, -1, reference)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=made)
    for point in space.seeds()[: max(1, trials // 2)] if sampler not in plain else ():
        study.enqueue_trial({**{k: v[0] for k, v in dimensions.items()}, **point})
    reached, values = [], []
    time_left, whole = float(trials), 0
    while time_left > 1e-9:
        trial = study.ask()
        params = {}
        for name, choices in dimensions.items():
            if name == "depth":
                params[name] = trial.suggest_categorical(name, choices)
            else:
                params[name] = round(trial.suggest_float(name, choices[0], choices[-1], step=round(choices[1] - choices[0], 6)), 6)
        cost, loss = evaluate(params)
        trial.set_user_attr("misses", [max(0.0, loss / permitted - 1)])
        study.tell(trial, [cost, -loss])
        values.append((cost, loss))
        ends_early = stopped is not None and loss > bounds[1] and whole >= WHOLE
        time_left -= stopped if ends_early and stopped is not None else 1.0
        whole += not ends_early
        reached.append(compute_hypervolume(np.array(values), bounds) / (bounds[0] * bounds[1]))
    return reached


def share_before_engine(data: Path, model: str, trials: int = 6) -> tuple[float, list[float]]:
    """The share of a scout's time until its accuracy is known, and the whole seconds of each scout, in a real search."""
    net, images, labels, pool = load(data, model)
    with tempfile.TemporaryDirectory() as folder:
        name = net.inputs[0].name
        np.savez(Path(folder) / "score.npz", **{name: images, "labels": labels})
        np.savez(Path(folder) / "some.npz", **{name: pool[:IMAGES]})
        plain = {"model": str(data / FILES[model]), "data": {"calibrate": "some.npz", "score": "score.npz"}, "target": {"accuracy_drop": 1},
                 "space": {"precision": "fp32"}, "baselines": "fp32", "survivor": {"count": 1},
                 "search": {"trials": trials, "early_stop": False, "workers": 1}}  # fmt: skip
        done = search(recipe_from(plain, folder, "share"), deploy=False)
        results = [t.result for t in done.trials if t.result and t.result["state"] == "done" and t.same_as is None]
    seconds = [sum(r["stages"].values()) for r in results]
    early = [sum(r["stages"].get(k, 0.0) for k in BEFORE_ENGINE) / s for r, s in zip(results, seconds, strict=True)]
    return float(np.median(early)), [round(s, 2) for s in seconds]


def early(args: argparse.Namespace) -> None:
    """Compares the search with and without early stopping at equal time."""
    from scipy import stats

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = []
    for model in args.models:
        evaluate, space = tabulated(args.data, model)
        half = evaluate({name: 0 if name == "depth" else 0.5 for name in dimensions_of(space)})
        share, seconds = share_before_engine(args.data, model)
        ends, counts = [], []
        for stop in (None, share):
            reached = [run("whet gp", seed, args.trials, space, evaluate, (1.0, half[1]), stop) for seed in range(args.seeds)]
            ends.append(np.array([r[-1] for r in reached]))
            counts.append(float(np.mean([len(r) for r in reached])))
        gain = ends[1] - ends[0]
        width = stats.t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / np.sqrt(len(gain))
        rows.append({
            "model": model, "sampler": "whet gp", "time": f"{args.trials} whole trials", "seeds": args.seeds, "share": round(share, 3),
            "seconds": seconds, "without": round(float(ends[0].mean()), 4), "with": round(float(ends[1].mean()), 4),
            "gain": round(float(gain.mean()), 4), "gain_low": round(float(gain.mean() - width), 4), "gain_high": round(float(gain.mean() + width), 4),
            "trials_with": round(counts[1], 1), "each_without": ends[0].round(4).tolist(), "each_with": ends[1].round(4).tolist(),
        })  # fmt: skip
        print(rows[-1], flush=True)
        if args.out:
            args.out.write_text(json.dumps({**provenance(("whet", "numpy", "optuna")), "rows": rows}, indent=1) + "\n")


def compare(args: argparse.Namespace) -> None:
    """Runs all samplers on the models of the tables."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tables = [json.loads(path.read_text()) for path in args.tables]
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    rows = [r for r in rows if r["model"] not in {t["model"] for t in tables}]
    for table in tables:
        evaluate, space = tabulated(args.data, table["model"])
        half = evaluate({name: 0 if name == "depth" else 0.5 for name in dimensions_of(space)})
        correlation = rank_correlation(table, evaluate)
        of_random: np.ndarray | None = None
        for sampler in args.samplers:
            reached = np.array([run(sampler, seed, args.trials, space, evaluate, (1.0, half[1])) for seed in range(args.seeds)])
            of_random = reached if of_random is None else of_random
            last = reached[:, -1]
            above = (last - of_random[:, -1]).mean()
            rows.append({
                "model": table["model"], "dimensions": len(dimensions_of(space)), "sampler": sampler, "trials": args.trials, "seeds": args.seeds,
                "hypervolume": round(float(last.mean()), 4), "interval": round(float(1.96 * last.std(ddof=1) / np.sqrt(len(last))), 4),
                "at_half": round(float(reached[:, args.trials // 2 - 1].mean()), 4), "above_random": round(float(above), 4),
                "each": [round(float(v), 4) for v in last], "real_trials": len(table["rows"]), "rank_correlation": round(correlation, 3),
            })  # fmt: skip
            print(rows[-1], flush=True)
            if args.out:
                args.out.write_text(json.dumps({**provenance(("whet", "numpy", "optuna", "onnxruntime")), "rows": rows}, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["record", "compare", "early"])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/ and mnist/")
    parser.add_argument("--model", choices=list(FILES))
    parser.add_argument("--models", choices=list(FILES), nargs="+", default=["resnet8", "vit_mnist"])
    parser.add_argument("--table", type=Path, help="file of recorded trials")
    parser.add_argument("--tables", type=Path, nargs="+", default=[])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no trial starts")
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    {"record": record, "compare": compare, "early": early}[args.stage](args)


if __name__ == "__main__":
    main()
