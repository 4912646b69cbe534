"""Reads a Caffe model, a deploy prototxt and its caffemodel, as a source Network. Needs nothing of Caffe."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from whet.errors import FrontendError, NetworkError, UnsupportedError
from whet.frontends import _caffe_layers, _caffe_moves  # noqa: F401  they register the converters
from whet.frontends._caffe_files import CaffeLayer, CaffeModel, read_caffemodel, read_prototxt
from whet.frontends._caffe_layer import CONVERTERS, Layer, Weights
from whet.frontends._onnx_shapes import UserShapes
from whet.frontends.onnx_check import Problem, Report
from whet.network import F32, Dim, Network, Origin, Tensor, TensorType, Weight, make_symbol, verify
from whet.registry import suggest_name

_CUT = "end the network before it, by deleting it from the prototxt"
_TRAINING = "it belongs to a training network; give the deploy prototxt, or delete the layer"
_ADVICE = {
    **dict.fromkeys(("Data", "ImageData", "HDF5Data", "MemoryData", "WindowData", "AnnotatedData", "VideoData", "HDF5Output"), _TRAINING),
    **dict.fromkeys(("Accuracy", "DetectionEvaluate", "MultiBoxLoss", "SmoothL1Loss", "MultinomialLogisticLoss"), _TRAINING),
    **dict.fromkeys(("LSTM", "RNN", "Recurrent"), "Caffe's recurrent layers are unrolled networks; export the model to ONNX from its new framework"),
    "DetectionOutput": "its number of boxes depends on the data, but an engine needs shapes in advance; delete it from the prototxt, and do the "
    "non-maximum suppression on the engine's boxes and scores",
    "Proposal": "its number of boxes depends on the data, but an engine needs shapes in advance; split the prototxt before it",
    "Python": f"it is Python code of its own; {_CUT}, and run the code on the engine's outputs",
    "DummyData": "it makes data; declare the blob as an input of the prototxt instead",
}
_BAD_VALUES = (IndexError, AttributeError, TypeError, KeyError, ValueError, OverflowError, ArithmeticError, MemoryError)


def network_from_caffe(
    prototxt: str | os.PathLike,
    caffemodel: str | os.PathLike | None = None,
    *,
    shapes: UserShapes | None = None,
    outputs: Sequence[str] = (),
    random_weights: bool = False,
) -> Network:
    """Reads a deploy prototxt with the weights of a caffemodel (default: the file of the same name in its folder).

    `shapes` maps inputs to shapes, as for network_from_onnx: an int sets a size, a name makes it dynamic, None keeps it. `outputs` are
    blob names (default: the blobs that no layer reads). `random_weights` needs no caffemodel: for timing.
    Batch norms and names of layers and blobs are kept; a Scale after a BatchNorm becomes its gamma and beta.
    Raises FrontendError for unreadable files and missing weights, UnsupportedError for an unsupported layer; both name the layer.
    """
    prototxt, weights_file = find_caffe_files(prototxt, caffemodel)
    model = read_prototxt(prototxt)
    if random_weights:
        return _read(model, Weights(None), shapes, outputs)
    if weights_file is None:
        raise FrontendError(f"there is no {prototxt.with_suffix('.caffemodel').name} beside {prototxt}. Give the caffemodel: it has the weights.")
    return _read(model, Weights(read_caffemodel(weights_file), str(weights_file)), shapes, outputs)


def find_caffe_files(path: str | os.PathLike, caffemodel: str | os.PathLike | None = None) -> tuple[Path, Path | None]:
    """The prototxt and the caffemodel, of which `path` is either one; the other has the same stem, or is the folder's only one of its kind.

    Raises FrontendError if there is no prototxt.
    """
    path = Path(path)
    if path.suffix != ".caffemodel":
        return path, Path(caffemodel) if caffemodel is not None else _find_sibling_file(path, ".caffemodel", "")
    sibling = _find_sibling_file(path, ".prototxt", "deploy")
    if sibling is None:
        raise FrontendError(f"{path} has the weights only, and there is no {path.with_suffix('.prototxt').name} beside it. Give the prototxt.")
    return sibling, path


def _find_sibling_file(path: Path, suffix: str, preferred: str) -> Path | None:
    same = path.with_suffix(suffix)
    others = sorted(path.parent.glob(f"*{suffix}"))
    if same in others:
        return same
    named = [p for p in others if preferred and preferred in p.name]
    return named[0] if len(named) == 1 else others[0] if len(others) == 1 else None


def check_caffe(prototxt: str | os.PathLike, *, shapes: UserShapes | None = None) -> Report:
    """Tries every layer of a prototxt and reports all unsupported ones, not only the first. The weights are not read.

    Raises FrontendError for a file that is not a prototxt.
    """
    model = read_prototxt(find_caffe_files(prototxt)[0])
    report = Report(
        source=str(prototxt), opset=0, opsets={}, producer="Caffe", inputs={}, outputs={}, parameters=0, parameter_bytes=0,
        nodes=len(model.layers), ops=dict(Counter(layer.type for layer in model.layers).most_common()), unit="layer",
    )  # fmt: skip

    def on_problem(layer: CaffeLayer, error: Exception, reached: bool) -> None:
        report.problems.append(Problem(layer.name, layer.type, str(error), reached))

    net = _read(model, Weights(None), shapes, (), on_problem)
    report.layers = len(net.layers)
    report.inputs = {t.name: str(t.type) for t in net.inputs}
    report.outputs = {t.name: str(t.type) for t in net.outputs}
    report.parameters = sum(t.array().size for t in net.constants.values() if t.dtype == F32)
    report.parameter_bytes = 4 * report.parameters
    return report


def _read(
    model: CaffeModel,
    weights: Weights,
    shapes: UserShapes | None,
    outputs: Sequence[str],
    on_problem: Callable[[CaffeLayer, Exception, bool], None] | None = None,
) -> Network:
    net = Network(model.name)
    net.metadata = {"format": "caffe", "producer_name": "Caffe"}
    blobs: dict[str, Tensor] = {}
    for name, dims in _get_input_shapes(model, shapes).items():
        blobs[name] = net.add_input(name, TensorType(F32, dims))
    unread = dict.fromkeys(blobs)
    unknown: dict[str, str] = {}
    for source in model.layers:
        if source.type == "Silence":
            for bottom in source.bottoms:
                unread.pop(bottom, None)
            continue
        try:
            if lost := next((b for b in source.bottoms if b in unknown), None):
                raise _NotReached(f"not read: its bottom {lost!r} comes from layer '{unknown[lost]}', which is not supported")
            tops = _convert(net, source, blobs, weights)
        except (NetworkError, FrontendError, *_BAD_VALUES) as e:
            if on_problem is None or isinstance(e, FrontendError):
                raise _with_layer(e, source) from e
            on_problem(source, _with_layer(e, source), not isinstance(e, _NotReached))
            unknown |= dict.fromkeys(source.tops, source.name)
            continue
        for bottom in source.bottoms:
            unread.pop(bottom, None)
        for top, t in zip(source.tops, tops, strict=True):
            blobs[top], unread[top] = t, None
    for name in outputs:
        if name not in blobs:
            raise FrontendError(f"{model.path} has no blob {name!r}.{suggest_name(name, blobs)}")
    for name in outputs or unread:
        t = blobs[name]
        if t.maker is None and name not in outputs and len(unread) > 1:
            continue  # an input that nothing reads
        net.mark_output(t, name)
    if on_problem is not None and not net.outputs:
        return net
    net.prune_dead()
    return verify(net, types=False)


class _NotReached(UnsupportedError):
    """A layer was not read because a bottom comes from an unsupported layer."""


def _convert(net: Network, source: CaffeLayer, blobs: dict[str, Tensor], weights: Weights) -> list[Tensor]:
    if source.type == "Parameter":
        shape = tuple(source.param.parameter_param.shape.dim)
        values = Weight(np.ascontiguousarray(weights.of(source, 0, shape, "values")), Origin("source", source.name))
        return [net.constant(values, source.name)]
    if source.type not in CONVERTERS:
        advice = _ADVICE.get(source.type) or (_TRAINING if source.type.endswith("Loss") else "")
        raise UnsupportedError(f"whet has no such layer.{suggest_name(source.type, CONVERTERS)} To go on, {_CUT}." if not advice else f"{advice}.")
    for bottom in source.bottoms:
        if bottom not in blobs:
            raise FrontendError(f"its bottom {bottom!r} is no top of an earlier layer and no input.{suggest_name(bottom, blobs)}")
    start = len(net.layers)
    made = CONVERTERS[source.type](Layer(source, net, [blobs[b] for b in source.bottoms], weights))
    tops = [made] if isinstance(made, Tensor) else list(made)
    if len(tops) != len(source.tops):
        raise UnsupportedError(f"it has {len(source.tops)} tops, of which whet makes {len(tops)}; delete the others from the prototxt")
    _name_tops(net, start, source, tops)
    return tops


def _name_tops(net: Network, start: int, source: CaffeLayer, tops: list[Tensor]) -> None:
    """Tensors get the names of their blobs; those of an in-place layer get a number."""
    added = {t for layer in net.layers[start:] for t in layer.outputs}
    for t, top in zip(tops, source.tops, strict=True):
        if t in added and t.name != top:
            t.name = net.fresh(top)


def _get_input_shapes(model: CaffeModel, shapes: UserShapes | None) -> dict[str, tuple[Dim, ...]]:
    for name in shapes or {}:
        if name not in model.inputs:
            raise FrontendError(f"{model.path} has no input {name!r}.{suggest_name(name, model.inputs)} It has {', '.join(model.inputs) or 'none'}.")
    if not model.inputs:
        raise FrontendError(f"{model.path} declares no input. Give the deploy prototxt, with `input:` or an Input layer.")
    result: dict[str, tuple[Dim, ...]] = {}
    for name, dims in model.inputs.items():
        wanted = (shapes or {}).get(name, dims)
        if len(wanted) != len(dims):
            raise FrontendError(f"the input {name!r} has {len(dims)} dimensions, but the shape given has {len(wanted)}")
        result[name] = tuple(d if w is None else make_symbol(w) if isinstance(w, str) else int(w) for w, d in zip(wanted, dims, strict=True))
    return result


def _with_layer(e: Exception, source: CaffeLayer) -> Exception:
    """Converts an exception to a whet error that names the layer."""
    where = f"layer '{source.name}' ({source.type})"
    if str(e).startswith(where):
        return e
    if isinstance(e, FrontendError | UnsupportedError | _NotReached):
        return type(e)(f"{where}: {e}")
    return UnsupportedError(f"{where}: whet cannot read it: {e or type(e).__name__}. Check its parameters, or {_CUT}.")
