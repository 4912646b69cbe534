"""A source network as a torch.nn.Module with the same graph and weight names, and conversion back.

The module executes the network layer by layer without export or tracing: the trained graph is the one that was pruned and will be built. For
each set of input shapes the graph is bound once (symbols become integers, shape arithmetic is folded) and cached as a list of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from whet.errors import NetworkError, ShapeError, UnsupportedError
from whet.network import Layer, Network, Origin, Tensor, Weight
from whet.ops import bind_layer, bind_symbols
from whet.training.parameters import make_torch_names, sort_constants
from whet.training.translate import translate_layer, why_not
from whet.training.translate._base import TRAINING, get_torch_dtype, to_tensor


@dataclass(frozen=True)
class Fakes:
    """Fake-quantization sites of quantization-aware training.

    `values` maps a tensor to the readers (layer names; None: all) of its rounded form and the rounding module; `weights` maps a layer to
    the module that rounds its weights (input 1).
    """

    values: Mapping[str, tuple[frozenset[str] | None, nn.Module]]
    weights: Mapping[str, nn.Module]


@dataclass(frozen=True)
class _Call:
    compute: Callable[..., Any]
    inputs: tuple[int, ...]  # slots; -1 is absent
    outputs: tuple[int, ...]
    free: tuple[int, ...]  # slots that are dead after this call
    training: bool


class NetworkModule(nn.Module):
    """`module(*inputs)` (in network order, or by name) returns the outputs: one tensor, or a tuple.

    Layer weights are parameters, batch-norm statistics are buffers, other constants are fixed; the name patterns `freeze` and `train`
    override this. In train() mode batch norms update their statistics. Raises UnsupportedError naming the layers that cannot be trained.
    """

    def __init__(self, net: Network, *, freeze: Iterable[str] = (), train: Iterable[str] = (), fakes: Fakes | None = None):
        super().__init__()
        freeze, train = tuple(freeze), tuple(train)
        if net.stage != "source":
            raise NetworkError("only a source network can be trained: train before lowering, then build again")
        refused = [r for r in map(why_not, net.layers) if r is not None]
        if refused:
            more = f"\n  and {len(refused) - 5} more" if len(refused) > 5 else ""
            raise UnsupportedError("the network cannot be trained:\n  " + "\n  ".join(refused[:5]) + more)
        self.network = net
        self._patterns = (freeze, train)
        trained, measured, fixed = sort_constants(net, freeze, train)
        self._paths = make_torch_names([*trained, *measured])
        for t in trained:
            _register(self, self._paths[t], nn.Parameter(to_tensor(t.array())))
        for t in measured:
            _register(self, self._paths[t], to_tensor(t.array()), buffer=True)
        self._fixed = fixed
        self._fakes = fakes
        if fakes is not None:
            self.fakes = nn.ModuleList([*(how for _, how in fakes.values.values()), *fakes.weights.values()])
        self._programs: dict[tuple[Any, ...], tuple[list[_Call], int, dict[int, Any], list[int]]] = {}
        self._held: dict[str, torch.Tensor] = {}

    # reading

    def weight_names(self) -> dict[str, str]:
        """State-dict names -> weight names of the network."""
        return {path: t.name for t, path in self._paths.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and statistics by weight name."""
        return {t.name: _find(self, path) for t, path in self._paths.items()}

    def replace_network(self, net: Network) -> None:
        """The module becomes that of another network, with its weights; device and mode stay. Parameters are new objects."""
        if self._fakes is not None:
            raise NetworkError("the network of a module with fake quantization cannot be replaced: make a new module")
        device, training = next((p.device for p in self.parameters()), torch.device("cpu")), self.training
        freeze, train = self._patterns
        self.__dict__.update(NetworkModule(net, freeze=freeze, train=train).__dict__)
        self.to(device).train(training)

    # computing

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The network's outputs. Raises ShapeError for inputs that do not fit."""
        feeds = self._feeds(inputs, named)
        key = tuple(tuple(x.shape) for x in feeds)
        if key not in self._programs:
            self._programs[key] = self._bind(feeds)
        calls, slots, constants, outputs = self._programs[key]
        values: list[Any] = [None] * slots
        device = feeds[0].device if feeds else torch.device("cpu")
        for slot, x in enumerate(feeds):
            values[slot] = x
        for slot, source in constants.items():
            values[slot] = source(device)
        for call in calls:
            given = [None if i < 0 else values[i] for i in call.inputs]
            made = call.compute(self.training, *given) if call.training else call.compute(*given)
            if len(call.outputs) == 1 and not isinstance(made, tuple | list):
                values[call.outputs[0]] = made
            else:
                for slot, x in zip(call.outputs, made, strict=True):
                    values[slot] = x
            for slot in call.free:
                values[slot] = None
        found = tuple(self._as_declared(values[s], t) for s, t in zip(outputs, self.network.outputs, strict=True))
        return found[0] if len(found) == 1 else found

    @staticmethod
    def _as_declared(x: torch.Tensor, t: Tensor) -> torch.Tensor:
        """Casts integers after a QuantizeLinear to the declared type; floats keep the autocast type."""
        return x if t.dtype.is_float else x.to(get_torch_dtype(t.dtype))

    def _feeds(self, inputs: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        names = [t.name for t in self.network.inputs]
        feeds = dict(zip(names, inputs, strict=False)) | dict(named)
        if len(inputs) > len(names) or set(feeds) != set(names):
            raise ShapeError(f"the network takes {', '.join(names)}; {len(inputs)} tensors and {', '.join(named) or 'no names'} were given")
        return [feeds[n] for n in names]

    def _bind(self, feeds: list[torch.Tensor]) -> tuple[list[_Call], int, dict[int, Any], list[int]]:
        """Returns (calls, number of slots, constant slots, output slots) for these shapes."""
        net = self.network
        shapes = {t.name: tuple(x.shape) for t, x in zip(net.inputs, feeds, strict=True)}
        env = bind_symbols([(t.name, t.type) for t in net.inputs], shapes)
        binder = _Binder(self, env)
        for t in net.inputs:
            binder.slot_of[t] = binder.new()
        for layer in net.layers:
            binder.add(layer)
        outputs = [binder.slot(t) for t in net.outputs]
        return binder.finished(outputs), binder.slots, binder.constants, outputs


class _Binder:
    """Builds the call list for one set of shapes."""

    def __init__(self, module: NetworkModule, env: Mapping[str, int]):
        self.module, self.env = module, env
        self.slots = 0
        self.slot_of: dict[Tensor, int] = {}
        self.constants: dict[int, Callable[[torch.device], torch.Tensor]] = {}
        self.calls: list[_Call] = []
        self._faked: dict[Tensor, int] = {}

    def new(self) -> int:
        self.slots += 1
        return self.slots - 1

    def add(self, layer: Layer) -> None:
        bound = bind_layer(layer, self.env)
        if all(_is_known(t) for t in bound.outputs):  # shape arithmetic is folded into its readers
            for t, twin in zip(layer.outputs, bound.outputs, strict=True):
                values = np.array(twin.shape_value, t.dtype.numpy).reshape(tuple(twin.shape))
                self.slot_of[t] = self._constant(_cache_per_device(values))
            return
        inputs = [-1 if x is None else self._read(layer, i, x) for i, x in enumerate(layer.inputs)]
        outputs = []
        for t in layer.outputs:
            self.slot_of[t] = self.new()
            outputs.append(self.slot_of[t])
        while inputs and inputs[-1] < 0:
            inputs.pop()
        self.calls.append(_Call(translate_layer(bound), tuple(inputs), tuple(outputs), (), layer.op in TRAINING))

    def _read(self, layer: Layer, i: int, t: Tensor) -> int:
        fakes = self.module._fakes
        if fakes is not None and i == 1 and layer.name in fakes.weights:
            made = self.new()
            self.calls.append(_Call(fakes.weights[layer.name], (self.slot(t),), (made,), (), False))
            return made
        if fakes is not None and t.name in fakes.values:
            readers, how = fakes.values[t.name]
            if readers is None or layer.name in readers:
                if t not in self._faked:
                    self._faked[t] = self.new()
                    self.calls.append(_Call(how, (self.slot(t),), (self._faked[t],), (), False))
                return self._faked[t]
        return self.slot(t)

    def slot(self, t: Tensor) -> int:
        if t not in self.slot_of:
            path, module = self.module._paths.get(t), self.module
            if path is not None:
                self.slot_of[t] = self._constant(lambda device: _find(module, path))
            else:
                self.slot_of[t] = self._constant(_cache_per_device(t.array()))
        return self.slot_of[t]

    def _constant(self, source: Callable[[torch.device], torch.Tensor]) -> int:
        slot = self.new()
        self.constants[slot] = source
        return slot

    def finished(self, outputs: list[int]) -> list[_Call]:
        """The calls, each with the slots that are dead after it."""
        keep, seen, made = set(outputs), set[int](), []
        for call in reversed(self.calls):
            touched = {s for s in (*call.inputs, *call.outputs) if s >= 0}
            made.append(_Call(call.compute, call.inputs, call.outputs, tuple(sorted(touched - seen - keep)), call.training))
            seen |= touched
        return made[::-1]


def _is_known(t: Tensor) -> bool:
    return t.shape_value is not None and all(isinstance(v, int) for v in t.shape_value)


def _cache_per_device(values: np.ndarray) -> Callable[[torch.device], torch.Tensor]:
    """A constant cached per device."""
    made: dict[torch.device, torch.Tensor] = {}

    def get_constant(device: torch.device) -> torch.Tensor:
        if device not in made:
            made[device] = to_tensor(values).to(device)
        return made[device]

    return get_constant


def _register(root: nn.Module, path: str, value: torch.Tensor, *, buffer: bool = False) -> None:
    """Registers a parameter or buffer at a dotted path and creates the modules on it."""
    *parents, name = path.split(".")
    for part in parents:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    if buffer:
        root.register_buffer(name, value)
    else:
        root.register_parameter(name, value)


def _find(root: nn.Module, path: str) -> torch.Tensor:
    *parents, name = path.split(".")
    for part in parents:
        root = root._modules[part]
    found = root._parameters.get(name)
    return found if found is not None else root._buffers[name]


def to_torch(net: Network, *, freeze: Iterable[str] = (), train: Iterable[str] = ()) -> NetworkModule:
    """Returns `net` (source stage) as a trainable module, see NetworkModule. Raises BackendError without torch."""
    return NetworkModule(net, freeze=freeze, train=train)


def from_module(net: Network, module: NetworkModule, *, about: str = "") -> Network:
    """A copy of `net` with the module's weights. `about` is stored in the metadata as prop.whet.training.

    Raises NetworkError for a weight that is missing, has another shape or is not finite.
    """
    return with_weights(net, {name: to_array(value) for name, value in module.weights().items()}, about=about)


def to_array(value: torch.Tensor) -> np.ndarray:
    """A parameter as a float32 array."""
    return value.detach().to("cpu", torch.float32).contiguous().numpy()


def with_weights(net: Network, weights: Mapping[str, np.ndarray], *, about: str = "") -> Network:
    """As from_module, for float32 arrays by weight name. A changed weight becomes a source weight: it no longer derives from the weights it was
    cut or folded from."""
    made = net.clone()
    for name, array in weights.items():
        t = made.constants.get(name)
        if t is None or t.weight is None:
            raise NetworkError(f"the module's weight {name!r} is not in '{net.name}': it was made from another network")
        if array.shape != t.array().shape:
            raise NetworkError(f"the weight {name!r} is {list(array.shape)} in the module, {list(t.array().shape)} in '{net.name}'")
        if not np.isfinite(array).all():
            raise NetworkError(f"training left NaN or infinities in the weight {name!r}: lower the learning rate, or train in fp32")
        if not np.array_equal(array, t.array()):
            t.weight = Weight(array.copy(), Origin("source", t.name))
    if about:
        made.metadata["prop.whet.training"] = about
    return made
