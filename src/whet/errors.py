"""The exceptions of whet, in one tree.

WhetError
├── NetworkError          a network is malformed (verify(), text parser, type inference)
│   └── UnsupportedError  a model has an unsupported op, attribute or type
├── FrontendError         a model file cannot be read
├── ShapeError            an input's shape or type does not fit the network or the profile
├── BuildError            no engine could be built
│   ├── NoTacticError     no tactic computes a layer
│   ├── MemoryLimitError  the arena or workspace would exceed --memPoolSize
│   ├── VerificationError outputs differ from the reference by more than the bound
│   └── LockError         a locked build would give another engine
├── EngineError           an engine file is truncated, damaged, malicious or of another version
├── BackendError          a device or library is missing or failed
├── ContextError          an execution context was misused (used twice at once, closed)
├── CacheError            the timing cache cannot be read or written
├── CalibrationError      calibration data or ranges are missing, constant or not finite
├── PruneError            a pruning step is impossible or would not be exact
├── TrainingError         fine-tuning cannot start or continue, or its checkpoint is of another training
└── UsageError            the command line or an option is wrong

Each message states what happened, why, and what to do next. It names options as the caller writes them: flags on the command line, parameters
and fields in Python (option_names.py).

WhetWarning
├── BuildWarning   a note of a build: a shape that was assumed, a permission that cannot be used, a busy machine
└── EngineWarning  a note about an opened engine (whet.runtime)
"""

from whet.option_names import reads_flags, translate_flags


class WhetError(Exception):
    """Base class of whet's exceptions."""

    def __init__(self, *args: object):
        super().__init__(*args)
        self._flags = reads_flags()

    def __str__(self) -> str:
        text = super().__str__()
        return text if self._flags else translate_flags(text)


class NetworkError(WhetError):
    """A network is malformed."""


class UnsupportedError(NetworkError):
    """A model has an unsupported op, attribute or type."""


class FrontendError(WhetError):
    """A model file cannot be read."""


class ShapeError(WhetError):
    """An input's shape or type does not fit the network or the profile."""


class BuildError(WhetError):
    """No engine could be built."""


class NoTacticError(BuildError):
    """No tactic computes a layer."""


class MemoryLimitError(BuildError):
    """The arena or the workspace would exceed the user's limit."""


class VerificationError(BuildError):
    """Outputs differ from the reference by more than the bound."""


class LockError(BuildError):
    """A locked build would give another engine."""


class EngineError(WhetError):
    """An engine file is truncated, damaged, malicious or of another version."""


class BackendError(WhetError):
    """A device or library is missing or failed."""


class ContextError(WhetError):
    """An execution context was misused."""


class CacheError(WhetError):
    """The timing cache cannot be read or written."""


class CalibrationError(WhetError):
    """Calibration data or ranges are missing, constant or not finite; the message names the tensor."""


class PruneError(WhetError):
    """A pruning step is impossible or would not be exact."""


class TrainingError(WhetError):
    """Fine-tuning cannot start or continue, or its checkpoint is of another training."""


class UsageError(WhetError):
    """The command line or an option is wrong."""


class WhetWarning(UserWarning):
    """Base of the warnings that whet gives."""


class BuildWarning(WhetWarning):
    """A note of a build."""
