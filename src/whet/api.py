"""The functions for users: `build` makes an engine of a model in one call, `load` opens a saved one, `Profile` is a range of shapes."""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import BuildWarning, UsageError
from whet.option_names import translate_flags
from whet.registry import suggest_name

if TYPE_CHECKING:
    from whet.builder import BuildConfig, Calibration, Progress
    from whet.network import Network
    from whet.runtime import Engine

Shape = tuple[int, ...]

_MODEL_SUFFIXES = (".onnx", ".prototxt", ".caffemodel", ".h5", ".keras", ".pb", ".tflite")


@dataclass(frozen=True)
class Profile:
    """The shapes of one input that an engine accepts: from `min` to `max` along each axis, tuned for `opt`.

    `opt` defaults to `max`, `max` to `opt`, and `min` to the smaller of both. Raises UsageError for shapes of different ranks or not in
    ascending order, and for sizes below 1.

        >>> import whet
        >>> whet.Profile(min=(1, 3, 224, 224), opt=(8, 3, 224, 224), max=(32, 3, 224, 224))
        Profile(min=(1, 3, 224, 224), opt=(8, 3, 224, 224), max=(32, 3, 224, 224))
        >>> whet.Profile(min=(1, 3, 224, 224), max=(32, 3, 224, 224)).opt
        (32, 3, 224, 224)
        >>> whet.Profile(min=(8, 3), max=(4, 3))
        Traceback (most recent call last):
        whet.errors.UsageError: Profile: min (8, 3), opt (4, 3), max (4, 3) are not in ascending order along axis 0
    """

    min: Shape = ()
    opt: Shape = ()
    max: Shape = ()

    def __post_init__(self) -> None:
        given = {n: _check_shape(f"Profile.{n}", v) for n in ("min", "opt", "max") if (v := getattr(self, n)) != ()}
        opt = given.get("opt", given.get("max", given.get("min", ())))
        full = {"min": given.get("min", opt), "opt": opt, "max": given.get("max", opt)}
        text = ", ".join(f"{n} {s}" for n, s in full.items())
        if len({len(s) for s in full.values()}) > 1:
            raise UsageError(f"Profile: {text} have different numbers of dimensions")
        for axis, (low, middle, high) in enumerate(zip(*full.values(), strict=True)):
            if not low <= middle <= high:
                raise UsageError(f"Profile: {text} are not in ascending order along axis {axis}")
        for n, s in full.items():
            object.__setattr__(self, n, s)


