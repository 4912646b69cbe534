"""InferenceSession: an ONNX model with an engine for each set of input shapes that it meets."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.api import build
from whet.errors import ShapeError, UsageError, WhetWarning
from whet.forks import make_lock
from whet.frontends.onnx_metadata import ModelMetadata, read_model_metadata
from whet.network import Network, TensorType
from whet.ort.options import RunOptions, SessionOptions
from whet.ort.providers import Provider, select_provider
from whet.ort.values import IOBinding, OrtValue, format_tensor_type
from whet.registry import suggest_name
from whet.runtime import Engine

_MANY = 3  # engines of one session, from which on a warning advises a range of shapes


@dataclass(frozen=True)
class NodeArg:
    """An input or output: its name, type ("tensor(float)") and shape, in which a str is a dynamic dimension."""

    name: str
    type: str
    shape: list[int | str]


class InferenceSession:
    """A model that runs on whet's engines, used as ONNX Runtime's class of this name.

        >>> import numpy as np, whet, whet.ort as ort
        >>> path = whet.zoo.save("lenet5", "lenet5.onnx")
        >>> options = ort.SessionOptions()
        >>> options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        >>> session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        >>> [(x.name, x.type, x.shape) for x in session.get_inputs()]
        [('input', 'tensor(float)', ['N', 1, 32, 32])]
        >>> (scores,) = session.run(None, {"input": np.zeros((2, 1, 32, 32), np.float32)})
        >>> scores.shape
        (2, 10)

    An engine is built and verified for each set of input shapes: here if all shapes are fixed or `shapes` is given, else at the first run with
    them. Give `shapes` with ranges, as in `whet.build`, for one engine that takes many. Runs are safe from any thread.

    `path_or_bytes` is an ONNX file, its bytes, or a saved engine. `providers` select the backend; TensorRT's options `trt_fp16_enable` and
    `trt_bf16_enable` permit these types. Other keyword arguments go to `whet.build` (bf16=True, int8=samples, timing_cache="").
    Raises what `whet.build` raises.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[dict[str, Any]] | None = None,
        **build_options: Any,
    ):
        if sess_options is not None and not isinstance(sess_options, SessionOptions):
            raise UsageError(f"sess_options: a whet.ort.SessionOptions, not {type(sess_options).__name__} of {type(sess_options).__module__}")
        self._options = sess_options or SessionOptions()
        self._provider, backend, permitted = select_provider(providers, provider_options)
        self._lock = make_lock()
        self._engines: dict[tuple[tuple[int, ...], ...], Engine] = {}
        self._shared: Engine | None = None  # takes all shapes that the session takes
        self._net: Network | None = None
        self._metadata = ModelMetadata()
        if _is_engine(path_or_bytes):
            from whet.api import load

            self._shared = load(path_or_bytes)
            self._types = (self._shared.inputs, self._shared.outputs)
            return
        self._build_options = {"backend": backend, **self._options.build_options(), **permitted, **build_options}
        self._net = self._read(path_or_bytes)
        self._metadata = read_model_metadata(path_or_bytes)
        self._types = ({t.name: t.type for t in self._net.inputs}, {t.name: t.type for t in self._net.outputs})
        if "shapes" in build_options or "profiles" in build_options or all(t.static for t in self._types[0].values()):
            self._shared = build(self._net, **self._build_options)
            self._save(self._shared)

    def _read(self, source: Any) -> Network:
        from whet.frontends import network_from_onnx

        net = network_from_onnx(source)
        overrides = self._options._dimensions
        if not overrides:
            return net
        shapes = {t.name: tuple(overrides.get(str(d), None) for d in t.shape) for t in net.inputs if not t.type.static}
        return network_from_onnx(source, shapes=shapes)

    # description

    def get_inputs(self) -> list[NodeArg]:
        """The inputs, in the model's order."""
        return _describe(self._types[0])

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in the model's order."""
        return _describe(self._types[1])

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Empty: weights are part of the engine."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        """Producer, version, description and custom properties of the model; empty for a saved engine."""
        return self._metadata

    def get_providers(self) -> list[str]:
        """The provider in use."""
        return [self._provider]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """No options by provider."""
        return {self._provider: {}}

    def get_session_options(self) -> SessionOptions:
        """The options of the session."""
        return self._options

    @property
    def engines(self) -> list[Engine]:
        """The engines that the session has built so far: `session.engines[0].explain()`."""
        return [self._shared] if self._shared is not None else list(self._engines.values())

    # running

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None) -> list[np.ndarray]:
        """Outputs in the order of `output_names` (None: all) for inputs by name: NumPy arrays, OrtValues or lists.

        Raises ShapeError for unsuitable inputs, UsageError for an unknown output.
        """
        names = [self.known(n, "output") for n in output_names] if output_names else list(self._types[1])
        outputs = self._run({n: a.numpy() if isinstance(a, OrtValue) else a for n, a in self._feed(input_feed).items()})
        return [outputs[n] for n in names]

    def run_async(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], callback: Callable[[Any, Any, str], None], user_data: Any = None,
        run_options: RunOptions | None = None,
    ) -> None:  # fmt: skip
        """Runs in another thread, then calls `callback(outputs, user_data, error)`; `error` is "" or the text of the exception."""
        from threading import Thread

        def work() -> None:
            try:
                outputs, error = self.run(output_names, input_feed), ""
            except Exception as e:  # noqa: BLE001 - given to the callback
                outputs, error = [], str(e)
            callback(outputs, user_data, error)

        Thread(target=work, name="whet-run-async", daemon=True).start()

    def run_with_ort_values(self, output_names: Sequence[str] | None, input_dict: Mapping[str, OrtValue]) -> list[OrtValue]:
        """`run` with values in and out."""
        names = [self.known(n, "output") for n in output_names] if output_names else list(self._types[1])
        outputs = self._run({n: v._data for n, v in self._feed(input_dict).items()})
        return [OrtValue(outputs[n]) for n in names]

    def io_binding(self) -> IOBinding:
        """Inputs and outputs in memory that the caller chooses, for `run_with_iobinding`."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Runs on bound inputs; the outputs are in the binding."""
        iobinding.keep(self._run(self._feed(iobinding.feed())))

    def known(self, name: str, kind: str) -> str:
        """`name` if it is an input or output (`kind`) of the model. Raises UsageError with the nearest name."""
        names = self._types[0 if kind == "input" else 1]
        if name not in names:
            raise UsageError(f"the model has no {kind} {name!r}.{suggest_name(str(name), names)} It has {', '.join(names)}.")
        return name

    def _feed(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(feeds, Mapping):
            raise UsageError(f"input_feed: a dict of arrays by input name, not {type(feeds).__name__}")
        for name in feeds:
            self.known(name, "input")
        if missing := [n for n in self._types[0] if n not in feeds]:
            raise ShapeError(f"input_feed: '{missing[0]}' is missing; the model takes {', '.join(f'{n}: {t}' for n, t in self._types[0].items())}")
        return feeds

    def _run(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {n: a if hasattr(a, "__dlpack__") else np.asarray(a, self._types[0][n].dtype.numpy) for n, a in feed.items()}
        return self._engine({n: tuple(a.shape) for n, a in arrays.items()}).run(arrays)

    def _engine(self, shapes: dict[str, tuple[int, ...]]) -> Engine:
        """The engine for input shapes; built if it is the first run with them."""
        if self._shared is not None:
            return self._shared
        key = tuple(shapes[n] for n in self._types[0])
        with self._lock:
            if key not in self._engines:
                assert self._net is not None
                self._check(shapes)
                self._engines[key] = build(self._net, shapes=shapes, **self._build_options)
                self._save(self._engines[key])
                if len(self._engines) == _MANY:
                    advice = "give shapes={name: (min, opt, max)} to build one for all"
                    warnings.warn(f"the session has built engines for {_MANY} sets of input shapes; {advice}", WhetWarning, stacklevel=4)
            return self._engines[key]

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ShapeError for shapes that no engine of the model takes, before a build."""
        for name, type_ in self._types[0].items():
            fits = len(shapes[name]) == type_.rank and all(not isinstance(w, int) or w == d for d, w in zip(shapes[name], type_.shape, strict=True))
            if not fits:
                raise ShapeError(f"input_feed: '{name}' has the shape {list(shapes[name])}, the model takes {type_}")

    def _save(self, engine: Engine) -> None:
        if self._options.optimized_model_filepath:
            engine.save(self._options.optimized_model_filepath)


def _is_engine(source: Any) -> bool:
    from whet.engine.layout import MAGIC

    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source[: len(MAGIC)]) == MAGIC
    try:
        with open(source, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # the reader of models reports it


def _describe(types: Mapping[str, TensorType]) -> list[NodeArg]:
    return [NodeArg(n, format_tensor_type(t.dtype), [d if isinstance(d, int) else str(d) for d in t.shape]) for n, t in types.items()]
