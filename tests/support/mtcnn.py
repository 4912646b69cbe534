"""MTCNN's face detection around its three networks (Zhang et al. 2016, https://arxiv.org/abs/1604.02878), in NumPy.

Images are RGB; a network's input is [N, 3, width, height], (x - 127.5) / 128, width before height as in the authors' MATLAB code.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

Predict = Callable[[np.ndarray], dict[str, np.ndarray]]


def faces(image: np.ndarray, pnet: Predict, rnet: Predict, onet: Predict, smallest: int = 20, thresholds=(0.6, 0.7, 0.7)) -> np.ndarray:
    """Boxes [n, 5] (x1, y1, x2, y2, score) of a uint8 image [H, W, 3]."""
    h, w = image.shape[:2]
    boxes = []
    scale = 12 / smallest
    while min(h, w) * scale >= 12:
        out = pnet(_input(image, int(np.ceil(w * scale)), int(np.ceil(h * scale)))[None])
        score, move = out["prob1"][0, 1], out["conv4-2"][0]
        x, y = np.nonzero(score >= thresholds[0])
        at = np.stack([x, y], 1)
        corners = np.concatenate([np.fix((2 * at + 1) / scale), np.fix((2 * at + 12) / scale)], 1)
        found = np.concatenate([corners, score[x, y, None], move[:, x, y].T], 1)
        boxes.append(found[_suppress_overlaps(found, 0.5, "union")])
        scale *= 0.709
    found = np.concatenate(boxes)
    found = found[_suppress_overlaps(found, 0.7, "union")]
    found = _square(_moved(found[:, :5], found[:, 5:], 0))
    for net, size, threshold, move_name in ((rnet, 24, thresholds[1], "conv5-2"), (onet, 48, thresholds[2], "conv6-2")):
        if not len(found):
            return found
        out = net(np.stack([_input(_crop(image, box), size, size) for box in found]))
        keep = out["prob1"][:, 1] > threshold
        found = np.concatenate([found[keep, :4], out["prob1"][keep, 1:]], 1)
        move = out[move_name][keep]
        if size == 24:
            kept = _suppress_overlaps(found, 0.7, "union")
            found = _square(_moved(found[kept], move[kept], 1))
        else:
            found = _moved(found, move, 1)
            found = found[_suppress_overlaps(found, 0.7, "min")]
    return found


def _input(image: np.ndarray, w: int, h: int) -> np.ndarray:
    resized = np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.BILINEAR))
    return ((resized.astype(np.float32) - 127.5) / 128).transpose(2, 1, 0)


def _crop(image: np.ndarray, box: np.ndarray) -> np.ndarray:
    """The part of the image in the box, zeros outside the image."""
    x1, y1, x2, y2 = box[:4].astype(int)
    out = np.zeros((max(y2 - y1 + 1, 1), max(x2 - x1 + 1, 1), 3), np.uint8)
    h, w = image.shape[:2]
    top, left, bottom, right = max(y1 - 1, 0), max(x1 - 1, 0), min(y2, h), min(x2, w)
    if bottom > top and right > left:
        out[top - (y1 - 1) : bottom - (y1 - 1), left - (x1 - 1) : right - (x1 - 1)] = image[top:bottom, left:right]
    return out


def _moved(boxes: np.ndarray, move: np.ndarray, extra: int) -> np.ndarray:
    w, h = boxes[:, 2] - boxes[:, 0] + extra, boxes[:, 3] - boxes[:, 1] + extra
    return np.concatenate([boxes[:, :4] + move * np.stack([w, h, w, h], 1), boxes[:, 4:5]], 1)


def _square(boxes: np.ndarray) -> np.ndarray:
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    side = np.maximum(w, h)
    x, y = boxes[:, 0] + w / 2 - side / 2, boxes[:, 1] + h / 2 - side / 2
    return np.concatenate([np.fix(np.stack([x, y, x + side, y + side], 1)), boxes[:, 4:5]], 1)


def _suppress_overlaps(boxes: np.ndarray, threshold: float, method: str) -> list[int]:
    """Non-maximum suppression; overlaps relative to the union, or to the smaller box ("min")."""
    x1, y1, x2, y2, score = boxes[:, :5].T
    area = (x2 - x1 + 1) * (y2 - y1 + 1)
    order, keep = list(np.argsort(-score, kind="stable")), []
    while order:
        i, order = order[0], np.array(order[1:], int)
        keep.append(i)
        w = np.maximum(0, np.minimum(x2[i], x2[order]) - np.maximum(x1[i], x1[order]) + 1)
        h = np.maximum(0, np.minimum(y2[i], y2[order]) - np.maximum(y1[i], y1[order]) + 1)
        base = area[i] + area[order] - w * h if method == "union" else np.minimum(area[i], area[order])
        order = list(order[w * h / base <= threshold])
    return keep
