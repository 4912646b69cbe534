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

Each message states what happened, why, and what to do next.
"""


class WhetError(Exception):
    """Base class of whet's exceptions."""


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
