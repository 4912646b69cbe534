"""Options of whet.compile and torch.compile(backend="whet"), under the names that users of torch_tensorrt know, and their BuildConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from whet.builder import BuildConfig
from whet.errors import UsageError
from whet.registry import suggest_name

_PRECISION_OF = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of a compilation. Raises UsageError for values that contradict each other.

    `fp16`, `bf16`, `int8` permit these storage types; the faster ones are kept. `enabled_precisions` is the same as a set of torch types.
    `calibration` are samples for `int8`: an iterable of the module's arguments, each a tensor or a tuple of tensors; or a cache file in
    `calibration_cache`. `device` is a torch.device or its name (default: that of the tensors). `torch_executed_ops` are names of
    functions, such as "softmax", that stay in torch; graphs with fewer than `min_block_size` operations stay in torch too. With
    `pass_through_build_failures` torch.compile raises the errors that would otherwise make a graph run in torch; with
    `require_full_compilation` it also refuses to split a graph. `config` has every other option of a build.
    """

    fp16: bool = False
    bf16: bool = False
    int8: bool = False
    enabled_precisions: Iterable[Any] = ()
    calibration: Iterable[Any] | None = None
    calibration_cache: str | None = None
    device: Any = None
    optimization_level: int | None = None  # 0 to 5; None: that of `config`, 3
    timing_cache: str | None = None  # file; None: the user's cache folder; "": none
    timing_cache_path: str | None = None  # the same under torch_tensorrt's name
    workspace_size: int = 0  # bytes; 0: no limit
    sparse_weights: bool = False
    threads: int | None = None  # of the CPU; None: that of `config`
    min_block_size: int = 5
    torch_executed_ops: Iterable[str] = ()
    require_full_compilation: bool = False
    pass_through_build_failures: bool = False
    config: BuildConfig = field(default_factory=BuildConfig)

    def __post_init__(self) -> None:
        for name in ("enabled_precisions", "torch_executed_ops"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | torch.dtype) else tuple(value))
        for p in self.enabled_precisions:
            if p not in _PRECISION_OF and p not in _PRECISION_OF.values() and p not in (torch.float32, "fp32"):
                raise UsageError(f"enabled_precisions: {p} is none of {', '.join(map(str, _PRECISION_OF))}, torch.float32")
        if self.calibration is not None:
            object.__setattr__(self, "calibration", tuple(self.calibration))
        if "int8" in self.precisions and self.calibration is None and self.calibration_cache is None:
            raise UsageError("int8 needs ranges: give calibration=[(x1,), (x2,), ...] with typical arguments, or calibration_cache=FILE")
        if self.timing_cache is not None and self.timing_cache_path is not None:
            raise UsageError("timing_cache and timing_cache_path are one option: give one of them")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> CompileOptions:
        """The options of a dict, as torch.compile(options=...) passes it. Raises UsageError for an unknown name."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise UsageError(f"the backend whet has no option {name!r}.{suggest_name(name, names)} It has {', '.join(names)}.")
        return cls(**options)

    @property
    def precisions(self) -> tuple[str, ...]:
        """The permitted storage types besides f32, as BuildConfig names them."""
        named = [_PRECISION_OF.get(p, p) for p in self.enabled_precisions]
        flags = [p for p in ("fp16", "bf16", "int8") if getattr(self, p)]
        return tuple(dict.fromkeys(p for p in (*self.config.precisions, *flags, *named) if p != "fp32"))

    def build_config(self, backend: str, profiles: tuple[Any, ...]) -> BuildConfig:
        """The options of the build on `backend` with `profiles`."""
        given: dict[str, Any] = {
            "optimization_level": self.optimization_level,
            "timing_cache": self.timing_cache if self.timing_cache is not None else self.timing_cache_path,
            "threads": self.threads,
            "memory_limit": {**self.config.memory_limit, "workspace": self.workspace_size} if self.workspace_size else None,
            "sparsity": "enable" if self.sparse_weights else None,
        }
        changed = {k: v for k, v in given.items() if v is not None}
        return dataclasses.replace(self.config, backend=backend, profiles=profiles, precisions=self.precisions, **changed)


@dataclass(frozen=True)
class Input:
    """An argument by its shapes instead of an example: Input((1, 3, 224, 224), (8, 3, 224, 224), (32, 3, 224, 224), torch.float32).

    Axes on which the three shapes differ are dynamic; the engine is tuned for `opt_shape`. One shape alone is static. Raises UsageError
    for shapes of different rank or order.
    """

    min_shape: tuple[int, ...]
    opt_shape: tuple[int, ...] | None = None
    max_shape: tuple[int, ...] | None = None
    dtype: Any = torch.float32

    def __post_init__(self) -> None:
        low = tuple(self.min_shape)
        opt = tuple(self.opt_shape if self.opt_shape is not None else low)
        high = tuple(self.max_shape if self.max_shape is not None else opt)
        if not len(low) == len(opt) == len(high) or not all(a <= b <= c for a, b, c in zip(low, opt, high, strict=True)):
            raise UsageError(f"Input: the shapes {low}, {opt}, {high} are not min, opt and max of one rank, in ascending order")
        for name, shape in (("min_shape", low), ("opt_shape", opt), ("max_shape", high)):
            object.__setattr__(self, name, shape)

    def ranges(self) -> dict[int, tuple[int, int, int]]:
        """Axis -> (min, opt, max) of the dynamic axes."""
        shapes = zip(self.min_shape, self.opt_shape or (), self.max_shape or (), strict=True)
        return {i: found for i, found in enumerate(shapes) if found[0] != found[2]}

    def example(self, device: Any) -> Any:
        """A tensor of the opt shape: zeros of integers, normally distributed floats."""
        if self.dtype.is_floating_point:
            return torch.randn(self.opt_shape, device=device).to(self.dtype)
        return torch.zeros(self.opt_shape, dtype=self.dtype, device=device)
