"""`whet prune`: prunes a model to a ratio or a target, recovers it without labels and writes the smaller model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar, print_json
from whet.cli._output_files import check_writable
from whet.cli._prune_flags import build_config, build_flags, check_effective_flags

_NEAR = 1.05  # up to this factor above the target counts as met: repeated timings of one engine differ as much
_MISSED = "Choose a weaker target, or prune on an idle machine: external load slows small layers most."
_CHOOSE = {
    "ratio", "latency", "throughput", "flops", "params", "channels", "depth", "hidden", "importance", "scope", "multiple", "width", "skip", "labels",
    "retime",
}  # fmt: skip
_TARGETS = ("latency", "throughput", "flops", "params", "channels")


@click.command()
@click.argument("model", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="ONNX file to write (default: MODEL.pruned.onnx).")
@click.option("--ratio", type=click.FloatRange(0, 1, max_open=True), default=0.4, show_default=True,
              help="Share of all channels to remove. A layer whose inputs and outputs are both cut keeps the square of the rest: 0.5 leaves about a "
                   "quarter of the parameters. For a share of the parameters or FLOPs: --params, --flops.")
@click.option("--latency", help="Prune to at most this latency: 0.5x of the original, or 3.2ms.")
@click.option("--throughput", help="Prune to at least this many inferences per second: 2x, or a number.")
@click.option("--flops", help="Prune to at most this many FLOPs: 0.5x, or a number.")
@click.option("--params", help="Prune to at most this many parameters: 0.5x (half of them), or a number.")
@click.option("--channels", help="Prune to this share of the channels: 0.6x. Like --ratio, but selected like the other targets.")
@click.option("--pattern", help="Set weights to zero in a pattern instead of removing channels: 2:4, N:M, block:4x1 (with --ratio), template:FILE.")
@click.option("--permute", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
              help="With --pattern=2:4: search for an order of the channels that keeps more, for at most so long; the function stays the same.")
@click.option("--depth/--noDepth", "depth", default=None,
              help="With a target: whole residual branches may be removed.  [default: if the importance is measured on data]")
@click.option("--hidden", is_flag=True,
              help="Also cut the residual width of transformers, ConvNeXt and MLP-Mixer through their norms. Means and variances are then of the "
                   "kept channels, so the outputs change even where all removed weights are zero: recover with --calibData, and fine-tune.")
@click.option("--importance", default="auto", show_default=True,
              help="auto (with a target and --calibData reconstruction, or weighted_reconstruction if its selection changes the outputs on held-out "
                   "samples by a tenth less; else l1), compared (with both: the best of these two and taylor2), reconstruction, "
                   "weighted_reconstruction, l1, l2, fpgm, bn_scale, activation, taylor1, taylor2, random, or python:MODULE:FUNCTION. "
                   "With --pattern: auto (activation with --calibData, else l1), l1, activation, second_order, taylor1.")
@click.option("--scope", type=click.Choice(["global", "group"]), default="global", show_default=True, help="Rank over all groups, or per group.")
@click.option("--multiple", type=click.IntRange(1), help="Keep a multiple of this many channels per group "
              "(default: 8; with --flops, --params or --channels eighths of narrow groups).")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True,
              help="With a counted target and --calibData: cut in so many steps, recover and score again between them.")
@click.option("--trials", type=click.IntRange(0), default=0, show_default=True,
              help="With a target and --calibData: also select by so many randomly reweighted importances, and keep the selection that changes the "
                   "outputs on held-out samples least.")
@click.option("--width", multiple=True, metavar="GROUP=N", help="Units to keep of this group, regardless of --ratio (repeatable; --list).")
@click.option("--skip", multiple=True, help="Group, branch or layer to leave unpruned (repeatable; --list).")
@click.option("--list", "list_only", is_flag=True, help="List the prunable groups and residual branches, and exit.")
@click.option("--latencyTable", "table", type=click.Path(dir_okay=False), help="Latency table to use and extend.")
@click.option("--retime", is_flag=True, help="With --latency: time all layers again; ignore the table and the timing cache.")
@click.option("--noEngines", "no_engines", is_flag=True, help="With --latency: trust the table, build no engines.")
@click.option("--noFloor", "no_floor", is_flag=True,
              help="With a target and --calibData: do not compare with uniform cuts at the same cost, and by default not two importances.")
@click.option("--calibData", "data", help="Unlabelled recovery data: DIR, FILE.npz, FILE.npy or python:MODULE:FUNCTION.")
@click.option("--calibPreprocess", "preprocess", help="Preprocessing of images, as for whet exec.")
@click.option("--samples", type=click.IntRange(1), default=256, show_default=True, help="Number of recovery samples.")
@click.option("--labels", type=click.Path(dir_okay=False), help="Classes of these samples (.npy), for Taylor importances.")
@click.option("--recipe", "recipe_out", type=click.Path(dir_okay=False), help="Write the pruning recipe (JSON).")
@click.option("--applyRecipe", "recipe_in", type=click.Path(dir_okay=False), help="Apply this recipe; with --calibData, also recover.")
@click.option("--weights", type=click.Path(dir_okay=False), help="Also write the weights as safetensors, under their names in the model.")
@click.option("--insist", is_flag=True, help="Prune although the model is already quantized.")
@click.option("--json", "as_json", is_flag=True, help="JSON output; messages go to standard error.")
@build_flags
def command(
    model: str,
    output: str | None,
    data: str | None,
    preprocess: str | None,
    samples: int,
    labels: str | None,
    recipe_out: str | None,
    recipe_in: str | None,
    list_only: bool,
    hidden: bool,
    weights: str | None,
    pattern: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Remove whole channels, heads and residual branches, with all layers coupled to them, so that every kernel does less work.

    With --latency or --throughput each layer is timed over its widths on this machine, widths are chosen at the steps of the latency, and the
    engine is built and timed to compare with the prediction. Layers timed under external load are re-timed.
    Without --calibData nothing is recovered: fine-tune the result, or expect a large loss of accuracy.

    --pattern keeps the shapes and sets weights to zero, by magnitude or another --importance; with --calibData by the energy of the inputs too, and
    the kept weights are refitted. --permute=30 first reorders coupled channels throughout the network. 2:4 and patterns that contain it run on
    2:4 kernels; other zeros are multiplied like other values, and the times say so.
    """
    from whet.cli._prune_pattern import prune_to_pattern
    from whet.errors import UsageError
    from whet.frontends import network_from_file, save_onnx
    from whet.pruning import apply_recipe, count_flops, count_params, load_recipe, prune, recover, save_recipe, save_weights
    from whet.pruning.order import note
    from whet.pruning.recipe import must_have_safetensors
    from whet.search.recipe.data import load_unlabelled

    net = network_from_file(model)
    if list_only:
        print_json(_group_facts(net, hidden)) if as_json else click.echo("\n".join(_group_lines(net, hidden)))
        return
    say = partial(click.echo, err=as_json)
    facts: dict[str, Any] = {}
    target = output or str(Path(model).with_suffix(".pruned.onnx"))
    check_writable(model, recipe_in, data, labels, output=target, recipe=recipe_out, weights=weights, latencyTable=options["table"])
    if weights:
        must_have_safetensors()
    if recipe_in is None and pattern is None:
        check_effective_flags(target=next((t for t in _TARGETS if options[t] is not None), None), data=data, importance=options["importance"])
    permute = options.pop("permute")
    if permute and pattern is None:
        raise UsageError("--permute has no effect without --pattern=2:4: it orders channels so that this pattern keeps more")
    config = _make_config({**options, "hidden": hidden})
    feeds = load_unlabelled(data, net, samples, preprocess) if data else None
    if pattern is not None:
        pruned, masks, facts = prune_to_pattern(net, pattern, feeds, {**options, "permute": permute}, say, _read_labels(labels, data, samples))
        if recipe_out:
            check_writable(model, output=target, weights=weights, recipe=str(Path(recipe_out).with_suffix(".safetensors")))
            say(f"recipe: {save_recipe(masks, recipe_out)}")
    elif recipe_in:
        _check_recipe_flags()
        recipe = load_recipe(recipe_in)
        if recipe.masks and recipe_out:
            check_writable(model, weights=weights, recipe=str(Path(recipe_out).with_suffix(".safetensors")))
        pruned = apply_recipe(net, recipe, insist=config.insist, name=Path(recipe_in).name)
        if feeds is not None:
            with Bar("recovering") as bar:
                pruned = recover(pruned, net, recipe.kept(), feeds, config.recovery, bar.update, insist=config.insist)
            note(pruned, "recover")
        if recipe_out:
            say(f"recipe: {save_recipe(recipe, recipe_out)}")
    else:
        with Bar("pruning") as bar:
            done = prune(net, config, feeds, bar.update, labels=_read_labels(labels, data, samples))
        pruned = done.network
        facts = _collect_facts(done)
        scope, by = "to the target" if config.target else config.scope, done.recipe.about["importance"]
        say(f"removed {done.channels[0] - done.channels[1]} of {done.channels[0]} channels ({done.share:.0%}) by {by}, {scope}")
        if done.recipe.removed:
            say(f"removed {len(done.recipe.removed)} residual branches: {', '.join(done.recipe.removed)}")
        for line in done.report.lines():
            say(line)
        if config.target is None and not config.widths:
            kept = done.report.params[1] / max(done.report.params[0], 1)
            asked = f"--ratio={config.ratio:g} is the share of channels to remove"
            say(f"{asked}; {kept:.2f} of the parameters are left. For a share of these: --params=0.5x")
        if config.target and config.target.ratio and done.report.engine_ms:
            before, after = done.report.engine_ms
            if after > _NEAR * config.target.ratio * before:
                say(f"The target is missed: {after / before:.2f}x of the time, not {config.target.ratio:.2f}x. {_MISSED}")
        if recipe_out:
            say(f"recipe: {save_recipe(done.recipe, recipe_out)}")
        if feeds is not None:
            say(f"recovered without labels on {len(next(iter(feeds.values())))} samples")
        else:
            say("nothing was recovered: give --calibData (no labels needed), or fine-tune")
    save_onnx(pruned, target)
    if weights:
        say(f"weights: {save_weights(pruned, weights)}")
    before, after = (count_params(n) for n in (net, pruned))
    flops = [_count_flops(count_flops, n) for n in (net, pruned)]
    if as_json:
        sizes = {"parameters": [before, after], "flops": flops if all(flops) else None}
        print_json({"model": target, **sizes, **facts, "recipe": recipe_out, "weights": weights, "recovered": feeds is not None})
        return
    say(f"{target}: parameters {before:,} -> {after:,}" + (f", FLOPs {flops[0]:,} -> {flops[1]:,}" if all(flops) else ""))


