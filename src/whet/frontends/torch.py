"""Reads a PyTorch module as a Network, by torch.export and torch.onnx. Needs torch and onnxscript (the extra `export`).

Models pruned by other tools (Torch-Pruning, ASP, ModelOpt) are imported this way. Batch norms are kept, so that the network can be
pruned, fine-tuned and calibrated.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from whet.errors import BackendError, FrontendError, UnsupportedError
from whet.frontends.onnx import network_from_onnx
from whet.network import Expr, Network

OPSET = 18
_INSTALL = "pip install 'whet[export]' (PyTorch 2.6 or newer, and onnxscript)"


def from_torch(
    module: Any,
    example: Any,
    *,
    dynamic_batch: bool = True,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Network:
    """Reads `module` (torch.nn.Module) in evaluation mode as a source network. The module is not changed.

    `example` is a tensor or a tuple of tensors, the module's arguments. With `dynamic_batch` the first dimension of each becomes the symbol N.
    Raises BackendError without torch or onnxscript, FrontendError if torch's exporter fails, with the smallest failing submodule and the
    workaround, UnsupportedError for an unsupported op.
    """
    for package in ("torch", "onnxscript"):
        if find_spec(package) is None:
            raise BackendError(f"whet.from_torch needs {package}, which is not installed: {_INSTALL}")
    import torch

    if not isinstance(module, torch.nn.Module):
        raise FrontendError(f"whet.from_torch takes a torch.nn.Module, not {type(module).__name__}; whet.network_from_onnx reads ONNX files")
    args = example if isinstance(example, tuple) else (example,)
    if not args or not all(isinstance(a, torch.Tensor) for a in args):
        raise FrontendError("the example is a tensor, or a tuple of tensors: the arguments of module(*example)")
    was = {m: m.training for m in module.modules()}
    module.eval()
    try:
        try:
            model = _export(module, args, {}, dynamic_batch, input_names, output_names)
        except _list_failures() as e:
            raise FrontendError(_describe_failure(module, args, e, dynamic_batch)) from e
        try:
            net = network_from_onnx(model)
            if not dynamic_batch or not any(t.type.rank and isinstance(t.shape[0], Expr) for t in net.inputs):
                return net
            batch = {t.name: ("N", *(None,) * (t.type.rank - 1)) for t in net.inputs if t.type.rank}  # torch names it s31 or similar
            return network_from_onnx(model, shapes=batch)
        except UnsupportedError as e:
            raise UnsupportedError(f"torch exported {type(module).__name__}, but {e}") from e
    finally:
        for m, training in was.items():
            m.training = training


def make_example(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[str], tuple[Any, ...]]:
    """Input names and seeded random f32 tensors of `shapes`, in the order of the parameters of `module.forward` if all are named after these."""
    import torch

    parameters = list(inspect.signature(module.forward).parameters)
    names = [n for n in parameters if n in shapes] if set(shapes) <= set(parameters) else list(shapes)
    generator = torch.Generator().manual_seed(0)
    return names, tuple(torch.randn(shapes[n], generator=generator) for n in names)


def _export(
    module: Any, args: tuple, kwargs: dict, dynamic: bool, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None
) -> bytes:
    """Exports the module to a serialized ONNX model."""
    import torch

    shapes = None
    if dynamic:
        batch = torch.export.Dim("N", min=1)
        shapes = tuple({0: batch} if a.ndim else None for a in args)
        args = tuple(_double_batch(a) for a in args)  # torch specializes a batch of one to a constant
    with _quiet(), torch.no_grad():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
        made = torch.onnx.export(
            program, opset_version=OPSET, input_names=inputs, output_names=outputs, dynamo=True, optimize=False, verbose=False,
        )  # fmt: skip
    return made.model_proto.SerializeToString()


def from_exported(program: Any) -> Network:
    """Reads a torch.export.ExportedProgram as a source network; its dynamic dimensions become symbols.

    Raises BackendError without onnxscript, FrontendError if the program changes its inputs or buffers, or if torch.onnx cannot convert it,
    UnsupportedError for an unsupported op.
    """
    if find_spec("onnxscript") is None:
        raise BackendError(f"whet needs onnxscript to read a module of PyTorch, and it is not installed: {_INSTALL}")
    import torch

    if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.graph.nodes):
        with _quiet():
            program = program.run_decompositions({})  # only makes in-place operations functional; the signature then lists what they wrote to
    signature = program.graph_signature
    changed = [*getattr(signature, "user_inputs_to_mutate", {}).values(), *signature.buffers_to_mutate.values()]
    if changed:
        names = ", ".join(changed[:3])
        raise FrontendError(f"the program changes {names} in place, and an engine only computes outputs: return the new value instead")
    try:
        with _quiet(), torch.no_grad():
            model = torch.onnx.export(program, opset_version=OPSET, dynamo=True, optimize=False, verbose=False).model_proto.SerializeToString()
    except _list_failures() as e:
        raise FrontendError(f"torch.onnx cannot convert the program: {_get_first_line(e)}") from e
    return network_from_onnx(model)


def export_program(module: Any, args: tuple[Any, ...], dynamic_shapes: Any = None) -> Any:
    """torch.export.export without its output on the terminal. Raises FrontendError with the first line of torch's error."""
    import torch

    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(module, args, dynamic_shapes=dynamic_shapes, strict=False)
    except _list_failures() as e:
        raise FrontendError(f"torch.export cannot trace {type(module).__name__}: {_get_first_line(e)}") from e


