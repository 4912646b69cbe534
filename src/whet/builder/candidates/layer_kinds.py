"""The kinds of layers of a network and their candidates, shared by layers of equal text and equal precision constraints."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from whet.backends import Backend
from whet.builder.batching.profiles import bound_layers
from whet.builder.candidates.enumerate import Candidates, list_candidates, make_no_tactic_error
from whet.builder.candidates.unfuse import list_parts, unfuse
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import Permissions, explain_missing_integer_kernels
from whet.builder.progress import ProgressLog
from whet.engine.report import Candidate
from whet.measure.option import Option
from whet.measure.timing_key import format_layer_text
from whet.network import I8, Dim, Layer, Network
from whet.ops import bind_layer
from whet.tactics import Tactic, get_root_layer

_NAMED = 5  # layers that a note names

class LayerKinds:
    """Candidates by kind of layer. `layers` have static shapes, `kind_of` and `layers` are by layer name, `unfused` lists (layer, reason).

    `on_listed` is called with the candidates of each new kind.
    """

    def __init__(
        self, net: Network, env: Mapping[str, Dim], tactics: list[Tactic], backend: Backend, permissions: Permissions, config: BuildConfig,
        log: ProgressLog, on_listed: Callable[[Candidates], None], listed: dict[str, Candidates] | None = None,
    ):  # fmt: skip
        """`listed` are the candidates of kinds that other networks with the same machine, tactics and config have; new kinds are added to it."""
        self.net, self.env, self.tactics, self.backend, self.permissions = net, env, tactics, backend, permissions
        self.config, self.log, self._on_listed = config, log, on_listed
        self.layers: dict[str, Layer] = {}
        self.kinds: dict[str, Candidates] = {} if listed is None else listed
        self.kind_of: dict[str, str] = {}
        self.unfused: list[tuple[str, str]] = []
        self.exempt: dict[str, str] = {}  # layer name -> why a precision that a wildcard demands of it is not obeyed
        self._exempt_kinds: dict[str, str] = {}

    def list_all(self, ban_reason: Callable[[str, Option], str | None]) -> None:
        """Lists the candidates of every layer. Fused layers without kernels other than the reference and the banned ones are unfused.

        Raises NoTacticError.
        """
        self.log.stage("candidates", len(self.net.layers))
        self._unfuse_banned(ban_reason)
        waiting = deque(self.net.layers)
        nothing: list[tuple[Layer, list[Candidate]]] = []
        while waiting:
            layer = waiting.popleft()
            self.log.step(layer.name)
            if layer.name in self.kind_of:
                continue
            found = self.list_layer(layer)
            exempt = layer.op == "Fused" and layer.name in self.exempt and any(self._have_kernels(layer))
            only_fallbacks = layer.op == "Fused" and not any(not o.tactic.fallback for o in found.options)
            if exempt or (only_fallbacks and any(self._have_kernels(layer, relaxed=layer.name in self.exempt))):
                waiting.extendleft(reversed(self._unfuse(layer, "no kernel computes it whole; its parts have kernels")))
                continue
            if not found.options:
                nothing.append((layer, found.refused))
        if nothing:
            raise make_no_tactic_error(*nothing[0], self.backend, [layer for layer, _ in nothing[1:]])
        self._note_exempt()

    def _note_exempt(self) -> None:
        """Notes the layers of the model that wildcards of --layerPrecisions and --layerOutputTypes do not bind.

        Convolutions and products that this machine has no 8-bit kernels for have that as the reason; parts of a fused one are named as the whole.
        """
        reasons: dict[str, list[str]] = {}
        missing = explain_missing_integer_kernels(self.tactics)
        for layer in self.net.layers:
            if layer.name in self.exempt and layer.op not in ("QuantizeLinear", "DequantizeLinear"):
                whole = next((name for name, _ in self.unfused if layer.name.startswith(f"{name}.")), None)
                product = get_root_layer(layer).op in ("Conv", "Gemm", "MatMul")
                if missing and (product or whole is not None) and self.permissions.demanded(layer) == I8:
                    reason, name = f"this machine has no exact 8-bit kernels ({missing})", whole or layer.name
                else:
                    reason = self.exempt[layer.name]
                    name = f"{layer.name} ({layer.composite or layer.op})"
                if name not in (names := reasons.setdefault(reason, [])):
                    names.append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            left_out = f"{len(names)} layers that cannot obey: {reason}. They are" if len(names) > 1 else f"a layer that cannot obey: {reason}. It is"
            self.log.note(f"wildcards leave out {left_out} {', '.join(names[:_NAMED])}{more}")

    def list_layer(self, layer: Layer) -> Candidates:
        """The candidates of a layer of this network or of one derived from it."""
        bound = bound_layers(_make_layer_network(self.net, layer), self.env)[layer.name]
        self.layers[layer.name] = bound
        self.kind_of[layer.name] = kind = self.list_kind(bound)
        if kind in self._exempt_kinds:
            self.exempt[layer.name] = self._exempt_kinds[kind]
        return self.kinds[kind]

    def list_kind(self, bound: Layer) -> str:
        """The kind of a layer with static shapes, its candidates listed."""
        kind = f"{format_layer_text(bound)}\n{self.permissions.key(bound)}"
        if kind not in self.kinds:
            limit = self.config.memory_limit.get("workspace")

            def listed(permissions: Permissions) -> Candidates:
                c = self.config
                return list_candidates(
                    bound, self.tactics, self.backend, permissions, deterministic=c.deterministic, strict_numerics=c.strict_numerics, workspace=limit
                )

            self.kinds[kind] = found = listed(self.permissions)
            if not found.options and self.permissions.is_demanded_by_wildcard(bound):
                self.kinds[kind] = listed(self.permissions.without_wildcards())
                reasons = [c.reason for c in found.refused if c.reason.startswith(("--layerPrecisions", "--layerOutputTypes"))]
                if self.kinds[kind].options and reasons:
                    self._exempt_kinds[kind] = _remove_name(reasons[0], bound.name)  # other layers have this kind
            self._on_listed(self.kinds[kind])
        return kind

    def list_network_candidates(self) -> list[Candidates]:
        """The candidates of each kind of layer, once."""
        return [self.kinds[kind] for kind in dict.fromkeys(self.kind_of.values())]

    def _unfuse(self, layer: Layer, why: str) -> list[Layer]:
        """Replaces a fused layer by its parts."""
        self.unfused.append((layer.name, why))
        del self.kind_of[layer.name], self.layers[layer.name]
        self.exempt.pop(layer.name, None)
        return unfuse(self.net, layer)

    def _unfuse_banned(self, ban_reason: Callable[[str, Option], str | None]) -> None:
        """Unfuses layers that have only banned kernels; the parts of a quantized layer compute in a permitted floating-point type."""
        for layer in [x for x in self.net.layers if x.op == "Fused" and x.name in self.kind_of]:
            kind = self.kind_of[layer.name]
            kernels = [o for o in self.kinds[kind].options if not o.tactic.fallback]
            reasons = [ban_reason(kind, o) for o in kernels]
            if kernels and all(reasons) and all(self._have_kernels(layer, {o.tactic.name for o in kernels})):
                why = f"every kernel that computes it whole is banned, its parts have others; the last of them {reasons[-1]}"
                self.log.note(f"'{layer.name}' is unfused: {why}")
                self._unfuse(layer, why)

    def _have_kernels(self, layer: Layer, banned: Collection[str] = (), *, relaxed: bool = False) -> Iterator[bool]:
        """Yields for each part of a fused layer True if it or its own parts have a kernel by a tactic not in `banned`.

        `relaxed` ignores the precisions that wildcards demand.
        """
        permissions = self.permissions.without_wildcards() if relaxed else self.permissions
        tactics = [t for t in self.tactics if not t.fallback and t.name not in banned]
        for part in list_parts(layer).layers:
            strict = self.config.strict_numerics
            whole = list_candidates(bind_layer(part, self.env), tactics, self.backend, permissions, strict_numerics=strict).options
            yield bool(whole) or (part.op == "Fused" and any(self._have_kernels(part, banned, relaxed=relaxed)))


def _remove_name(reason: str, name: str) -> str:
    """The reason without the layer that it was given for."""
    return reason.replace(f" for '{name}'", "").replace(f" of '{name}'", "")


def _make_layer_network(net: Network, layer: Layer) -> Network:
    """A view of `net` with one layer."""
    view = Network(net.name, net.stage)
    view.layers = [layer]
    return view