def _check_recipe_flags() -> None:
    """Raises UsageError for flags that select channels in addition to --applyRecipe."""
    from whet.errors import UsageError

    now = click.get_current_context()
    chosen = {p.name: p.opts[0] for p in now.command.params if p.name in _CHOOSE}
    given = [flag for name, flag in chosen.items() if now.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT]
    if given:
        raise UsageError(f"--applyRecipe defines the cuts, so {given[0]} has no effect: leave one of them out")


def _group_lines(net: Any, hidden: bool) -> list[str]:
    """Groups and branches in execution order, one line each."""
    from whet.pruning import branches, groups

    prunable, blocks = groups(net, hidden=hidden), branches(net)
    lines = [f"{len(prunable)} groups: name, units (x channels per unit), affected layers"]
    for g in prunable:
        each = f" x {g.block}" if g.block > 1 else ""
        lines.append(f"  {g.name}: {g.size}{each}, {len(g.layers)} layers: {', '.join(g.layers[:3])}{', ...' if len(g.layers) > 3 else ''}")
    lines.append(f"{len(blocks)} removable residual branches: name, layers")
    lines += [f"  {b.name}: {len(b.layers)} layers, {b.layers[0]} to {b.layers[-1]}" for b in blocks]
    return lines


def _group_facts(net: Any, hidden: bool) -> dict[str, Any]:
    """Groups and branches in execution order, for --json."""
    from whet.pruning import branches, groups

    prunable = [{"name": g.name, "units": g.size, "channels_per_unit": g.block, "layers": list(g.layers)} for g in groups(net, hidden=hidden)]
    return {"groups": prunable, "branches": [{"name": b.name, "layers": list(b.layers)} for b in branches(net)]}


