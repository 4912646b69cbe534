"""NVIDIA's TensorRT as a peer of GPU benchmarks: the engine of an ONNX file, run on torch tensors. Needs its Python package `tensorrt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class TensorRtRunner:
    """TensorRT's engine of an ONNX file, bound to torch tensors; a call enqueues it on torch's current stream.

    `inputs` are torch tensors by name, which are converted to the engine's types; `outputs` are its output tensors by name, the same at each call.
    All stay on the inputs' device, so that a call can be captured as a CUDA graph. Raises UsageError without the package or for a precision that it
    takes from the model only, BuildError with TensorRT's messages.
    """

    def __init__(self, model: str, inputs: Mapping[str, Any], precisions: Sequence[str]):
        import torch

        from whet.measure.tensorrt_engine import build_tensorrt

        built = build_tensorrt(model, precisions=precisions, shapes={n: tuple(a.shape) for n, a in inputs.items()})
        types = {n: torch.from_numpy(np.zeros(1, built.dtype(n).numpy)).dtype for n in (*built.inputs, *built.outputs)}
        self.device = next(iter(inputs.values())).device
        self.inputs = {n: a.to(types[n]).contiguous() for n, a in inputs.items()}
        self._built, self._context = built, built.engine.create_execution_context()
        for name, a in self.inputs.items():
            assert self._context.set_input_shape(name, tuple(a.shape)), f"TensorRT refuses the shape {tuple(a.shape)} of {name}"
        self.outputs = {n: torch.empty(tuple(self._context.get_tensor_shape(n)), dtype=types[n], device=self.device) for n in built.outputs}
        for name, a in (self.inputs | self.outputs).items():
            self._context.set_tensor_address(name, a.data_ptr())

    def __call__(self) -> dict[str, Any]:
        import torch

        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        assert self._context.execute_async_v3(stream), "TensorRT could not enqueue its engine"
        return self.outputs
