"""OnnxParser: fills a network definition from an ONNX model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from whet.errors import WhetError
from whet.frontends import network_from_onnx
from whet.trt.enums import OnnxParserFlag
from whet.trt.handle import Handle
from whet.trt.logger import ILogger
from whet.trt.network import INetworkDefinition


@dataclass(frozen=True)
class ParserError:
    """A reason for which a model was not read."""

    text: str

    def desc(self) -> str:
        """The message; it names the node."""
        return self.text

    def __str__(self) -> str:
        return self.text


class OnnxParser(Handle):
    """Reads ONNX models into `network`. The parse functions return False on failure and keep the errors."""

    def __init__(self, network: INetworkDefinition, logger: ILogger):
        self.network = network
        self.logger = logger
        self.flags = 1 << OnnxParserFlag.NATIVE_INSTANCENORM
        self._errors: list[ParserError] = []

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
            self._errors.append(ParserError(str(e)))
            self.logger.log(ILogger.ERROR, str(e))
            return False
        return True

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

    def set_flag(self, flag: OnnxParserFlag) -> None:
        """Sets a flag."""
        self.flags |= 1 << flag

    def clear_flag(self, flag: OnnxParserFlag) -> None:
        """Clears a flag."""
        self.flags &= ~(1 << flag)

    def get_flag(self, flag: OnnxParserFlag) -> bool:
        """True if a flag is set."""
        return bool(self.flags & 1 << flag)
