"""The search's state: candidates of every kind of layer, their times, bans, and what each layer may use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from whet.backends import Backend
from whet.builder.batching.profiles import OPT, bound_layers, environment
from whet.builder.candidates.compile_ahead import start_compiling
from whet.builder.candidates.enumerate import Candidates, list_candidates, no_tactic
from whet.builder.candidates.filter import Losers, wide_is_close, worth_timing
from whet.builder.candidates.reformats import Reformats
from whet.builder.candidates.unfuse import unfuse
from whet.builder.candidates.views import is_view, view_refusal
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import Permissions
from whet.builder.progress import Noting
from whet.builder.select.formats import inplace_refusal
from whet.builder.select.unfused_time import Apart, taken_apart
from whet.engine.layer_times import LONGEST_LAYER
from whet.engine.plan import Profile
from whet.engine.report import Candidate, GpuState, TimingRecord
from whet.measure.engine_history import EngineHistory
from whet.measure.machine_state import read_machine_state
from whet.measure.option import Ident, Option
from whet.measure.policy import REFORMAT_ROUNDS
from whet.measure.timing import Conditions, Timer, select_fastest
from whet.measure.timing_cache import TimingCache
from whet.measure.timing_key import layer_text
from whet.network import Layer, Network, evaluate
from whet.ops import bind_layer
from whet.tactics import Tactic

#: options timed per kind of layer at each builderOptimizationLevel; None: all
_TIMED: dict[int, int | None] = {0: 0, 1: 4, 2: 8, 3: 32, 4: 128, 5: None}
_SPARING = 3  # the level up to which implementations that always lost are left out
HOPELESS = 1.25  # times another sum of layers' times (or another engine): layers one by one and the whole do not differ by so much
_ENOUGH = 4  # configurations of a tactic that may fail for a layer before the rest is not tried: each failure builds and verifies again


class Search:
    """What is known while a network's kernels are chosen. A context manager: it holds the timing cache open.

    Layers of equal text (key.layer_text) share their candidates and times. Times hold for the first profile's opt shapes.
    """

    def __init__(
        self,
        net: Network,
        profiles: Sequence[Profile],
        backend: Backend,
        tactics: list[Tactic],
        permissions: Permissions,
        config: BuildConfig,
        tell: Noting,
        rival_ms: float | None = None,
    ):
        self.rival_ms = rival_ms  # of an engine that the one to be chosen competes with
        self.net, self.backend, self.tactics, self.permissions, self.config, self.tell = net, backend, tactics, permissions, config, tell
        self.env = environment(net, profiles[0], OPT)
        self._fixed = len(profiles) == 1 and all(low == high for low, _, high in profiles[0].shapes.values())
        self.layers: dict[str, Layer] = {}
        self.kinds: dict[str, Candidates] = {}  # by layer text and what is demanded of the layer
        self.kind_of: dict[str, str] = {}  # layer name -> kind
        self.unfused: list[tuple[str, str]] = []
        self.banned: list[tuple[str, str, str]] = []  # (layer, option, reason)
        self._bans: dict[tuple[str, Ident], str] = {}
        self.apart: dict[str, Apart] = {}  # by kind of fused layer
        self._losers = Losers()
        self._no_views: set[str] = set()  # layers whose parts must be copied
        level = min(max(config.optimization_level, 0), 5)
        self.cap = config.max_tactics if config.max_tactics >= 0 else _TIMED[level]
        self.cache = TimingCache("" if self.cap == 0 else config.timing_cache, tell.note)
        self.timer: Timer | None = None
        if self.cap != 0:
            conditions = Conditions.of(backend, self._footprint())
            self.timer = Timer(backend, self.cache, conditions, config.avg_timing, config.error_on_cache_miss)
        self.history = EngineHistory(self.cache, () if self.timer is None else self.timer.environment, self.kind_of)
        reformat_timer = None
        if self.timer is not None:
            reformat_timer = Timer(backend, self.cache, self.timer.conditions, min(REFORMAT_ROUNDS, config.avg_timing), config.error_on_cache_miss)
        self.reformats = Reformats(tactics, backend, self.env, reformat_timer)

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    def _footprint(self) -> int:
        """Bytes that one run touches: constants and what the layers make."""
        layers = bound_layers(self.net, self.env)
        tensors = [*self.net.constants.values(), *(t for layer in layers.values() for t in layer.outputs)]
        return sum(evaluate(t.type.nbytes, {}) for t in tensors if t.type.static)

    # candidates

    def list_all(self) -> None:
        """Lists the candidates of every layer, taking fused layers apart that only the reference would compute, or whose kernels are all banned.

        Raises NoTacticError.
        """
        self.tell.stage("candidates", len(self.net.layers))
        self._part_banned()
        waiting = list(self.net.layers)
        nothing: list[tuple[Layer, list[Candidate]]] = []
        while waiting:
            layer = waiting.pop(0)
            self.tell.step(layer.name)
            if layer.name in self.kind_of:
                continue
            found = self.list_layer(layer)
            if layer.op == "Fused" and not any(not o.tactic.fallback for o in found.options) and any(self._with_kernels(layer)):
                self.unfused.append((layer.name, "no kernel computes it whole; its parts have kernels"))
                waiting = unfuse(self.net, layer) + waiting
                del self.kind_of[layer.name], self.layers[layer.name]
                continue
            if not found.options:
                nothing.append((layer, found.refused))
        if nothing:
            raise no_tactic(*nothing[0], self.backend, [layer for layer, _ in nothing[1:]])

    def list_layer(self, layer: Layer) -> Candidates:
        """The candidates of a layer of this network, or of one that was made from it."""
        bound = bound_layers(_only(self.net, layer), self.env)[layer.name]
        self.layers[layer.name] = bound
        self.kind_of[layer.name] = kind = self.listed_kind(bound)
        return self.kinds[kind]

    def listed_kind(self, bound: Layer) -> str:
        """The kind of a layer with static shapes; its candidates are listed."""
        kind = f"{layer_text(bound)}\n{self.permissions.key(bound)}"
        if kind not in self.kinds:
            limit = self.config.memory_limit.get("workspace")
            self.kinds[kind] = list_candidates(
                bound, self.tactics, self.backend, self.permissions, deterministic=self.config.deterministic, workspace=limit
            )
            self._start_compiling(self.kinds[kind])
        return kind

    def _start_compiling(self, found: Candidates) -> None:
        """Compiles in the background what will be timed; of options whose times the cache knows, the few that may be used."""
        if not self.backend.capabilities.compiles_ahead:
            return
        options = self.timed_options(found) if found.options and self.timer is not None else found.options[:1]
        if len(options) > 1:
            assert self.timer is not None
            self.timer.is_cached(options, found.text)
        start_compiling(options, self.backend)
        for o in found.options:
            o.texts = ()

    def _part_banned(self) -> None:
        """Takes fused layers apart whose kernels are all banned: a quantized one becomes one of permitted floats between roundings."""
        for layer in [x for x in self.net.layers if x.op == "Fused" and x.name in self.kind_of]:
            kind = self.kind_of[layer.name]
            kernels = [o for o in self.kinds[kind].options if not o.tactic.fallback]
            reasons = [self._bans.get((kind, o.ident)) for o in kernels]
            if kernels and all(reasons) and all(self._with_kernels(layer, {o.tactic.name for o in kernels})):
                why = f"every kernel that computes it whole is banned, its parts have others; the last of them {reasons[-1]}"
                self.tell.note(f"'{layer.name}' is taken apart: {why}")
                self.unfused.append((layer.name, why))
                unfuse(self.net, layer)
                del self.kind_of[layer.name], self.layers[layer.name]

    def _with_kernels(self, layer: Layer, wrong: Collection[str] = ()) -> Iterator[bool]:
        """For each layer of a fused body whether it has a kernel of its own or its own parts have, by tactics other than those named `wrong`."""
        tactics = [t for t in self.tactics if not t.fallback and t.name not in wrong]
        for part in taken_apart(layer).layers:
            whole = list_candidates(bind_layer(part, self.env), tactics, self.backend, self.permissions).options
            yield bool(whole) or (part.op == "Fused" and any(self._with_kernels(part, wrong)))

    # times

    def time_all(self) -> None:
        """Times what there is to choose between. What the caps leave out gets a note."""
        if self.timer is None:
            return
        todo = [k for k in dict.fromkeys(self.kind_of.values()) if len(self.kinds[k].options) > 1]
        self.tell.stage("timing", len(todo))
        for kind in todo:
            found = self.kinds[kind]
            self.tell.step(f"{found.layer.name}: {len(found.options)} tactics")
            self.time_kind(found)
        if self.timer.loads.disturbed:
            worst = max(self.timer.loads.disturbed, key=lambda load: load.others or 0.0)
            self.tell.note(
                f"{worst.who} took up to {worst.others:.1f} CPUs while kernels were timed; what was timed then was repeated, but on a busy "
                "machine choices may be off. Build again when it is quiet."
            )

    def time_kind(self, found: Candidates) -> None:
        """Times the options of one kind of layer that are worth it."""
        assert self.timer is not None
        chosen = self.timed_options(found)
        self.timer.time(found.layer, found.text, chosen, keep=True)
        if wide_is_close(chosen):
            chosen = self.timed_options(found, alike=True)
            self.timer.time(found.layer, found.text, chosen, keep=True)
        with self.tell.within("timing with cold weights"):
            self.timer.time_cold(found.layer, found.text, chosen)
        self._losers.saw(chosen)

    def retime_contradictions(self, net: Network, chosen: Mapping[str, Option], engine_ms: float) -> list[str]:
        """Times layers again whose recorded time exceeds that of the whole engine they are in; returns the names of their kinds' first layers.

        Such a time was recorded under external load, and would be read by every later build.
        """
        if self.timer is None or self.timer.error_on_miss:
            return []
        kinds = {self.kind_of[x.name] for x in net.layers if (chosen[x.name].ms or 0.0) > LONGEST_LAYER * engine_ms}
        for found in (self.kinds[kind] for kind in sorted(kinds)):
            self.tell.note(f"'{found.layer.name}' was recorded with more milliseconds than the whole engine takes, and is timed again")
            self.timer.time(found.layer, found.text, [o for o in found.options if o.ms is not None], anew=True)
        return [self.kinds[kind].layer.name for kind in sorted(kinds)]

    def timed_options(self, found: Candidates, *, alike: bool = False) -> list[Option]:
        """Which options are worth timing; `alike` as in `worth_timing`."""
        ahead, level = self.backend.capabilities.compiles_ahead, self.config.optimization_level
        options = found.options if ahead or level > _SPARING else self._losers.without(found.options)
        return worth_timing(options, level, self.cap, ahead and not alike)

    def timing_report(self) -> TimingRecord:
        """Hits and misses of the cache, in which cache state was timed, and others' load."""
        if self.timer is None:
            return TimingRecord(self.config.optimization_level, timed=0, why="level 0 times nothing: the first kernel that runs is taken")
        gpu = read_machine_state(self.backend, self.tell.note).get("gpu")
        return TimingRecord(
            level=self.config.optimization_level,
            hits=self.cache.hits,
            misses=self.cache.misses,
            conditions=self.timer.conditions.state,
            disturbed_cpus=[round(load.others or 0.0, 2) for load in self.timer.loads.disturbed],
            gpu=None if gpu is None else GpuState(**gpu),
            **self.timer.cold_report(),
        )

    def outrun(self, ms: float) -> bool:
        """Whether the engine that this one competes with is so much faster than a sum of layers' times that no other choice makes up for it.

        Never where launches overlap: there a sum says too little.
        """
        return self.rival_ms is not None and not self.backend.capabilities.overlapping_launches and ms > HOPELESS * self.rival_ms

    def least_ms(self) -> float:
        """What all layers take by their fastest kernels, without reformats between them."""
        listed = [self.kinds[self.kind_of[x.name]].options for x in self.net.layers]
        return sum(min(o.cost for o in [o for o in options if o.ms is not None] or options) for options in listed)

    # what layers may use

    def usable(self, layer: Layer, net: Network) -> list[Option]:
        """The best option of each signature that this layer of `net` may use, in listing order. Raises NoTacticError."""
        kind = self.kind_of[layer.name]
        options = [o for o in self.kinds[kind].options if self.why_not(layer, o, net) is None]
        timed = [o for o in options if o.ms is not None]
        options = timed or options
        if not options:
            refused = [*self.kinds[kind].refused, *(o.candidate(self.why_not(layer, o, net) or "") for o in self.kinds[kind].options)]
            raise no_tactic(layer, refused, self.backend)
        wanted = [o for o in options if self.permissions.meets(self.layers[layer.name], o.signature)]
        if not wanted:
            self.tell.note(f"'{layer.name}': no tactic computes it in the precision that --layerPrecisions or --layerOutputTypes prefers")
        groups: dict[object, list[Option]] = {}
        for o in wanted or options:
            groups.setdefault(o.signature, []).append(o)
        return sorted((select_fastest(g) for g in groups.values()), key=lambda o: o.rank)

    def why_not(self, layer: Layer, o: Option, net: Network) -> str | None:
        """Why this layer of `net` may not use an option of its kind, or None."""
        banned = self._bans.get((self.kind_of[layer.name], o.ident))
        if banned or not o.signature.inplace:
            return banned
        if not is_view(o):
            return inplace_refusal(net, layer, o)
        if layer.name in self._no_views:
            return "its parts lie inside of other tensors already"
        return view_refusal(net, layer, o, fixed=self._fixed)

    def copying(self, layer: str, view: Option) -> Option | None:
        """The best option of a layer that copies in the formats of a view, or None."""
        s = view.signature
        options = [o for o in self.kinds[self.kind_of[layer]].options if (o.signature.inputs, o.signature.outputs) == (s.inputs, s.outputs)]
        options = [o for o in options if not o.signature.inplace and (self.kind_of[layer], o.ident) not in self._bans]
        return select_fastest([o for o in options if o.ms is not None] or options) if options else None

    def refuse_views(self, layers: Sequence[str]) -> None:
        """These layers copy their parts from now on."""
        self._no_views.update(layers)

    def ban_tactic(self, layer: str, tactic: str, reason: str) -> bool:
        """Takes all options of a tactic from all layers of `layer`'s kind, where other kernels are left; whether they are."""
        kind = self.kind_of[layer]
        options = [o for o in self.kinds[kind].options if (kind, o.ident) not in self._bans]
        if not any(o.tactic.name != tactic and not o.tactic.fallback for o in options):
            return False
        self._bans.update({(kind, o.ident): reason for o in options if o.tactic.name == tactic})
        self.banned.append((layer, tactic, reason))
        return True

    def ban(self, layer: str, ident: Ident, reason: str) -> None:
        """Takes an option from all layers of `layer`'s kind: it computes wrongly. So do its tactic's others, once enough of them did."""
        kind = self.kind_of[layer]
        self._bans[kind, ident] = reason
        self.banned.append((layer, f"{ident[0]} {ident[1]} {dict(ident[2])}", reason))
        alike = [o.ident for o in self.kinds[kind].options if o.ident[:2] == ident[:2]]
        failed = sum((kind, i) in self._bans for i in alike)
        if failed >= _ENOUGH:
            for other in alike:
                self._bans.setdefault((kind, other), f"{failed} other configurations of this tactic failed here, the last: {reason}")

    def refused(self, layer: Layer) -> list[Candidate]:
        return self.kinds[self.kind_of[layer.name]].refused


def _only(net: Network, layer: Layer) -> Network:
    """A view of `net` with one layer, for bound_layers."""
    view = Network(net.name, net.stage)
    view.layers = [layer]
    return view
