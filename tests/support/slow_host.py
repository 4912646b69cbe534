"""The clock of a simulated GPU whose host starts launches slowly: times as CUDA events around the launches would give them."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

EXECUTABLE_US = 0.3  # of the GPU for each executable and its event, also if it has no launches


class HostQueue:
    """A launch begins when the host has started it and the previous one has ended. Starting an executable and recording an event takes the host
    `us` to 1.5 times `us`. Executables are given by the microseconds of their launches."""

    def __init__(self, us: float, seed: int):
        self.us, self.random = us, Random(seed)

    def seconds(self, launches: Sequence[float], repeats: int) -> list[float]:
        """Seconds of single runs."""
        return [1e-6 * (self._host() + sum(launches)) for _ in range(repeats)]

    def seconds_in_row(self, executables: Sequence[Sequence[float]]) -> list[float]:
        """Seconds of one run of each in a row, after an untimed run of the first."""
        host, gpu, ends = 0.0, 0.0, []
        for launches in (executables[0], *executables):
            host += self._host() / 2
            gpu = max(gpu, host) + sum(launches) + EXECUTABLE_US
            host += self._host() / 2
            gpu = max(gpu, host)
            ends.append(gpu)
        return [1e-6 * (b - a) for a, b in pairwise(ends)]

    def _host(self) -> float:
        return self.us * (1 + self.random.random() / 2)
