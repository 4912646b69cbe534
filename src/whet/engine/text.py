"""The network's text in an engine file: checked before parsing, and compared with the text of the parsed network."""

from __future__ import annotations

import re
from collections.abc import Sequence

from whet.engine.weights import iterate_constants
from whet.errors import EngineError, NetworkError
from whet.network import Expr, Network, Weight, format_network, parse_network, verify
from whet.network.dims import LONGEST_DIM

_MOST_LINES = 100_000
_LONGEST_LINE = 1 << 18
_DEEPEST = 34  # nested regions: those of a model and, in them, of a fused layer
_CONSTANT = re.compile(r'const %(?:"(?:[^"\\]|\\.)*"|[\w./:$#+-]+): \w+\[[0-9,]*\] = (?:\[|sha256:[0-9a-f]{64}$)')
_NUMBER = re.compile(r"[0-9]{20}")
_NAMES = re.compile(r'"(?:[^"\\]|\\.)*"|%[\w./:$#+-]+|named [\w./:$#+-]+|[0-9]*\.[0-9e+-]+')
_BREAKS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError, AssertionError, SyntaxError)


def read_text(data: memoryview, weights: Sequence[Weight], name: str, metadata: dict[str, str]) -> Network:
    """The network of the text, with `weights` as its constants in the order of `iterate_constants`. Raises EngineError."""
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as e:
        raise EngineError("the network is not text") from e
    _check_limits(text)
    try:
        net = parse_network(text, {f"sha256:{w.digest}": w for w in weights})
        _set_weights(net, weights)
        verify(net, types=False)
        again = format_network(net)
    except (NetworkError, RecursionError, MemoryError, *_BREAKS) as e:
        raise EngineError(f"the network cannot be read: {type(e).__name__}: {str(e)[:300]}") from e
    if again != text:
        odd = next((a for a, b in zip(text.split("\n"), again.split("\n"), strict=False) if a != b), "its end")
        raise EngineError(f"the network's text is not in canonical form: {odd[:120]!r}")
    if net.name != name or net.stage != "lowered":
        raise EngineError(f"the network is '{net.name[:60]}' ({net.stage}), the header says '{name[:60]}' (lowered)")
    net.metadata = metadata
    return net


def check_text_limits(net: Network) -> None:
    """Raises EngineError if an engine of this network could not be opened: too many layers, too long names or dims, too deep regions."""
    _check_limits(format_network(net))
    for t in net.tensors():
        longest = max((len(str(d)) for d in t.shape if isinstance(d, Expr)), default=0)
        if longest > LONGEST_DIM:
            raise EngineError(f"%{t.name[:80]} has a dimension of {longest} characters, more than {LONGEST_DIM}")


def _check_limits(text: str) -> None:
    """Rejects text that would take much time or memory to parse."""
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        raise EngineError(f"the network has {len(lines)} lines, more than {_MOST_LINES}")
    depth = 0
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        if len(bare) > _LONGEST_LINE:
            raise EngineError(f"line {number} of the network has {len(bare)} characters, more than {_LONGEST_LINE}")
        if bare.startswith("const ") and not _CONSTANT.match(bare):
            raise EngineError(f"line {number} of the network is not a constant with values or digest: {bare[:80]!r}")
        if _NUMBER.search(bare) and not bare.startswith("const "):
            if not bare.startswith("network ") and _NUMBER.search(_NAMES.sub("", bare)):
                raise EngineError(f"line {number} of the network has a number of more than 19 digits")
        depth += bare.endswith("{") - (bare == "}")
        if depth > _DEEPEST:
            raise EngineError(f"line {number} of the network: regions are nested more than {_DEEPEST} deep")


def _set_weights(net: Network, weights: Sequence[Weight]) -> None:
    """Replaces constants in the text by the stored weights with their origins."""
    constants = list(iterate_constants(net))
    if len(constants) != len(weights):
        raise EngineError(f"the network has {len(constants)} constants, the index {len(weights)}")
    for t, w in zip(constants, weights, strict=True):
        if t.weight is None or t.weight.digest != w.digest:
            raise EngineError(f"constant %{t.name} and the index do not agree")
        t.weight = w
