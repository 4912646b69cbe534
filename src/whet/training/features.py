"""Tensors of a student that are compared with those of its teacher: sums of residual branches that pruning has left at full size."""

from __future__ import annotations

from whet.errors import TrainingError
from whet.network import Network, Tensor

_MOST = 4  # features: one per resolution is usual


def mark_features(student: Network, teacher: Network) -> list[str]:
    """Appends the common features to the outputs of both networks and returns their names: of the Adds with the same name and shape in both, the
    last one of each shape. Raises TrainingError when there is none."""
    own = {t.name: t for t in _list_sums(student)}
    last: dict[tuple, tuple[Tensor, Tensor]] = {}
    for t in _list_sums(teacher):
        if t.name in own and own[t.name].type == t.type:
            last[tuple(t.shape)] = own[t.name], t
    if not last:
        raise TrainingError(
            "the student and the teacher have no sum of residual branches in common (same name and shape): leave out features, or prune only "
            "inner widths (--skip)"
        )
    chosen = list(last.values())[-_MOST:]
    for a, b in chosen:
        student.mark_output(a)
        teacher.mark_output(b)
    return [a.name for a, _ in chosen]


def _list_sums(net: Network) -> list[Tensor]:
    sums = [x for x in net.layers if x.op == "Add" and x.output not in net.outputs]
    return [x.output for x in sums if all(t is not None and not t.is_constant for t in x.inputs)]