def build(
    model: str | os.PathLike | bytes | Network | Any,
    config: BuildConfig | None = None,
    *,
    shapes: Mapping[str, Any] | Sequence[Any] | Profile | None = None,
    fp16: bool = False,
    bf16: bool = False,
    int8: Any = None,
    fp8: Any = None,
    best: Any = None,
    accuracy: str | None = None,
    example: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> Engine:
    """Builds the fastest verified engine of a model on this machine.

        >>> import numpy as np, whet
        >>> _ = whet.zoo.save("lenet5", "lenet5.onnx")
        >>> engine = whet.build("lenet5.onnx", shapes={"input": (1, 1, 32, 32)}, optimization_level=0)
        >>> engine(np.zeros((1, 1, 32, 32), np.float32)).shape
        (1, 10)

    A range of shapes, INT8 with calibration data (an iterable of samples), within an accuracy budget:

        >>> shapes = {"input": whet.Profile(min=(1, 1, 32, 32), opt=(2, 1, 32, 32), max=(4, 1, 32, 32))}
        >>> samples = np.random.default_rng(0).standard_normal((4, 1, 32, 32)).astype(np.float32)
        >>> engine = whet.build("lenet5.onnx", shapes=shapes, int8=[samples], optimization_level=0)
        >>> engine(samples).shape
        (4, 10)

    Parameters
    ----------
    model
        A file (ONNX, a Caffe prototxt, or of TensorFlow: a SavedModel's folder, .h5, .keras, .pb, .tflite), the bytes of an ONNX file, an
        `onnx.ModelProto`, a `torch.nn.Module`, or a `whet.network.Network`.
    config
        A BuildConfig to start from; the other parameters override its fields.
    shapes
        Shape by input name: a tuple for a fixed shape, a `whet.Profile` or a tuple (min, opt, max) for a range. For a model with one input
        the shape or the profile alone. A list of such dicts makes several profiles, each tuned for its own opt shapes.
        Dynamic sizes without a shape become 1, with a BuildWarning.
    fp16, bf16
        Permit 16-bit kernels where they are faster.
    int8, fp8, best
        Permit 8-bit kernels (`best`: all types). The value is the calibration data: an iterable of samples (dicts of arrays by input name;
        arrays for a model with one input), a function that returns one, a folder or an array file, or a `whet.builder.Calibration`.
        `True` for a model with Q/DQ nodes, which has its ranges.
    accuracy
        The budget for lower precision, such as "snr:30", "cosine:0.999" or "python:my_eval:top1:0.5".
    example
        For a torch module: its arguments, a tensor or a tuple of tensors. Default: random tensors of `shapes`.
    progress
        Callbacks of the build (`whet.builder.Progress`). Default: a line on standard error every ten seconds; `whet.builder.Silent()` prints
        nothing.
    **options
        The fields of `whet.BuildConfig`: backend="cuda", threads=4, optimization_level=5, timing_cache="", lock="model.lock.json", ...

    Raises UsageError for an unsuitable argument, with its name; FrontendError and UnsupportedError for the model; CalibrationError for the data;
    BuildError if no engine can be built. Notes of the build are BuildWarnings; `engine.plan.report` has all decisions.
    `whet.builder.build` is the lower level: network -> plan.
    """
    from whet.builder.precision.permitted import build_permitted
    from whet.builder.progress import PrintedProgress
    from whet.precision.budget import Budget
    from whet.runtime import Runtime

    permitted = {"fp16": fp16, "bf16": bf16, "int8": int8, "fp8": fp8, "best": best}
    config = _make_config(config, permitted, options)
    if accuracy is not None and not isinstance(accuracy, str):
        raise UsageError(f"accuracy: a text such as 'snr:30', not {type(accuracy).__name__}")
    budget = Budget.parse(accuracy) if accuracy is not None else None
    if budget is not None and not config.precisions:
        raise UsageError("accuracy: it bounds the loss of fp16, bf16, int8, fp8 or best, and none of them is given")
    net = _read_network(model, shapes, example)
    config = _with_profiles(config, net, shapes)
    calibration = _make_calibration(net, config, permitted)
    if progress is None:
        with PrintedProgress() as printed:
            plan = build_permitted(net, config, calibration, budget=budget, progress=printed)
    else:
        plan = build_permitted(net, config, calibration, budget=budget, progress=progress)
    for note in plan.report.notes:
        warnings.warn(translate_flags(note).replace("Use profiles=", "Use shapes="), BuildWarning, stacklevel=2)  # this function's parameter
    return Runtime(backend=config.backend, threads=max(config.threads, 0)).load(plan)


def load(
    path: str | os.PathLike | bytes,
    *,
    backend: str | None = None,
    threads: int = 0,
    require_same_hardware: bool = False,
    record_shapes: str | os.PathLike | None = None,
) -> Engine:
    """Opens a saved engine: a file, or its bytes.

        >>> import numpy as np, whet
        >>> _ = whet.zoo.save("lenet5", "lenet5.onnx")
        >>> whet.build("lenet5.onnx", shapes=(1, 1, 32, 32), optimization_level=0).save("lenet5.engine").name
        'lenet5.engine'
        >>> engine = whet.load("lenet5.engine")
        >>> engine({"input": np.zeros((1, 1, 32, 32), np.float32)})["output"].shape
        (1, 10)

    `threads` 0 uses as many CPU threads as the engine was tuned with. An engine that was tuned on other hardware is loaded with an
    EngineWarning, or with `require_same_hardware` refused. `record_shapes` is a file to which the shapes of its runs are added when it is closed,
    or at the end of the process: `whet retune --from-trace` tunes for the frequent ones. Raises EngineError for a file that is missing, damaged
    or of another version.
    """
    from whet.runtime import Runtime

    if not isinstance(path, str | os.PathLike | bytes | bytearray | memoryview):
        raise UsageError(f"path: the name of an engine file, or its bytes, not {path!r}")
    if isinstance(path, str | os.PathLike) and (name := os.fspath(path)).endswith(_MODEL_SUFFIXES):
        raise UsageError(f"path: {name} is a model, not an engine: whet.build({name!r}) makes an engine of it")
    return Runtime(backend=backend, threads=threads).load(path, require_same_hardware=require_same_hardware, record_shapes=record_shapes)


def _make_config(config: BuildConfig | None, permitted: Mapping[str, Any], options: Mapping[str, Any]) -> BuildConfig:
    """The BuildConfig of the arguments. Raises UsageError for an unknown or unsuitable one."""
    from whet.builder.config import BuildConfig

    if config is not None and not isinstance(config, BuildConfig):
        raise UsageError(f"config: a whet.BuildConfig, not {type(config).__name__}; options are given by name: whet.build(model, fp16=True)")
    fields = {f.name for f in dataclasses.fields(BuildConfig)}
    names = [*inspect.signature(build).parameters, *sorted(fields)]
    for name in options:
        if name not in fields:
            raise UsageError(f"whet.build has no parameter {name!r}.{suggest_name(name, names)}")
    for name in ("fp16", "bf16"):
        if not isinstance(permitted[name], bool):
            raise UsageError(f"{name}: True or False, not {type(permitted[name]).__name__}")
    changed = dict(options)
    chosen = tuple(n for n, value in permitted.items() if _is_given(value))
    if chosen:
        earlier = options.get("precisions", config.precisions if config is not None else ())
        changed["precisions"] = tuple(dict.fromkeys((*earlier, *chosen)))
    return dataclasses.replace(config, **changed) if config is not None else BuildConfig(**changed)


def _is_given(value: Any) -> bool:
    """False for None and False; arrays have no truth value."""
    return value is not None and value is not False


def _read_network(model: Any, shapes: Any, example: Any) -> Network:
    """The source network of a model. Raises UsageError for another kind of object."""
    from whet.network import Network

    if isinstance(model, Network):
        return model
    if isinstance(model, str | os.PathLike):
        return _read_file(os.fspath(model), shapes)
    if isinstance(model, bytes | bytearray | memoryview):
        return _read_onnx(bytes(model), shapes)
    if hasattr(model, "SerializeToString"):
        return _read_onnx(model, shapes)
    if hasattr(model, "named_modules"):
        return _export_module(model, shapes, example)
    raise UsageError(
        f"model: a file, bytes, an onnx.ModelProto, a torch.nn.Module or a whet.network.Network, not {type(model).__name__}"
    )


def _read_file(path: str, shapes: Any) -> Network:
    from whet.engine.layout import MAGIC
    from whet.frontends import model_kind, network_from_file

    if not Path(path).exists():
        raise UsageError(f"model: there is no file {path}")
    kind = model_kind(path)
    if kind == "caffe":
        fixed = {n: p.opt for n, p in _make_profiles(shapes, None).items()} if isinstance(shapes, Mapping) else None
        return network_from_file(path, shapes=fixed)
    if kind == "tensorflow" or not Path(path).is_file():
        return network_from_file(path)
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            raise UsageError(f"model: {path} is an engine already: whet.load({path!r}) opens it")
    return _read_onnx(path, shapes)


def _read_onnx(source: Any, shapes: Any) -> Network:
    """Reads a model with dynamic shapes if possible, else at the given fixed shapes."""
    from whet.errors import UnsupportedError
    from whet.frontends import network_from_onnx

    try:
        return network_from_onnx(source)
    except UnsupportedError:
        if not isinstance(shapes, Mapping):
            raise
        profiles = _make_profiles(shapes, None)
        if any(p.min != p.max for p in profiles.values()):
            raise
        return network_from_onnx(source, shapes={n: p.opt for n, p in profiles.items()})


def _export_module(module: Any, shapes: Any, example: Any) -> Network:
    from whet.frontends.torch import from_torch, make_example

    if example is not None:
        return from_torch(module, example)
    if shapes is None:
        raise UsageError('shapes: a torch module has no shapes of its own: give shapes={"x": (1, 3, 224, 224)} or example=tensor')
    first_parameter = list(inspect.signature(module.forward).parameters)[:1]
    sets = [_make_profiles(s, first_parameter) for s in _list_profiles(shapes)]
    names, tensors = make_example(module, {n: p.opt for n, p in sets[0].items()})
    ranges = [p for by_name in sets for p in by_name.values()]
    dynamic = len({p.opt for p in ranges}) > len(names) or any(p.min != p.max for p in ranges)
    return from_torch(module, tensors, dynamic_batch=dynamic, input_names=names)


def _with_profiles(config: BuildConfig, net: Network, shapes: Any) -> BuildConfig:
    """`config` with the profiles of `shapes`. Raises UsageError."""
    if shapes is None:
        return config
    if config.profiles:
        raise UsageError("shapes: the profiles are given by config or profiles= already; leave one of them out")
    names = [t.name for t in net.inputs]
    profiles = []
    for one in _list_profiles(shapes):
        by_name = _make_profiles(one, names)
        for name in by_name:
            if name not in names:
                raise UsageError(f"shapes: the model has no input {name!r}.{suggest_name(name, names)} It has {', '.join(names)}.")
        low, opt, high = ({n: getattr(p, which) for n, p in by_name.items()} for which in ("min", "opt", "max"))
        profiles.append((low, opt, high))
    return dataclasses.replace(config, profiles=tuple(profiles))


def _list_profiles(shapes: Any) -> list[Any]:
    """The argument `shapes` of each profile: a list of dicts or profiles has several."""
    several = isinstance(shapes, list) and shapes and all(isinstance(s, Mapping | Profile) for s in shapes)
    return shapes if several else [shapes]


def _make_profiles(shapes: Any, names: Sequence[str] | None) -> dict[str, Profile]:
    """The Profile of each input. `names` has the model's inputs: a shape without a name belongs to the only one. Raises UsageError."""
    if isinstance(shapes, Mapping):
        return {str(n): _profile(f"shapes[{n!r}]", s) for n, s in shapes.items()}
    if names is None or len(names) != 1:
        inputs = f"the model has the inputs {', '.join(names)}: " if names else ""
        raise UsageError(f"shapes: {inputs}give a dict of shapes by input name, not {type(shapes).__name__}")
    return {names[0]: _profile("shapes", shapes)}


def _profile(name: str, value: Any) -> Profile:
    """The Profile of a shape, a (min, opt, max) triple or a Profile. Raises UsageError with the parameter's name."""
    if isinstance(value, Profile):
        return value
    if isinstance(value, Mapping):
        if unknown := [k for k in value if k not in ("min", "opt", "max")]:
            raise UsageError(f"{name}: {unknown[0]!r} is none of min, opt, max")
        return Profile(**{k: _check_shape(f"{name}[{k!r}]", s) for k, s in value.items()})
    if isinstance(value, Sequence) and value and all(isinstance(v, list | tuple) for v in value):
        if len(value) != 3:
            raise UsageError(f"{name}: {len(value)} shapes; a range is (min, opt, max)")
        return Profile(*(_check_shape(f"{name}[{i}]", s) for i, s in enumerate(value)))
    shape = _check_shape(name, value)
    return Profile(shape, shape, shape)


def _check_shape(name: str, value: Any) -> Shape:
    """A tuple of positive ints. Raises UsageError with the parameter's name."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"{name}: a shape is a tuple such as (1, 3, 224, 224), not {value!r}")
    sizes = tuple(value)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise UsageError(f"{name}: {size!r} is not a size; a shape is a tuple of ints such as (1, 3, 224, 224)")
        if size < 1:
            raise UsageError(f"{name}: {sizes} has the size {size}; sizes are 1 or more")
    return tuple(int(s) for s in sizes)


def _make_calibration(net: Network, config: BuildConfig, permitted: Mapping[str, Any]) -> Calibration:
    """The source of ranges. Raises UsageError if a precision that needs ranges has none."""
    from whet.builder.precision.calibration import Calibration, is_explicit

    sources = {n: permitted[n] for n in ("int8", "fp8", "best") if _is_given(permitted[n])}
    data = {n: v for n, v in sources.items() if v is not True}
    if len(data) > 1:
        raise UsageError(f"{', '.join(data)}: give the calibration data to one of them and True to the others")
    needs = next((p for p in ("int8", "fp8") if p in config.precisions), None)
    if not data:
        if needs is not None and not (config.lock or is_explicit(net)):
            raise UsageError(
                f"{needs}: the network has no Q/DQ nodes, so that its ranges come from data: {needs}=samples, an iterable of arrays or of dicts "
                "of arrays by input name"
            )
        return Calibration()
    (name, value), = data.items()
    if isinstance(value, Calibration):
        return value
    return Calibration(samples=_sample_source(name, value, net))


def _sample_source(name: str, value: Any, net: Network) -> Callable[[], Iterable[Mapping[str, np.ndarray]]]:
    """A function that yields the samples of an argument, again at each call. Raises UsageError with the parameter's name."""
    from whet.precision.data import calibration_data, name_samples

    if isinstance(value, str | os.PathLike):
        return lambda: calibration_data(os.fspath(value), net)
    if callable(value):
        return lambda: name_samples(value(), net, name)
    if isinstance(value, Mapping) or hasattr(value, "__array__"):
        return lambda: name_samples([value], net, name)
    if not isinstance(value, Iterable):
        raise UsageError(f"{name}: calibration data (an iterable of samples, a function, a folder, an array file) or True, not {value!r}")
    samples = list(value)  # they are read several times, and an iterator yields them once
    if not samples:
        raise UsageError(f"{name}: the calibration data is empty")
    return lambda: name_samples(samples, net, name)
