"""YOLOv5 v6.x, size s (Ultralytics 2021): CSP backbone with SPPF, PAN neck, and the Detect head that decodes the boxes.

SiLU is Sigmoid and Mul, batch norms (eps 1e-3) are kept, the three scales are decoded and concatenated to [N,25200,85].
"""

import numpy as np

from whet.zoo.layers import SILU_GAIN, batch_norm, conv, max_pool, silu
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter, Init

ANCHORS = (((10, 13), (16, 30), (33, 23)), ((30, 61), (62, 45), (59, 119)), ((116, 90), (156, 198), (373, 326)))  # pixels
STRIDES = (8, 16, 32)
BRANCH = 0.5                          # gamma at the end of a bottleneck with a shortcut


def yolov5s(g: GraphWriter, *, num_classes: int = 80, image: int = 640) -> None:
    """images[N,3,image,image] -> output0[N,boxes,5+num_classes]: centre x, y, width, height in pixels; objectness; classes."""
    x = g.input("images", (g.batch, 3, image, image))
    x = _build_layer(g, 0, _build_conv, x, 3, 32, 6, 2, 2)
    x = _build_layer(g, 1, _build_conv, x, 32, 64, 3, 2)
    x = _build_layer(g, 2, _build_c3, x, 64, 64, 1)
    x = _build_layer(g, 3, _build_conv, x, 64, 128, 3, 2)
    p3 = _build_layer(g, 4, _build_c3, x, 128, 128, 2)
    x = _build_layer(g, 5, _build_conv, p3, 128, 256, 3, 2)
    p4 = _build_layer(g, 6, _build_c3, x, 256, 256, 3)
    x = _build_layer(g, 7, _build_conv, p4, 256, 512, 3, 2)
    x = _build_layer(g, 8, _build_c3, x, 512, 512, 1)
    x = _build_layer(g, 9, _build_sppf, x, 512, 512)

    top = _build_layer(g, 10, _build_conv, x, 512, 256, 1, 1)
    x = _build_layer(g, 12, _build_concat, _build_layer(g, 11, _upsample, top), p4)
    x = _build_layer(g, 13, _build_c3, x, 512, 256, 1, False)
    middle = _build_layer(g, 14, _build_conv, x, 256, 128, 1, 1)
    x = _build_layer(g, 16, _build_concat, _build_layer(g, 15, _upsample, middle), p3)
    out3 = _build_layer(g, 17, _build_c3, x, 256, 128, 1, False)
    x = _build_layer(g, 19, _build_concat, _build_layer(g, 18, _build_conv, out3, 128, 128, 3, 2), middle)
    out4 = _build_layer(g, 20, _build_c3, x, 256, 256, 1, False)
    x = _build_layer(g, 22, _build_concat, _build_layer(g, 21, _build_conv, out4, 256, 256, 3, 2), top)
    out5 = _build_layer(g, 23, _build_c3, x, 512, 512, 1, False)

    boxes = sum(3 * (image // stride) ** 2 for stride in STRIDES)
    detections = _build_layer(g, 24, _build_detect, [out3, out4, out5], (128, 256, 512), num_classes, image)
    g.output(detections, "output0", (g.batch, boxes, 5 + num_classes))


def _build_layer(g: GraphWriter, index: int, write, *arguments) -> str:
    """Layer `index` of Ultralytics' list `model`. The list is never called, so the scope is model.INDEX in one part."""
    with g.scope(f"model.{index}"):
        return write(g, *arguments)


def _build_conv(g: GraphWriter, x: str, cin: int, cout: int, kernel: int, stride: int, padding: int | None = None,
          scale: float = 1.0) -> str:
    pad = kernel // 2 if padding is None else padding
    x = conv(g, x, "conv", cin, cout, kernel, stride=stride, padding=pad, gain=1.0 if cin == 3 else SILU_GAIN)
    return silu(g, batch_norm(g, x, "bn", cout, eps=1e-3, scale=scale))


def _build_named_conv(g: GraphWriter, name: str, *arguments, **more) -> str:
    with g.scope(name):
        return _build_conv(g, *arguments, **more)


def _build_c3(g: GraphWriter, x: str, cin: int, cout: int, count: int, shortcut: bool = True) -> str:
    half = cout // 2
    y = _build_named_conv(g, "cv1", x, cin, half, 1, 1)
    with g.scope("m"):
        for i in range(count):
            with g.scope(str(i)):
                z = _build_named_conv(g, "cv2", _build_named_conv(g, "cv1", y, half, half, 1, 1), half, half, 3, 1, scale=BRANCH if shortcut else 1.0)
                y = g.op("Add", y, z) if shortcut else z
    joined = g.op("Concat", y, _build_named_conv(g, "cv2", x, cin, half, 1, 1), axis=1)
    return _build_named_conv(g, "cv3", joined, 2 * half, cout, 1, 1)


def _build_sppf(g: GraphWriter, x: str, cin: int, cout: int) -> str:
    levels = [_build_named_conv(g, "cv1", x, cin, cin // 2, 1, 1)]
    for i in range(3):
        with g.scope("m"):
            levels.append(max_pool(g, levels[i], 5, stride=1, padding=2))
    return _build_named_conv(g, "cv2", g.op("Concat", *levels, axis=1), cin * 2, cout, 1, 1)


def _upsample(g: GraphWriter, x: str) -> str:
    return g.op("Resize", x, "", g.const([1, 1, 2, 2], "float32"), mode="nearest", nearest_mode="floor",
                coordinate_transformation_mode="asymmetric", cubic_coeff_a=-0.75)


def _build_concat(g: GraphWriter, x: str, skip: str) -> str:
    return g.op("Concat", x, skip, axis=1)


def _build_detect(g: GraphWriter, features: list[str], channels: tuple[int, ...], num_classes: int, image: int) -> str:
    fields, levels = 5 + num_classes, []
    for i, (feature, cin, stride) in enumerate(zip(features, channels, STRIDES, strict=True)):
        side = image // stride
        raw = conv(g, feature, f"m.{i}", cin, 3 * fields, 1, bias=True, gain=SILU_GAIN, bias_init=_make_prior_init(num_classes, stride))
        batch = g.batch_of(raw)
        y = g.op("Reshape", raw, g.shape(batch, 3, fields, side, side))
        y = g.op("Sigmoid", g.op("Transpose", y, perm=[0, 1, 3, 4, 2]))
        xy, wh, scores = g.ops("Split", y, g.const([2, 2, num_classes + 1]), outputs=3, axis=4)
        xy = g.op("Mul", g.op("Add", g.op("Mul", xy, g.const(2.0, "float32")), g.const(_compute_grid(side), "float32")),
                  g.const(float(stride), "float32"))
        wh = g.op("Mul", g.op("Pow", g.op("Mul", wh, g.const(2.0, "float32")), g.const(2.0, "float32")),
                  g.const(_compute_anchor_grid(i, side), "float32"))
        y = g.op("Concat", xy, wh, scores, axis=4)
        levels.append(g.op("Reshape", y, g.shape(batch, 3 * side * side, fields)))
    return g.op("Concat", *levels, axis=1)


def _compute_grid(side: int) -> np.ndarray:
    """[1,3,side,side,2]: x and y of each cell, minus the half that the decoding adds."""
    y, x = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    return np.broadcast_to(np.stack([x, y], 2) - 0.5, (1, 3, side, side, 2))


def _compute_anchor_grid(level: int, side: int) -> np.ndarray:
    """[1,3,side,side,2]: width and height in pixels of each anchor, repeated for each cell."""
    return np.broadcast_to(np.asarray(ANCHORS[level]).reshape(1, 3, 1, 1, 2), (1, 3, side, side, 2))


def _make_prior_init(num_classes: int, stride: int) -> Init:
    """Initial biases of the training code: 8 objects per image of 640 pixels, classes equally likely."""
    def init(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        bias = rng.standard_normal((3, 5 + num_classes), np.float32) * 0.05
        bias[:, 4] += np.log(8 / (640 / stride) ** 2)
        bias[:, 5:] += np.log(0.6 / (num_classes - 0.99999))
        return bias.reshape(shape)
    return init


# 7,225,885 parameters, as also published, once the batch norms are folded
register("yolov5s", yolov5s, about="one-stage detector, v6.x, boxes decoded in the graph", parameters=7_235_389)
