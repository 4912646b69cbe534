"""OnnxParser: fills a network definition from an ONNX model, and says which parts of a model it can read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from whet.errors import FrontendError, WhetError
from whet.frontends import Problem, Report, check_onnx, network_from_onnx
from whet.frontends.onnx_check import reads_op
from whet.trt.enums import ErrorCode, OnnxParserFlag
from whet.trt.handle import Handle
from whet.trt.logger import ILogger
from whet.trt.network import INetworkDefinition


@dataclass(frozen=True)
class ParserError:
    """A reason for which a model was not read; `problem` is the node's, None for an error of the whole model."""

    text: str
    problem: Problem | None = None
    kind: ErrorCode = ErrorCode.UNSUPPORTED_NODE

    def code(self) -> ErrorCode:
        """The kind of error."""
        return self.kind

    def desc(self) -> str:
        """The message; it names the node."""
        return self.text

    def node(self) -> int:
        """The index of the node in the model's graph; -1 for an error of the whole model."""
        return -1 if self.problem is None else self.problem.index

    def node_name(self) -> str:
        """The node's name; "" for an error of the whole model."""
        return "" if self.problem is None else self.problem.node

    def node_operator(self) -> str:
        """The node's op; "" for an error of the whole model."""
        return "" if self.problem is None else self.problem.op

    def file(self) -> str:
        """The source file that refused the node, which is not reported."""
        return ""

    def func(self) -> str:
        """The function that refused the node, which is not reported."""
        return ""

    def line(self) -> int:
        """The line of `file`: 0."""
        return 0

    def local_function_stack(self) -> list[str]:
        """The ONNX functions that contain the node, which its name contains here: none."""
        return []

    def local_function_stack_size(self) -> int:
        """0."""
        return 0

    def __str__(self) -> str:
        return self.text


class HasErrors(Handle):
    """An object that lists the errors of its calls."""

    def __init__(self) -> None:
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        """The number of errors since `clear_errors`."""
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        """An error."""
        return self._errors[index]

    def clear_errors(self) -> None:
        """Forgets the errors."""
        self._errors.clear()


class OnnxParser(HasErrors):
    """Reads ONNX models into `network`. The parse functions return False on failure and keep the errors of all nodes that cannot be read."""

    def __init__(self, network: INetworkDefinition, logger: ILogger):
        super().__init__()
        self.network = network
        self.logger = logger
        self.flags = 1 << OnnxParserFlag.NATIVE_INSTANCENORM
        self._subgraphs: list[tuple[list[int], bool]] = []

    def parse(self, model: bytes, path: str | None = None) -> bool:
        """Reads a serialized model; `path` is the model's file, for weights in files next to it."""
        return self._read(bytes(model), Path(path).parent if path else None)

    def parse_from_file(self, model: str | os.PathLike) -> bool:
        """Reads a file."""
        return self._read(os.fspath(model), None)

    def _read(self, source: bytes | str, folder: Path | None) -> bool:
        try:
            self.network.whet = network_from_onnx(source, folder=folder)
        except (WhetError, OSError) as e:
            self._check(source, folder, e)
            return False
        return True

    def _check(self, source: bytes | str, folder: Path | None, error: Exception | None = None) -> Report | None:
        """Keeps the errors of all nodes that cannot be read, else `error`, and logs them; None for a file that is no readable model."""
        report: Report | None = None
        found: list[ParserError] = []
        try:
            report = check_onnx(source, folder=folder)
            found = [ParserError(p.reason, p) for p in report.problems if p.reached]
        except (WhetError, OSError) as e:
            error = error or e
        if not found and error is not None:
            unreadable = isinstance(error, FrontendError | OSError)
            found = [ParserError(str(error), kind=ErrorCode.MODEL_DESERIALIZE_FAILED if unreadable else ErrorCode.UNSUPPORTED_GRAPH)]
        for each in found:
            self.logger.log(ILogger.ERROR, str(each))
        self._errors += found
        return report

    # capability

    def supports_model(self, model: bytes, path: str | None = None) -> tuple[bool, list[tuple[list[int], bool]]]:
        """(True if the model can be read, [(indices of consecutive nodes, True if these can be read)]). The list is empty if no node can be read:
        a partitioning that divides the subgraphs which cannot be read ends there.

        The errors of nodes that cannot be read are kept, as those of `parse`.
        """
        supported = self.supports_model_v2(model, path)
        return supported, list(self._subgraphs)

    def supports_model_v2(self, model: bytes, path: str | None = None) -> bool:
        """True if the model can be read. The subgraphs that can and cannot be read are kept for `is_subgraph_supported`."""
        self._subgraphs = []
        known = len(self._errors)
        report = self._check(bytes(model), Path(path).parent if path else None)
        if report is None:
            return False
        refused = {p.index for p in report.problems if p.reached}
        numbers = groupby(range(report.nodes), key=lambda i: i not in refused)
        self._subgraphs = [(list(indices), supported) for supported, indices in numbers] if len(refused) < report.nodes else []
        return len(self._errors) == known

    def supports_operator(self, op_name: str) -> bool:
        """True if whet reads nodes of an op of ONNX's own domain, or of a plugin."""
        return reads_op(op_name)

    @property
    def num_subgraphs(self) -> int:
        """The number of subgraphs that `supports_model_v2` found: runs of nodes that can be read, and those between them."""
        return len(self._subgraphs)

    def get_subgraph_nodes(self, index: int) -> list[int]:
        """The indices of a subgraph's nodes, in the order of the model's graph."""
        return list(self._subgraphs[index][0])

    def is_subgraph_supported(self, index: int) -> bool:
        """True if the nodes of a subgraph can be read."""
        return self._subgraphs[index][1]

    # errors and flags

    def set_flag(self, flag: OnnxParserFlag) -> None:
        """Sets a flag."""
        self.flags |= 1 << flag

    def clear_flag(self, flag: OnnxParserFlag) -> None:
        """Clears a flag."""
        self.flags &= ~(1 << flag)

    def get_flag(self, flag: OnnxParserFlag) -> bool:
        """True if a flag is set."""
        return bool(self.flags & 1 << flag)