def _double_batch(a: Any) -> Any:
    import torch

    return torch.cat([a, a]) if a.ndim and len(a) == 1 else a


def _list_failures() -> tuple[type[Exception], ...]:
    """The exceptions of torch's exporters and of a traced forward."""
    import torch

    return (
        torch.onnx.OnnxExporterError, torch._dynamo.exc.TorchDynamoException, RuntimeError, TypeError, ValueError, AttributeError, KeyError,
        IndexError, NotImplementedError, AssertionError,
    )  # fmt: skip


def _describe_failure(module: Any, args: tuple, error: Exception, dynamic: bool) -> str:
    """The failing submodule, the reason and the workaround."""
    import torch

    try:
        with torch.no_grad():
            module(*args)
    except _list_failures() as e:
        what = f"{type(module).__name__} itself fails on the example"
        return f"{what}: {_get_first_line(e)}. Give the arguments of module(*example)."
    if dynamic:
        try:
            _export(module, args, {}, False)
            return (
                f"torch cannot export {type(module).__name__} with a dynamic batch ({_get_first_line(error)}): its forward assumes the batch of the "
                "example. Give dynamic_batch=False, or take sizes from x.shape instead of constants."
            )
        except _list_failures() as e:
            error = e
    path, culprit, reason = _find_culprit(module, args, error)
    part = f"{type(module).__name__}" if not path else f"its submodule '{path}' ({type(culprit).__name__})"
    return (
        f"torch cannot export {part}: {_get_first_line(reason)}. Make this part exportable: no data-dependent Python branches and no .item(), "
        "torch.where and torch.cond instead (torch.export.export(module, example) checks it fastest); for an op without ONNX equivalent give "
        "torch.onnx.export a custom_translation_table (onnxscript); or export the ONNX file yourself and use whet.network_from_onnx."
    )


def _find_culprit(module: Any, args: tuple, error: Exception) -> tuple[str, Any, Exception]:
    """The path, module and error of the smallest submodule that cannot be exported with its inputs."""
    import torch

    seen: dict[str, tuple[tuple, dict]] = {}
    handles = [
        m.register_forward_pre_hook(lambda m, a, k, name=name: seen.setdefault(name, (a, k)) and None, with_kwargs=True)
        for name, m in module.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            module(*args)
    except _list_failures() as e:
        return "", module, e
    finally:
        for h in handles:
            h.remove()
    path, at, reason = "", module, error
    while True:
        for name, child in at.named_children():
            full = f"{path}.{name}" if path else name
            if full not in seen:
                continue
            try:
                _export(child, seen[full][0], seen[full][1], False)
            except _list_failures() as e:
                path, at, reason = full, child, e
                break
        else:
            return path, at, reason


def _get_first_line(e: Exception) -> str:
    """The first line of torch's error, without its stack."""
    cause: BaseException = e
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0][:300].rstrip('.')}" if lines else type(cause).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's exporters, which print progress and internal warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
