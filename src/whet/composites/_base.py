"""The registry of composites: kinds of fused layers, each described in one file of this folder.

A fused layer is a layer `Fused` with a body and a composite kind (its attribute `composite`). There are two forms. A root operation with its
epilogue has the operation's name as its kind ("Conv", "Gemm"). All other kinds have names of their own ("ConvPool").

`register_composite(...)` registers a description; `@DESCRIPTION.matcher(...)` registers a pass that creates such layers. Lowering, `whet passes`, the
inspector, cost accounting, decomposition and the contract tests read the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from whet.errors import BuildError
from whet.network import Layer, Network
from whet.ops import Sample
from whet.ops.fused import register_fused_kind
from whet.rewrite.rules import Phase, Rule, rule

Operations = Callable[[Layer, Mapping[str, int]], int]


def get_body(layer: Layer) -> Network:
    """The body of a fused layer."""
    return layer.regions["body"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Composite:
    """One description of a fused layer.

    `kinds`: values of the layers' attribute `composite`, one for most. `title`: its name for people.
    `unsupported`: the reason for unfused layers if no tactic of the machine computes the kind; "" for kinds that every backend computes.
    `samples`: layers for the contract tests.
    `operations(layer, symbol values)`: arithmetic operations; default: the sum over the body.
    `counts_parts`: whether rooflines count the bytes of each layer in the body, because each computes (two convolutions), or only the operands of
    the whole layer. So a network's minimum traffic does not depend on fusion.
    `layer_type`: its LayerType in TensorRT's inspector vocabulary.
    `decompose(layer)`: a network of separate layers that compute the same from the same inputs; default: the body. Fused layers in it stay fused.
    `matchers`: names of the passes that create it, in order of registration.
    """

    kinds: tuple[str, ...]
    title: str
    unsupported: str = ""
    samples: tuple[Sample, ...] = ()
    operations: Operations | None = None
    counts_parts: bool = False
    layer_type: str = "kgen"
    decompose: Callable[[Layer], Network] = get_body
    matchers: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of a composite that has one; the first of several."""
        return self.kinds[0]

    def matcher(self, *ops: str, phase: Phase = Phase.FINAL, after: Sequence[str] = (), level: int = 1) -> Callable[[Rule], Rule]:
        """Decorator: registers a rule (see `whet.rewrite.rules`) that creates layers of this composite under the function's name."""
        register_rule = rule(*ops, phase=phase, after=after, level=level, composite=self.kind)

        def decorate(f: Rule) -> Rule:
            register_rule(f)
            self.matchers.append(f.__name__)
            return f

        return decorate


COMPOSITES: dict[str, Composite] = {}
"""By kind; a composite of several kinds is listed under each."""


def register_composite(
    *kinds: str,
    title: str,
    unsupported: str = "",
    samples: Sequence[Sample] = (),
    operations: Operations | None = None,
    counts_parts: bool = False,
    layer_type: str = "kgen",
    decompose: Callable[[Layer], Network] = get_body,
) -> Composite:
    """Registers a composite of these kinds. Raises BuildError when a kind is registered already."""
    if taken := next((k for k in kinds if k in COMPOSITES), None):
        raise BuildError(f"two composites describe the kind {taken}")
    described = Composite(
        kinds=kinds, title=title, unsupported=unsupported, samples=tuple(samples), operations=operations, counts_parts=counts_parts,
        layer_type=layer_type, decompose=decompose,
    )  # fmt: skip
    for kind in kinds:
        COMPOSITES[kind] = described
    register_fused_kind(kinds, samples, operations)
    return described


def find_composite(layer: Layer) -> Composite | None:
    """The description of a fused layer; None for a plain layer.

    A kind that is not registered is a root operation with its epilogue, whatever the operation.
    """
    if layer.op != "Fused":
        return None
    return COMPOSITES.get(layer.composite) or Composite(kinds=(layer.composite,), title=f"{layer.composite} with its epilogue")


def decompose_layer(layer: Layer) -> Network:
    """The unfused network of a fused layer. Its inputs and outputs correspond to the layer's."""
    described = find_composite(layer)
    return get_body(layer) if described is None else described.decompose(layer)


def why_unfused(layer: Layer, computed: frozenset[str] | set[str] = frozenset()) -> str | None:
    """The reason why a new fused layer stays unfused: its kind is not in `computed`, the kinds of the machine's tactics. None if it may be fused."""
    described = find_composite(layer)
    if described is None or layer.composite in computed:
        return None
    return described.unsupported or None
