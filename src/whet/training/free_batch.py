"""Networks with a fixed batch, as PyTorch exports them by default, get a dynamic one for the training, which takes more samples at a time."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import torch

from whet.errors import NetworkError, TrainingError
from whet.network import Layer, Network, Tensor, copy_into, make_symbol, verify
from whet.training.data import Batches, TrainingData
from whet.training.feeding import Feeder
from whet.training.loss import to_outputs
from whet.training.module import NetworkModule

BATCH = "batch"
_RUNS, _TOLERANCE = 2, 1e-4  # runs of the given network that are compared with one of the copy; largest difference relative to the largest output


def free_batch(net: Network, data: TrainingData | Batches, batch: int, device: torch.device) -> Network:
    """`net`, or a copy that takes any number of samples if `net` takes a fixed number other than `batch` (or all of `data`).

    The copy's layers and weights have the same names. Raises TrainingError, with the layer that forbids it, if the samples of a batch would not be
    computed one by one as `net` does: the outputs are compared on the first samples of `data`. Batches of a user are not changed.
    """
    fixed = {t.shape[0] if t.type.rank else None for t in net.inputs}
    only = next(iter(fixed))
    if isinstance(data, Batches) or len(fixed) > 1 or not isinstance(only, int) or only in (batch, len(data)):
        return net
    try:
        made = copy_with_dynamic_batch(net)
        compare_runs(net, made, data, only, device)
    except (NetworkError, RuntimeError) as e:  # torch raises RuntimeError for shapes that do not fit
        why = str(e).partition("\n")[0]
        raise TrainingError(
            f"'{net.name}' takes batches of exactly {only}, and other numbers of samples are not computed alike ({why}): export it with a "
            f"dynamic batch, or train with batch={only} (batch-norm statistics are noisy then)"
        ) from e
    return made


def copy_with_dynamic_batch(net: Network) -> Network:
    """A copy of `net` with a symbol as the first dimension of its inputs. Raises NetworkError if a layer does not accept it."""
    made = Network(net.name, net.stage)
    twin: dict[Tensor, Tensor] = {t: made.add_input(t.name, t.type.with_shape((make_symbol(BATCH), *t.shape[1:]))) for t in net.inputs}
    for t in net.constants.values():
        twin[t] = made.constant(t.constant(), t.name)
    for layer in net.layers:
        inputs, attrs = _adapt(layer, [None if t is None else twin[t] for t in layer.inputs], made)
        regions = {k: copy_into(r, Network(r.name, r.stage), twin) for k, r in layer.regions.items()}
        names = [t.name for t in layer.outputs]
        try:
            new = made.add_layer(layer.op, inputs, {**layer.attrs, **attrs}, name=layer.name, outputs=names, regions=regions, sources=layer.sources)
        except NetworkError as e:
            raise NetworkError(f"{layer.op} '{layer.name}': {e}") from e
        twin.update(zip(layer.outputs, new.outputs, strict=True))
    for t in net.outputs:
        if not t.type.rank or isinstance(twin[t].shape[0], int):
            raise NetworkError(f"the output '{t.name}' does not have the samples along its first axis")
        made.mark_output(twin[t], t.name)
    made.metadata = dict(net.metadata)
    made.prune_dead()
    return verify(made)


def _adapt(layer: Layer, inputs: list[Tensor | None], made: Network) -> tuple[list[Tensor | None], dict[str, Any]]:
    """The inputs of a layer, and changed attributes, without the fixed batch in constants: shapes of Reshape and Expand, sizes of Resize, parts of
    Concat."""
    x = inputs[0] if inputs else None
    axis = None if x is None else _find_dynamic_axis(x)
    if layer.op == "Concat":
        return [*_repeat_constants(layer, [t for t in inputs if t is not None], made)], {}
    if axis is None or x is None or layer.op not in ("Reshape", "Expand", "Resize"):
        return inputs, {}
    shape = layer.outputs[0].shape
    if layer.op == "Resize":
        if layer.input(3) is None or not layer.needs(3).is_constant or layer.attrs.get("axes"):
            return inputs, {}
        factors = np.array(shape, np.float64) / np.array(layer.needs(0).shape, np.float64)
        return [x, inputs[1], made.constant(factors.astype(np.float32), f"{layer.name}.scales")], {}
    if layer.input(1) is not None and not layer.needs(1).is_constant:
        return inputs, {}
    if layer.op == "Expand":
        at, size = axis + len(shape) - x.type.rank, 1
    else:
        before = math.prod(layer.needs(0).shape[:axis])
        at, size = next((k for k in range(len(shape)) if math.prod(shape[:k]) == before), -1), -1
    target = tuple(size if k == at else int(d) for k, d in enumerate(shape))
    if layer.input(1) is None:
        return inputs, {"shape": target}
    return [x, made.constant(np.array(target, np.int64), f"{layer.name}.shape")], {}


def _find_dynamic_axis(t: Tensor) -> int | None:
    return next((k for k, d in enumerate(t.shape) if not isinstance(d, int)), None)


def _repeat_constants(layer: Layer, inputs: list[Tensor], made: Network) -> list[Tensor]:
    """Inputs of a Concat, those that hold a value of the batch of one (such as a class token) repeated for each sample."""
    dynamic = next((t for t in inputs if _find_dynamic_axis(t) is not None), None)
    axis = None if dynamic is None else _find_dynamic_axis(dynamic)
    if dynamic is None or axis is None or axis == layer.attrs["axis"] % dynamic.type.rank:
        return inputs
    found = []
    for t in inputs:
        if t.type.rank == dynamic.type.rank and t.shape[axis] == 1:
            count = made.add_layer("Shape", [dynamic], {"start": axis, "end": axis + 1}, name=f"{layer.name}.count").output
            others = [made.constant(np.array(t.shape[part], np.int64), f"{layer.name}.sizes") for part in (slice(0, axis), slice(axis + 1, None))]
            sizes = made.add_layer("Concat", [others[0], count, others[1]], {"axis": 0}, name=f"{layer.name}.sizes").output
            found.append(made.add_layer("Expand", [t, sizes], {}, name=f"{layer.name}.repeated").output)
        else:
            found.append(t)
    return found


def compare_runs(net: Network, made: Network, data: TrainingData, only: int, device: torch.device) -> None:
    """Raises NetworkError unless one run of `made` on several batches of `net` gives the outputs of `net`."""
    with torch.no_grad():
        feeds = [f for f, _ in islice(Feeder(net, data, batch=only, device=device).all(), min(_RUNS, len(data) // only))]
        given = NetworkModule(net).to(device).eval()
        each = [to_outputs(given(**f)) for f in feeds]
        together = to_outputs(NetworkModule(made).to(device).eval()(**{k: torch.cat([f[k] for f in feeds]) for k in feeds[0]}))
    for t, got, *parts in zip(net.outputs, together, *each, strict=True):
        want = torch.cat(parts)
        if got.shape != want.shape or float((got - want).abs().max()) > _TOLERANCE * max(float(want.abs().max()), 1e-30):
            raise NetworkError(f"the samples of a batch change each other's output '{t.name}'")