def _collect_facts(pruned: Any) -> dict[str, Any]:
    """The removed units, the predictions and the measurements, for --json."""
    report = pruned.report
    return {
        "channels": list(pruned.channels), "importance": pruned.recipe.about["importance"], "branches_removed": list(pruned.recipe.removed),
        "predicted": report.predicted, "predicted_unit": report.unit, "engine_ms": report.engine_ms, "optimality_gap": report.known_gap,
        "output_errors": None if report.floor is None else {
            "selected": report.floor.chosen, "uniform": report.floor.uniform, "first": report.floor.first, "trials": report.floor.trials,
            "by_importance": dict(report.floor.by_importance),
        },
        "doubtful_times": report.doubtful,
    }  # fmt: skip


def _make_config(o: dict[str, Any]) -> Any:
    """The PruneConfig of the flags. Raises UsageError for two targets."""
    from whet.errors import UsageError
    from whet.pruning import PruneConfig, Target

    given = [(k, o.pop(k)) for k in _TARGETS]
    targets = [Target.parse(k, v) for k, v in given if v is not None]
    if len(targets) > 1:
        raise UsageError(f"one target at a time: --{targets[0].kind} and --{targets[1].kind} are given")
    fields = {k: o.pop(k) for k in ("ratio", "depth", "hidden", "importance", "scope", "multiple", "table", "retime", "insist", "steps", "trials")}
    skip, engines, floor, widths = o.pop("skip"), not o.pop("no_engines"), not o.pop("no_floor"), _parse_widths(o.pop("width"))
    target = targets[0] if targets else None
    return PruneConfig(**fields, skip=skip, widths=widths, engines=engines, floor=floor, target=target, build=build_config(**o))


