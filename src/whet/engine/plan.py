"""The engine as data: the lowered network, and the selected tactic, config and formats of each layer. No code, no addresses.

The builder creates it, the engine file stores it, the runtime and the inspector read it. Byte sizes, packed weights and launches are derived
from the installed tactics at load time and compared with the stored values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from whet.engine.report import BuildReport
from whet.network import Network


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
        """The same with 1 for the first axis of every input."""
        return Profile({n: ((1, *low[1:]), (1, *opt[1:]), (1, *high[1:])) for n, (low, opt, high) in self.shapes.items()})


@dataclass
class ArenaPlan:
    """Where each tensor lies in the arena of one profile: byte offsets, sizes, total; scratch stands under "scratch".

    `lanes` 0: a run is one of the whole batch. Else the profile's samples are run apart (they do not touch: whet.ops.why_samples_touch):
    network and choices run one sample, this arena is that of one, and so many samples run at once, each on a thread and in an arena of its own;
    where it is 1 they take turns on all threads.
    """

    total: int
    offsets: dict[str, int]
    sizes: dict[str, int]
    scratch_offset: int = 0
    scratch_bytes: int = 0
    lanes: int = 0

    def data(self) -> dict[str, Any]:
        """As plain data; lanes only where there are any."""
        return {k: v for k, v in vars(self).items() if k != "lanes" or v}


@dataclass(repr=False)
class EnginePlan:
    """An engine. `network` is lowered, with Reformat layers in place; its constants carry origins over `source weights`.

    Profiles that were tuned apart have plans of their own in `others` (of the profiles after the first): each with its network, choices,
    probe and report, the same inputs, outputs and machine, and its one profile and arena, which stand in `profiles` and `arenas` here too.
    Without `others` all profiles run by this network and these choices.

    `choices` has an entry per layer name; `arenas` one per profile. `source_weights` may stay empty: leaves of the constants'
    origins that are in it are stored, and constants made of them by exact ops are stored as expressions; all others by value.
    `probe` is made by `whet.engine.make_probe` and run at first load elsewhere.
    `options` is JSON data: the BuildConfig's fields. `report` is outside the digest.
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
    source_weights: dict[str, Any] = field(default_factory=dict)  # name -> np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    report: BuildReport = field(default_factory=BuildReport)
    packed: dict[str, Any] = field(default_factory=dict)  # Packed.key -> bytes (uint8), where the file brought them
    others: list[EnginePlan] = field(default_factory=list)

    def part(self, profile: int) -> tuple[EnginePlan, int]:
        """The plan whose network and choices run a profile, and the profile's number in that plan."""
        return (self.others[profile - 1], 0) if self.others and profile else (self, profile)

    def of_one_sample(self, profile: int = 0) -> EnginePlan:
        """The plan that runs one sample at a time, of a profile whose samples are run apart: that profile alone, with a batch of 1."""
        part, number = self.part(profile)
        arena = replace(part.arenas[number], lanes=0)
        return replace(part, profiles=[part.profiles[number].of_one_sample()], arenas=[arena], others=[], probe={})

    def by_profile(self) -> list[EnginePlan]:
        """A plan of one profile each where profiles were tuned apart; else this one. They share the data with this one."""
        if not self.others:
            return [self]
        return [replace(self, profiles=self.profiles[:1], arenas=self.arenas[:1], others=[]), *self.others]

    def __repr__(self) -> str:
        return f"<EnginePlan of {self.network!r} on {self.backend}, {self.threads} threads, {len(self.profiles) or 1} profile(s)>"
