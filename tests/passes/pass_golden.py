"""Golden files of passes: cases with a network before and after, read and written.

    ## name: what the case shows
    # with fuse_conv_add            other passes that run too (optional)
    # noFuse=conv1                  as --noFuse (optional)
    # takes Attention               the machine has a tactic for this composite (optional)
    # line 16                       the machine's kernels read this many bytes of channels at once (optional)
    in %x: ...                      the network before
    =>
    in %x: ...                      the network after
    skip 'relu1': why               the skips of the pass under test

After `=>`, a constant created by the pass is shown as the expression that computes it, and weights keep their `seed(k)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whet.network import Network, format_network, parse_network
from whet.passes import PASSES, PassLog, lower

FOLDER = Path(__file__).parents[1] / "golden" / "passes"
# : Passes that reorder floating-point operations; all others are bit-exact, NaN and infinities included.
ROUNDS = {
    "fold_batch_norm", "fold_quantized_batch_norm", "fold_scale_shift", "gemm_to_canonical", "move_scales", "recognize_gelu",
    "recognize_hard_sigmoid", "recognize_hard_swish", "recognize_layer_norm", "recognize_mish", "recognize_rms_norm", "pad_channels",
    "remove_zero_channels", "merge_masks", "masked_fill_to_add", "einsum_to_matmul", "split_einsum", "sum_einsum_operands",
    "gemm_to_matmul", "scale_queries", "scale_masks",
    "merge_parallel_convs", "decompose_ops", "conv_integer_to_conv", "transform_to_product",
    "fold_batch_norm_forward", "untranspose_softmax", "heads_of_images", "conv_3d_to_2d", "scale_swish", "shift_relative_scores",
    "select_rows_early",
}  # fmt: skip
#: Passes that hold for numbers: which integer a NaN becomes, no standard says.
NO_NAN = {"move_quantize", "move_quantize_split"}
_LIMIT = 16  # the text form writes constants of up to so many elements out


@dataclass
class Case:
    """One case: its title, the passes and nodes of its directives, the text before, and the text expected after."""

    title: str
    before: str
    after: str
    others: tuple[str, ...] = ()
    no_fuse: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    channel_alignment: int = 1

    def network(self) -> Network:
        return parse_network("network case source\n" + self.before)

    def run(self, name: str, net: Network | None = None) -> tuple[Network, PassLog]:
        """The case's network (or `net`) after pass `name` and the case's other passes, verified after each rewrite."""
        switches = ["none", "+" + name, *("+" + o for o in self.others)]
        refuses = (lambda layer: None if layer.composite in self.takes else f"no tactic takes {layer.composite}") if self.takes else None
        alignment = self.channel_alignment
        return lower(net or self.network(), switches=switches, no_fuse=self.no_fuse, check=True, refuses=refuses, channel_alignment=alignment)


def read(path: Path) -> list[Case]:
    cases = []
    for block in re.split(r"^## ", path.read_text(), flags=re.M)[1:]:
        title, _, body = block.partition("\n")
        before, arrow, after = body.partition("=>\n")
        assert arrow or body.rstrip().endswith("=>"), f"{path.name}: case {title!r} has no line '=>'"
        before = before.removesuffix("=>").rstrip() + "\n"
        others = tuple(m for line in re.findall(r"^# with (.*)$", before, flags=re.M) for m in line.split())
        assert all(o in PASSES for o in others), f"{path.name}: {others}"
        no_fuse = tuple(re.findall(r"^# noFuse=(.*)$", before, flags=re.M))
        takes = tuple(re.findall(r"^# takes (.*)$", before, flags=re.M))
        line = max(map(int, re.findall(r"^# line (\d+)$", before, flags=re.M)), default=1)
        cases.append(Case(title.strip(), before, after.strip() + "\n", others, no_fuse, takes, line))
    return cases


def write(path: Path, cases: list[Case]) -> None:
    path.write_text("\n".join(f"## {c.title}\n{c.before}=>\n{c.after}" for c in cases))


def after_text(case: Case, name: str, net: Network, log: PassLog) -> str:
    """The text after `=>`."""
    seeds = dict(re.findall(r"^const %(\S+): \S+ = (seed\(\d+\))$", case.before, flags=re.M))
    known = {t.weight.digest: seeds[t.name] for t in case.network().constants.values() if t.name in seeds and t.weight is not None}
    lines = []
    for line in format_network(net).splitlines()[1:]:
        m = re.fullmatch(r'const %("[^"]+"|\S+): (\S+) = (.*)', line)
        if m:
            weight = net.constants[m[1].strip('"')].weight
            assert weight is not None
            if weight.origin.op != "source":
                shown = f"{m[3]} from " if np.size(weight.array) <= _LIMIT else ""
                line = f"const %{m[1]}: {m[2]} = {shown}{weight.origin}"
            elif weight.digest in known:
                line = f"const %{m[1]}: {m[2]} = {known[weight.digest]}"
            line += "".join(f" assumed {a}" for a in weight.origin.assumes)
        lines.append(line)
    lines += [f"skip '{layer}': {why}" if layer else f"skip: {why}" for (p, layer), why in sorted(log.skipped.items()) if p == name]
    return "\n".join(lines) + "\n"
