"""Values of a network computed by engines on the GPU that a build is for: calibration and accuracy of large networks take the CPU long.

The engines are those of EngineRun, with fixed kernels in FP32, which nothing has verified. So the first values of a network without rounding are
compared with the CPU's. If they differ, or if the GPU cannot compute a network, the CPU computes everything from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from whet.backends import get_capabilities
from whet.builder.candidates.enumerate import count_macs
from whet.builder.config import BuildConfig
from whet.builder.verify.differences import compute_relative_error
from whet.builder.verify.engine_values import EngineRun, SharedParts
from whet.errors import WhetError
from whet.forks import make_lock
from whet.network import Network
from whet.ops import bind_layer, bind_symbols
from whet.precision.calibrate import Run

LEAST = 5e9  # multiply-adds of a sample from which the GPU computes the values: one CPU needs about 0.2 s
_ALLOWED = 1e-3  # largest error of a tensor in FP32: 32 layers of 1e-5 each, and the same on the CPU
_LEAST_SIZE = 1e-2  # errors of smaller tensors are relative to this, such as means of normalized values


def select_runs(net: Network, config: BuildConfig, feeds: Mapping[str, np.ndarray] | None, note: Callable[[str], None]) -> RunsOfNetworks:
    """(network, names of tensors) -> run(sample), for `net` and networks derived from it, on the GPU of the build if the network is large.

    `feeds` is one of the samples.
    """
    capabilities = get_capabilities(config.backend)
    if feeds is None or config.backend == "cpu" or not (capabilities.executes and capabilities.reference_products):
        return RunsOfNetworks(None, note)
    env = bind_symbols([(t.name, t.type) for t in net.inputs], {t.name: np.shape(feeds[t.name]) for t in net.inputs})
    large = sum(count_macs(bind_layer(x, env)) for x in net.layers) >= LEAST
    return RunsOfNetworks(SharedParts(config.backend) if large else None, note)


class RunsOfNetworks:
    """Makes runs of networks by the engines of `device`, and by the CPU's where these cannot be used (None: always). All share their parts."""

    def __init__(self, device: SharedParts | None, note: Callable[[str], None]):
        self.device, self.host, self.note = device, SharedParts(), note
        self.refused = "" if device is not None else "the CPU is fast enough"
        self.checked = False
        self.guard = make_lock()

    def __call__(self, net: Network, names: Iterable[str]) -> Run:
        names = list(names)
        on_host = EngineRun(net, names, self.host)
        return on_host if self.device is None or self.refused else DeviceRun(self, EngineRun(net, names, self.device), on_host)

    def refuse(self, reason: str) -> None:
        """The CPU computes all further values."""
        with self.guard:
            if not self.refused:
                self.refused = reason
                self.note(f"calibration and accuracy are computed on the CPU, which is slower: {reason}")


class DeviceRun:
    """One network's run on the GPU."""

    def __init__(self, runs: RunsOfNetworks, on_device: EngineRun, on_host: EngineRun):
        self.runs, self.on_device, self.on_host = runs, on_device, on_host
        self._exact = not any(x.op == "QuantizeLinear" for x in on_device.net.layers)
        self._guard = make_lock()

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        runs = self.runs
        if not runs.refused:
            try:
                got = self.on_device(feeds)
                if self._exact and not runs.checked:
                    with self._guard:  # the other threads' samples wait for the result
                        if not runs.checked:
                            self._check(got, feeds)
            except WhetError as e:
                runs.refuse(f"the GPU cannot compute the network's values ({e})")
            if not runs.refused:
                return got
        return self.on_host(feeds)

    def _check(self, got: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray]) -> None:
        """Compares the values of one sample with the CPU's."""
        for name, want in self.on_host(feeds).items():
            is_float = want.dtype.kind == "f" or want.dtype.name == "bfloat16"
            with np.errstate(all="ignore"):
                error = compute_relative_error(got[name], want, _LEAST_SIZE)[0] if is_float else float(not np.array_equal(got[name], want))
            if not error <= _ALLOWED:
                self.runs.refuse(f"the GPU's values of '{name}' are off by {error:.2g}")
                return
        self.runs.checked = True
