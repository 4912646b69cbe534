"""The engine as data: the lowered network, and the selected tactic, config and formats of each layer. No code, no addresses.

The builder creates it, the engine file stores it, the runtime and the inspector read it. Byte sizes, packed weights and launches are derived
from the installed tactics at load time and compared with the stored values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from whet.engine.report import BuildReport
from whet.network import Network, Weight

if TYPE_CHECKING:
    from whet.engine.host_tail import HostTail


@dataclass(frozen=True)
class Choice:
    """How one layer runs: tactic name, config, operands as (format, dtype name) per input (None: absent or packed) and output,
    in-place pairs, the kernel's name in its library."""

    tactic: str
    config: tuple[tuple[str, int | str], ...]
    inputs: tuple[tuple[str, str] | None, ...]
    outputs: tuple[tuple[str, str], ...]
    inplace: tuple[tuple[int, int], ...] = ()
    implementation: str = ""
    rtol: float = 0.0
    deterministic: bool = True


@dataclass(frozen=True)
class Profile:
    """Optimization profile: min, opt and max shape per input."""

    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    def of_one_sample(self) -> Profile:
        """The profile with 1 as the first axis of every input."""
        return Profile({n: ((1, *low[1:]), (1, *opt[1:]), (1, *high[1:])) for n, (low, opt, high) in self.shapes.items()})


@dataclass
class ArenaPlan:
    """Arena layout of one profile: byte offset and size of each tensor, total bytes; the scratch has the name "scratch".

    `concurrent_samples` 0: a run processes the whole batch. Otherwise the profile is sample-parallel (its samples are independent:
    whet.ops.why_samples_touch): network, choices and arena are for one sample, and so many samples run at once, each on its own thread with its own
    arena; with 1 they run one after the other on all threads. Its key in files is "lanes".
    """

    total: int
    offsets: dict[str, int]
    sizes: dict[str, int]
    scratch_offset: int = 0
    scratch_bytes: int = 0
    concurrent_samples: int = 0

    def data(self) -> dict[str, Any]:
        """As JSON data; without "lanes" if it is 0."""
        return {"lanes" if k == "concurrent_samples" else k: v for k, v in vars(self).items() if k != "concurrent_samples" or v}


@dataclass(repr=False)
class EnginePlan:
    """An engine. `network` is lowered, with Reformat layers in place; its constants carry origins over `source weights`.

    Separately tuned profiles after the first have their own plans in `others`: each with its network, choices, probe and report, the same
    inputs, outputs and machine, and its one profile and arena, which are also in `profiles` and `arenas` here. Without `others` all profiles
    use this network and these choices.

    `choices` has an entry per layer name; `arenas` one per profile. `source_weights` may be empty: leaves of the constants'
    origins that it contains are stored, constants computed from them by exact ops are stored as expressions, all others by value.
    `quantized_weights` are weights of the source network that inexact ops computed: expressions over them are stored as such too.
    `probe` is created by `whet.engine.make_probe` and run at first load on another machine.
    `options` is JSON data: the BuildConfig's fields. `report` is outside the digest.
    `tail` holds the layers that run on the host after the kernels, because their sizes depend on the data.
    `plugins` are the packages outside whet whose ops and tactics it uses: name -> version.
    """

    network: Network
    choices: dict[str, Choice]
    profiles: list[Profile]
    arenas: list[ArenaPlan]
    backend: str
    machine: dict[str, Any]  # the backend's describe(): the hardware and libraries it was tuned on
    machine_key: str
    threads: int
    model_digest: str = ""
    source_weights: Mapping[str, Any] = field(default_factory=dict)  # name -> np.ndarray
    quantized_weights: Sequence[Weight] = ()
    options: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    report: BuildReport = field(default_factory=BuildReport)
    packed: Mapping[str, Any] = field(default_factory=dict)  # Packed.key -> bytes (uint8), from the engine file
    others: list[EnginePlan] = field(default_factory=list)
    plugins: dict[str, str] = field(default_factory=dict)
    tail: HostTail | None = None
    data: memoryview | None = field(default=None, compare=False)  # the engine file that the weights are views of

    def part(self, profile: int) -> tuple[EnginePlan, int]:
        """The plan whose network and choices run a profile, and the profile's number in that plan."""
        return (self.others[profile - 1], 0) if self.others and profile else (self, profile)

    def of_one_sample(self, profile: int = 0) -> EnginePlan:
        """The plan of one sample of a sample-parallel profile: only that profile, with a batch of 1."""
        part, number = self.part(profile)
        arena = replace(part.arenas[number], concurrent_samples=0)
        return replace(part, profiles=[part.profiles[number].of_one_sample()], arenas=[arena], others=[], probe={})

    def by_profile(self) -> list[EnginePlan]:
        """One plan per profile if profiles were tuned separately, otherwise [this plan]. They share its data."""
        if not self.others:
            return [self]
        return [replace(self, profiles=self.profiles[:1], arenas=self.arenas[:1], others=[]), *self.others]

    def __repr__(self) -> str:
        return f"<EnginePlan of {self.network!r} on {self.backend}, {self.threads} threads, {len(self.profiles) or 1} profile(s)>"
