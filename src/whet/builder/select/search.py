"""The state of a search for the fastest engine: the kinds of layers with their candidates, times and bans, and the options a layer may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whet.backends import Backend
from whet.builder.batching.profiles import OPT, bind_profile_symbols, bound_layers
from whet.builder.candidates.enumerate import Candidates, make_no_tactic_error
from whet.builder.candidates.layer_kinds import LayerKinds
from whet.builder.candidates.other_shapes import OtherShapes
from whet.builder.candidates.reformats import Reformats
from whet.builder.candidates.views import view_refusal
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import Permissions
from whet.builder.progress import ProgressLog
from whet.builder.select.bans import Bans
from whet.builder.select.formats import TensorReaders, explain_inplace_refusal
from whet.builder.select.layer_timing import LayerTiming
from whet.builder.select.unfused_time import UnfusedTime
from whet.engine.plan import Profile
from whet.engine.report import Candidate
from whet.measure.engine_history import EngineHistory
from whet.measure.option import Ident, Option
from whet.measure.timing import select_fastest
from whet.network import Layer, Network, evaluate
from whet.tactics import Tactic

#: The largest ratio between a sum of layers' times and the time of the whole engine.
SUM_MARGIN = 1.25


class Search:
    """A context manager: it holds the timing cache open. `listing` has the candidates, `timing` the timers, `bans` the banned options.

    Layers of equal text (timing_key.format_layer) share their candidates and times. Times hold for the first profile's opt shapes.
    `incumbent_ms` is the time of an engine that the selected one competes with; `listed` are candidates of earlier builds, by kind of layer.
    """

    def __init__(
        self,
        net: Network,
        profiles: Sequence[Profile],
        backend: Backend,
        tactics: list[Tactic],
        permissions: Permissions,
        config: BuildConfig,
        log: ProgressLog,
        incumbent_ms: float | None = None,
        listed: dict[str, Candidates] | None = None,
    ):
        self.incumbent_ms = incumbent_ms
        self.net, self.backend, self.tactics, self.permissions, self.config, self.log = net, backend, tactics, permissions, config, log
        self.env = bind_profile_symbols(net, profiles[0], OPT)
        self._fixed = len(profiles) == 1 and all(low == high for low, _, high in profiles[0].shapes.values())
        self.other_shapes = OtherShapes(net, profiles, self.env, tactics, backend)
        self.bans = Bans()
        self.timing = LayerTiming(backend, config, self._count_bytes(), log)
        self.listing = LayerKinds(net, self.env, tactics, backend, permissions, config, log, self.timing.start_compiling, listed)
        self.layers, self.kinds, self.kind_of = self.listing.layers, self.listing.kinds, self.listing.kind_of
        self.cache, self.timer = self.timing.cache, self.timing.timer
        self.unfused_times: dict[str, UnfusedTime] = {}  # by kind of fused layer
        self.history = EngineHistory(self.cache, () if self.timer is None else self.timer.environment, self.kind_of)
        self.reformats = Reformats(tactics, backend, self.env, self.timing.make_reformat_timer(), self.other_shapes)
        self._readers = TensorReaders(net)
        self._no_views: set[str] = set()  # layers that must copy their parts

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    def _count_bytes(self) -> int:
        """Bytes that one run touches: constants and layers' outputs."""
        layers = bound_layers(self.net, self.env)
        tensors = [*self.net.constants.values(), *(t for layer in layers.values() for t in layer.outputs)]
        return sum(evaluate(t.type.nbytes, {}) for t in tensors if t.type.static)

    def time_all(self) -> None:
        """Times the kinds of layers that have several options."""
        self.timing.time_all(self.listing.list_network_candidates())

    def retime_contradictions(self, net: Network, chosen: Mapping[str, Option], engine_ms: float) -> list[str]:
        """Times layers of `net` again if their recorded time exceeds that of the whole engine; returns their names."""
        names = self.timing.retime_contradictions([(self.kinds[self.kind_of[x.name]], chosen[x.name]) for x in net.layers], engine_ms)
        for kind in [k for k in self.unfused_times if self.kinds[k].layer.name in names]:
            del self.unfused_times[kind]
        return names

    def cannot_win(self, ms: float) -> bool:
        """True if the sum of layers' times exceeds the incumbent's time by more than SUM_MARGIN. Always False if launches overlap, since then the
        sum predicts little.
        """
        return self.incumbent_ms is not None and not self.backend.capabilities.overlapping_launches and ms > SUM_MARGIN * self.incumbent_ms

    def compute_least_ms(self) -> float:
        """The sum of all layers' times with their fastest kernels, without reformats between them."""
        listed = [self.kinds[self.kind_of[x.name]].options for x in self.net.layers]
        return sum(min(o.cost for o in [o for o in options if o.ms is not None] or options) for options in listed)

    def list_usable(self, layer: Layer, net: Network) -> list[Option]:
        """The best option of each signature that this layer of `net` may use, in listing order. Raises NoTacticError."""
        kind = self.kind_of[layer.name]
        options = [o for o in self.kinds[kind].options if self.why_not_option(layer, o, net) is None]
        timed = [o for o in options if o.ms is not None]
        options = timed or options
        if not options:
            refused = [*self.kinds[kind].refused, *(o.candidate(self.why_not_option(layer, o, net) or "") for o in self.kinds[kind].options)]
            raise make_no_tactic_error(layer, refused, self.backend)
        preferred = [o for o in options if self.permissions.meets(self.layers[layer.name], o.signature)]
        if not preferred and not self.permissions.obey:
            self.log.note(f"'{layer.name}': no tactic computes it in the precision that --layerPrecisions or --layerOutputTypes prefers")
        groups: dict[object, list[Option]] = {}
        for o in preferred or options:
            groups.setdefault(o.signature, []).append(o)
        return sorted((select_fastest(g) for g in groups.values()), key=lambda o: o.rank)

    def why_not_option(self, layer: Layer, o: Option, net: Network) -> str | None:
        """The reason why this layer of `net` may not use an option of its kind, or None."""
        refused = self._why_not_kernel(layer, o)
        if refused or not o.signature.inplace:
            return refused
        if not self._readers.describes(net):
            self._readers = TensorReaders(net)
        if not o.is_view:
            return explain_inplace_refusal(self._readers, layer, o)
        if layer.name in self._no_views:
            return "its parts are views of other tensors already"
        return view_refusal(self._readers, layer, o, fixed=self._fixed)

    def _why_not_kernel(self, layer: Layer, o: Option) -> str | None:
        """The reason why a layer may not use an option in any network, or None."""
        banned = self.bans.reason(self.kind_of[layer.name], o) or self.bans.storage_reason(layer, o.signature)
        return banned or self.other_shapes.refusal(layer, o)

    def has_kernels(self, layer: Layer) -> bool:
        """True if the bans leave a layer an option."""
        return any(self._why_not_kernel(layer, o) is None for o in self.kinds[self.kind_of[layer.name]].options)

    def select_copy(self, layer: Layer, view: Option) -> Option | None:
        """The best option of a layer that copies in the same formats as a view, or None."""
        kind, s = self.kind_of[layer.name], view.signature
        options = [o for o in self.kinds[kind].options if (o.signature.inputs, o.signature.outputs) == (s.inputs, s.outputs)]
        options = [o for o in options if not (o.signature.inplace or self._why_not_kernel(layer, o))]
        return select_fastest([o for o in options if o.ms is not None] or options) if options else None

    def refuse_views(self, layers: Sequence[str]) -> None:
        """Excludes the view options of these layers: they copy their parts."""
        self._no_views.update(layers)

    def ban(self, layer: str, ident: Ident, reason: str) -> None:
        """Bans an option that computes wrongly from all layers of `layer`'s kind."""
        kind = self.kind_of[layer]
        self.bans.ban(kind, layer, ident, self.kinds[kind].options, reason)

    def ban_tactic(self, layer: str, tactic: str, reason: str) -> bool:
        """Bans a tactic from all layers of `layer`'s kind if other kernels remain; returns True if it did."""
        kind = self.kind_of[layer]
        return self.bans.ban_tactic(kind, layer, tactic, self.kinds[kind].options, reason)

    def refused(self, layer: Layer) -> list[Candidate]:
        """The candidates of a layer that were refused when they were listed, with reasons."""
        return self.kinds[self.kind_of[layer.name]].refused
