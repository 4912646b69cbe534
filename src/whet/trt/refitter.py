"""Refitter and OnnxParserRefitter: new weights in an engine, with the kernels that it has."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from whet.errors import EngineError, WhetError
from whet.frontends import network_from_onnx
from whet.network import Network
from whet.runtime.refit import list_missing_weights, read_refittable_weights, refit
from whet.trt.enums import DataType, ErrorCodeTRT, TensorLocation, from_whet
from whet.trt.errors import NotServedError
from whet.trt.handle import Handle
from whet.trt.interfaces import report_error
from whet.trt.logger import ILogger
from whet.trt.parser import HasErrors, ParserError
from whet.trt.runtime import ICudaEngine
from whet.trt.weights import Weights, get_array


class Refitter(Handle):
    """Collects new values of weights, and puts them into an engine with `refit_cuda_engine`. Its contexts use them from their next run on.

    Names are those of the ONNX file's weights (of networks built by hand: of their constants).
    """

    def __init__(self, engine: ICudaEngine, logger: ILogger):
        self.engine = engine
        self.logger = logger
        self.error_recorder: Any = None
        self.max_threads = 1
        self.weights_validation = True
        self._new: dict[str, np.ndarray] = {}
        self._model: Network | None = None  # of OnnxParserRefitter: the refitted engine must compute what it computes

    def get_all_weights(self) -> list[str]:
        """Names of all weights that can be replaced."""
        return sorted(self.engine.engine.refittable_weights())

    def get_missing_weights(self) -> list[str]:
        """Names of weights that must be given besides those that are set: both compute one constant, and the engine has no values of the former."""
        return list_missing_weights(self.engine.engine.plan, self._new)

    def get_weights_prototype(self, weights_name: str) -> Weights:
        """The element type and, without values, the number of elements; an unknown name gives an empty one."""
        known = self.engine.engine.refittable_weights().get(weights_name)
        return Weights(DataType.FLOAT if known is None else from_whet(known.dtype))

    def set_named_weights(self, name: str, weights: Weights | np.ndarray, location: TensorLocation = TensorLocation.HOST) -> bool:
        """Sets new values; False for a name that cannot be replaced or values of another size, with the reason in the log."""
        if location != TensorLocation.HOST and not self.engine.engine.backend.capabilities.host_memory:
            raise NotServedError("Refitter.set_named_weights", "weights are given in host memory")
        known, given = self.engine.engine.refittable_weights(), get_array(weights)
        if name not in known:
            self._report(EngineError(f"the engine has no refittable weight {name!r}; get_all_weights() lists them"))
            return False
        type_ = known[name]
        if type_ is not None:
            shape = tuple(d for d in type_.shape if isinstance(d, int))
            if given.size != np.prod(shape, dtype=int) or given.dtype != type_.dtype.numpy:
                self._report(EngineError(f"the weight {name!r} is {type_}, the new values are {given.dtype} of {given.size} elements"))
                return False
            given = given.reshape(shape)
        self._new[name] = np.array(given)  # the caller may reuse its memory
        return True

    def unset_named_weights(self, name: str) -> bool:
        """Forgets new values; False if there are none."""
        return self._new.pop(name, None) is not None

    def get_named_weights(self, name: str) -> Weights:
        """New values that are set; without any, an empty prototype."""
        return Weights(self._new[name]) if name in self._new else self.get_weights_prototype(name)

    def get_weights_location(self, name: str) -> TensorLocation:
        """HOST."""
        return TensorLocation.HOST

    def refit_cuda_engine(self) -> bool:
        """Puts the new values into the engine; False, with the reason in the log, if one is missing or cannot be used: it is unchanged then."""
        try:
            self.engine.engine = refit(self.engine.engine, self._new, like=self._model)
        except WhetError as e:
            self._report(e)
            return False
        self._new.clear()
        self._model = None
        return True

    def take(self, network: Network) -> None:
        """Sets all weights of a network of the same structure. Raises EngineError for a weight that does not fit."""
        weights = read_refittable_weights(self.engine.engine, network)
        self._new, self._model = {**self._new, **weights}, network

    def refit_cuda_engine_async(self, stream_handle: int) -> bool:
        """As `refit_cuda_engine`; it returns when it is done."""
        return self.refit_cuda_engine()

    def _report(self, e: WhetError) -> None:
        report_error(self.logger, self.error_recorder, e, ErrorCodeTRT.INVALID_ARGUMENT)


class OnnxParserRefitter(HasErrors):
    """Sets all weights of a Refitter from an ONNX model of the same structure; `refit_cuda_engine` then compares the outputs with that model's."""

    def __init__(self, refitter: Refitter, logger: ILogger):
        super().__init__()
        self.refitter, self.logger = refitter, logger

    def refit_from_bytes(self, model: bytes, path: str | None = None) -> bool:
        """Sets the weights of a serialized model; False if one does not fit or the model has another structure."""
        return self._refit(bytes(model))

    def refit_from_file(self, model: str | os.PathLike) -> bool:
        """Sets the weights of a model file."""
        return self._refit(os.fspath(model))

    def _refit(self, source: bytes | str) -> bool:
        try:
            self.refitter.take(network_from_onnx(source))
        except (WhetError, OSError) as e:
            self._errors.append(ParserError(str(e)))
            self.logger.log(ILogger.ERROR, str(e))
            return False
        return True
