"""A convolution or matrix product with its epilogue: scale, bias, residual Add, activations.

The kind of such a layer is its root operation. Every backend computes these layers, so they have no reason to stay unfused by themselves.
"""

from __future__ import annotations

from typing import Any

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, make_body
from whet.composites._two_four_samples import FEW_ROWS
from whet.composites._two_four_samples import SAMPLES as TWO_FOUR
from whet.network import Layer, Tensor
from whet.ops import Sample
from whet.rewrite.constants import scalar_value
from whet.rewrite.fusing import (
    ACTIVATIONS,
    CONVS,
    PRODUCTS,
    find_fusion_obstacle,
    find_root_op,
    fuse_activation,
    fuse_add,
    fuse_flat,
    list_epilogue_steps,
)
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip


def make_conv_sample(x: str, w: str, act: str, bias: bool = True, before: str = "", after: str = "", **attrs: Any) -> Sample:
    """act(conv(x, w) + bias); `before` and `after`: the type of a residual that is added before or after the activation."""
    inputs = [x, f"const {w}", *([f"const f32[{w.split('[')[1].split(',')[0]}]"] if bias else [])]
    count = len(inputs)
    inputs += [added for added in (before, after) if added]

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        y = body.add("Conv", *own[:count], **attrs)
        y = body.add("Add", y, own[count]) if before else y
        y = activate(body, y, act)
        body.mark_output(body.add("Add", y, own[-1]) if after else y)
        return {"body": body}

    return Sample(inputs, {"composite": "Conv"}, build_regions)


def make_conv_silu_sample(x: str, w: str, bias: bool = True, before: str = "", after: str = "", **attrs: Any) -> Sample:
    """`make_conv_sample` with SiLU."""
    return make_conv_sample(x, w, "silu", bias, before, after, **attrs)


_PADDED: dict[str, Any] = {"pads": (1, 1, 1, 1)}

EPILOGUE = register_composite(
    *CONVS,
    *PRODUCTS,
    title="convolution or matrix product with its epilogue",
    samples=[
        make_conv_silu_sample("f32[1,24,9,7]", "f32[144,24,1,1]"),
        make_conv_silu_sample("f32[2,16,5,6]", "f32[64,16,1,1]", bias=False),
        make_conv_silu_sample("f32[1,32,11,15]", "f32[32,1,3,3]", group=32, **_PADDED),
        make_conv_silu_sample("f32[2,16,14,13]", "f32[16,1,5,5]", bias=False, group=16, pads=(2, 2, 2, 2), strides=(2, 2)),
        make_conv_sample("f32[2,48,17,19]", "f32[48,1,7,7]", "Relu", group=48, pads=(3, 3, 3, 3)),
        make_conv_silu_sample("f32[1,32,30,13]", "f32[32,1,9,9]", group=32, pads=(4, 4, 4, 4), strides=(2, 2)),
        make_conv_silu_sample("f32[2,20,9,11]", "f32[40,20,3,3]", after="f32[2,40,9,11]", **_PADDED),
        make_conv_silu_sample("f32[1,3,18,26]", "f32[16,3,6,6]", pads=(2, 2, 2, 2), strides=(2, 2)),
        # 64 channels over more pixels than a GPU's multiprocessors take in one wave
        make_conv_sample("f32[40,64,40,6]", "f32[64,64,3,3]", "Relu", before="f32[40,64,40,6]", **_PADDED),
        make_conv_sample("f32[8,64,22,18]", "f32[40,64,3,3]", "Relu", after="f32[8,40,22,18]", **_PADDED),
        make_conv_sample("f32[3,64,43,56]", "f32[64,64,3,3]", "Relu", **_PADDED),
        *TWO_FOUR,
        *FEW_ROWS,
    ],
)


@EPILOGUE.matcher("Add", phase=Phase.FUSE)
def fuse_conv_add(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A residual Add goes into the convolution that produces one of its inputs (the later one, when both are convolutions)."""
    return fuse_add(g, layer, CONVS)


@EPILOGUE.matcher(*ACTIVATIONS, phase=Phase.FUSE, after=["fuse_conv_add"])
def fuse_conv_activation(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A convolution and the activation of its result become one layer: any activation of one input, with constant parameters."""
    return fuse_activation(g, layer, CONVS)


@EPILOGUE.matcher("Div", "Mul", phase=Phase.FUSE, after=["recognize_attention"])
def fuse_gemm_scale(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A matrix product and the constant that its result is multiplied or divided by become one layer (attention's scale)."""
    for value, factor in (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,):
        head = g.maker(value)
        root = find_root_op(head, PRODUCTS)
        if head is None or value is None or not root or scalar_value(factor) is None or layer.output.type != value.type:
            continue
        if reason := find_fusion_obstacle(g, value, layer):
            return Skip(reason)
        if list_epilogue_steps(head):
            return Skip(f"'{head.name}' has an epilogue already")
        return fuse_flat(g, root, head, layer)
    return None


@EPILOGUE.matcher("Add", phase=Phase.FUSE, after=["fuse_gemm_scale"])
def fuse_matmul_bias(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A constant bias along the last axis goes into the MatMul before it: Add(MatMul(x, w), b) -> one layer."""
    for value, bias in (layer.inputs, layer.inputs[::-1]):
        head = g.maker(value)
        if head is None or value is None or bias is None or not bias.is_constant or not find_root_op(head, ("MatMul",)):
            continue
        if bias.type.rank != 1 or bias.shape != value.shape[-1:]:
            return Skip(f"%{bias.name}: {bias.type} is not a vector along the last axis of %{value.name}: {value.type}")
        if reason := find_fusion_obstacle(g, value, layer):
            return Skip(reason)
        if set(list_epilogue_steps(head)) - {"scale"}:
            return Skip(f"'{head.name}' has an epilogue already")
        return fuse_flat(g, "MatMul", head, layer)
    return None


@EPILOGUE.matcher("Add", phase=Phase.FUSE, after=["fuse_matmul_bias"])
def fuse_gemm_add(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A residual Add goes into the matrix product (Gemm or MatMul) that produces one of its inputs (the later one, when both are)."""
    return fuse_add(g, layer, PRODUCTS)


@EPILOGUE.matcher(*ACTIVATIONS, phase=Phase.FUSE, after=["fuse_gemm_add"])
def fuse_gemm_activation(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A matrix product (Gemm or MatMul) and the activation of its result become one layer."""
    return fuse_activation(g, layer, PRODUCTS)


@EPILOGUE.matcher("Mul", phase=Phase.FUSE, after=["fuse_conv_add", "fuse_gemm_add"])
def fuse_silu(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """SiLU, exported as x * Sigmoid(x), goes into the convolution or matrix product that produces x."""
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        sigmoid = g.maker(gate)
        if sigmoid is None or sigmoid.op != "Sigmoid" or sigmoid.inputs[0] is not x or x is None or gate is None:
            continue
        head = g.maker(x)
        root = find_root_op(head, CONVS + PRODUCTS)
        if head is None or not root:
            return None
        if reason := find_fusion_obstacle(g, x, sigmoid, layer) or find_fusion_obstacle(g, gate, layer):
            return Skip(reason)
        if list_epilogue_steps(head)[-1:] == ["activation"]:
            return Skip(f"the epilogue of '{head.name}' ends with an activation already")
        return fuse_flat(g, root, head, sigmoid, layer)
    return None
