"""The order of steps that keeps what each gains: prune, fine-tune, export, calibrate, build; and the record of it in the model.

Pruning moves what activations are, so ranges measured before are ranges of another network, and Q/DQ scales per channel belong to channels
that are gone. Calibrating a network that was cut and not yet recovered measures ranges of something broken. 2:4 zeros, whoever wrote them,
last through neither a cut nor a least-squares fit. What whet did to a model stands
in its ONNX metadata, so the guard works across files and sessions.
"""

from __future__ import annotations

import json
from typing import Any

from whet.errors import PruneError
from whet.network import Network
from whet.sparsity.two_four import eligible_layers

KEY = "prop.whet.history"  # written as the ONNX metadata property whet.history
STEPS = ("prune", "recover", "finetune", "calibrate")
_CHANGED = "changes the activations that its ranges were measured on. Prune the floating-point model, fine-tune, then calibrate (or do QAT last)."
_QUANTIZED = {  # what is wrong with a step on a quantized network, and the way out
    "prune": f"pruning {_CHANGED}",
    "recover": f"recovery {_CHANGED}",
    "finetune": "fine-tuning moves the weights that its ranges were measured with. Fine-tune the floating-point model and calibrate it after "
    "that, or do quantization-aware training (whet finetune --qat) as the last step.",
    "calibrate": "its ranges stand in it. Build it as it is (whet exec --int8), or calibrate the floating-point model.",
}


_TWO_FOUR = {  # what is wrong with a step on weights that hold 2:4 zeros
    "prune": "cutting input channels moves weights into other fours, so that the pattern is lost. Prune first, then write and hold it "
    "(whet finetune --masks=2:4).",
    "recover": "recovery fits all weights anew, the zeros too. Recover first, then write and hold the pattern (whet finetune --masks=2:4).",
}


def history(net: Network) -> list[dict[str, Any]]:
    """What was done to the network, oldest first: [{"step": "prune", ...}, ...]. A record that is not ours counts as none."""
    try:
        found = json.loads(net.metadata.get(KEY, "[]"))
    except ValueError:
        return []
    return [s for s in found if isinstance(s, dict) and s.get("step") in STEPS] if isinstance(found, list) else []


def note(net: Network, step: str, **about: Any) -> None:
    """Adds a step to the network's record; `about` is plain data on how it was done."""
    net.metadata[KEY] = json.dumps([*history(net), {"step": step, **about}])


def check_order(net: Network, step: str, insist: bool = False) -> None:
    """Raises PruneError, with the reason and the way out, when `step` (of STEPS) comes too late or too early; `insist` lets it pass."""
    why = None if insist else _wrong(net, step)
    if why is not None:
        raise PruneError(f"{why} --insist does it all the same (insist=True from Python).")


def _wrong(net: Network, step: str) -> str | None:
    """What speaks against doing `step` now, and what to do instead."""
    done = [s["step"] for s in history(net)]
    last = max((i for i, s in enumerate(done) if s == "prune"), default=-1)
    since = set(done[last + 1 :])
    if "calibrate" in done or any(x.op in ("QuantizeLinear", "DequantizeLinear") for x in net.layers):
        return f"the network is quantized already (Q/DQ nodes or a calibration), and {_QUANTIZED[step]}"
    if step in _TWO_FOUR and (patterned := _two_four(net)):
        return f"{len(patterned)} layers hold 2:4 zeros ({', '.join(patterned[:3])}{', ...' if len(patterned) > 3 else ''}), and {_TWO_FOUR[step]}"
    if step == "recover" and last >= 0 and "finetune" in since:
        return (
            "the network was fine-tuned since it was cut, and recovery fits its layers to the original's again, which undoes that. Recover right "
            "after the cut, then fine-tune."
        )
    if step == "calibrate" and last >= 0 and not {"recover", "finetune"} & since:
        return (
            "the network was pruned and neither recovered nor fine-tuned since, so calibration would measure the ranges of a network whose "
            "accuracy is gone. Fine-tune it (or `whet prune --calibData` to recover it), then calibrate."
        )
    return None


def _two_four(net: Network) -> list[str]:
    """Names of layers whose weights are 2:4, and not zeros altogether."""
    layers = {x.name: x for x in net.layers}
    return [name for name in eligible_layers(net)[0] if any(t.array().any() for t in layers[name].inputs[1:2] if t is not None and t.is_constant)]
