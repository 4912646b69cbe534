"""The order of steps that preserves their gains (prune, fine-tune, export, calibrate, build), and its record in the model.

Pruning changes activations, so earlier ranges are invalid, and per-channel Q/DQ scales refer to removed channels. Calibrating a network
that was cut but not recovered measures meaningless ranges. 2:4 patterns survive neither a cut nor a least-squares fit. The steps applied by
whet are recorded in the ONNX metadata, so the check works across files and sessions.
"""

from __future__ import annotations

import json
from typing import Any

from whet.errors import PruneError
from whet.network import Network
from whet.sparsity.two_four import list_eligible_layers

KEY = "prop.whet.history"  # written as the ONNX metadata property whet.history
STEPS = ("prune", "recover", "finetune", "calibrate")
_CHANGED = "changes the activations that its ranges were measured on. Prune the floating-point model, fine-tune, then calibrate (or do QAT last)."
_QUANTIZED = {  # why a step on a quantized network is wrong, and the alternative
    "prune": f"pruning {_CHANGED}",
    "recover": f"recovery {_CHANGED}",
    "finetune": "fine-tuning moves the weights that its ranges were measured with. Fine-tune the floating-point model and calibrate it after "
    "that, or do quantization-aware training (whet finetune --qat) as the last step.",
    "calibrate": "it already contains its ranges. Build it as it is (whet exec --int8), or calibrate the floating-point model.",
}


_TWO_FOUR = {  # why a step on 2:4 weights is wrong, and the alternative
    "prune": "cutting input channels shifts weights into other groups of four, which destroys the pattern. Prune first, then apply the pattern "
    "(whet finetune --masks=2:4).",
    "recover": "recovery refits all weights including the zeros. Recover first, then apply the pattern (whet finetune --masks=2:4).",
}


def read_history(net: Network) -> list[dict[str, Any]]:
    """The recorded steps, oldest first: [{"step": "prune", ...}, ...]; an invalid record counts as empty."""
    try:
        found = json.loads(net.metadata.get(KEY, "[]"))
    except ValueError:
        return []
    return [s for s in found if isinstance(s, dict) and s.get("step") in STEPS] if isinstance(found, list) else []


def note(net: Network, step: str, **about: Any) -> None:
    """Appends a step to the record; `about` is JSON data on its options."""
    net.metadata[KEY] = json.dumps([*read_history(net), {"step": step, **about}])


def check_order(net: Network, step: str, insist: bool = False) -> None:
    """Raises PruneError with reason and alternative when `step` (of STEPS) is out of order, unless `insist`."""
    why = None if insist else _find_objection(net, step)
    if why is not None:
        raise PruneError(f"{why} --insist overrides this.")


def _find_objection(net: Network, step: str) -> str | None:
    """The reason against doing `step` now with the alternative, or None."""
    done = [s["step"] for s in read_history(net)]
    last = max((i for i, s in enumerate(done) if s == "prune"), default=-1)
    since = set(done[last + 1 :])
    if "calibrate" in done or any(x.op in ("QuantizeLinear", "DequantizeLinear") for x in net.layers):
        return f"the network is quantized already (Q/DQ nodes or a calibration), and {_QUANTIZED[step]}"
    if step in _TWO_FOUR and (patterned := _list_two_four_layers(net)):
        return f"{len(patterned)} layers have 2:4 weights ({', '.join(patterned[:3])}{', ...' if len(patterned) > 3 else ''}), and {_TWO_FOUR[step]}"
    if step == "recover" and last >= 0 and "finetune" in since:
        return (
            "the network was fine-tuned after it was cut, and recovery would undo that by fitting its layers to the original's. Recover right "
            "after the cut, then fine-tune."
        )
    if step == "calibrate" and last >= 0 and not {"recover", "finetune"} & since:
        return (
            "the network was pruned and neither recovered nor fine-tuned since, so calibration would measure the ranges of a network with "
            "lost accuracy. Fine-tune it (or `whet prune --calibData` to recover it), then calibrate."
        )
    return None


def _list_two_four_layers(net: Network) -> list[str]:
    """Names of layers with 2:4 weights that are not entirely zero."""
    layers = {x.name: x for x in net.layers}
    return [
        name for name in list_eligible_layers(net)[0] if any(t.array().any() for t in layers[name].inputs[1:2] if t is not None and t.is_constant)
    ]