def _parse_widths(texts: tuple[str, ...]) -> dict[str, int]:
    """Parses GROUP=N texts to group -> units. Raises UsageError."""
    from whet.errors import UsageError

    widths = {}
    for word in texts:
        name, equals, number = word.rpartition("=")
        if not equals or not name or not number.isdecimal():
            raise UsageError(f"--width={word}: write GROUP=N, N the units to keep, as --width=layer1.0.conv1.weight=48")
        widths[name] = int(number)
    return widths


def _count_flops(count: Any, net: Any) -> int:
    """FLOPs with every symbol set to 1; 0 if a layer does not allow that."""
    from whet.errors import WhetError

    try:
        return int(count(net))
    except WhetError:
        return 0


def _read_labels(path: str | None, data: str | None, samples: int) -> Any:
    """Reads the classes of the samples of `load_unlabelled` from a .npy file. Raises UsageError for an unreadable file."""
    if path is None:
        return None
    import numpy as np

    from whet.array_files import read_arrays
    from whet.errors import UsageError
    from whet.search.recipe.data import takes_first_samples
    from whet.search.recipe.image_data import pick_evenly

    found = read_arrays(path, UsageError, "--labels=")
    if not isinstance(found, np.ndarray):
        raise UsageError(f"--labels={path} is an .npz file. Give a .npy file of integers, one per sample.")
    classes = found.reshape(-1)
    return classes[:samples] if data is None or takes_first_samples(data) else np.array(pick_evenly(list(classes), samples))
