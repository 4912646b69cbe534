"""Evaluation of detectors and segmenters: overlap, suppression, average precision, IoU, and the decoding of two heads."""

from collections.abc import Iterable, Sequence

import numpy as np


def overlap(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Intersection over union of box[4] with boxes[n,4], corners x1 y1 x2 y2 -> [n]."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    inter = np.prod(np.clip(high - low, 0, None), axis=1)
    area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    return inter / np.maximum(np.prod(box[2:] - box[:2]) + area - inter, 1e-12)


def suppress(boxes: np.ndarray, scores: np.ndarray, threshold: float) -> list[int]:
    """Indices kept by greedy non-maximum suppression, best first."""
    order, kept = np.argsort(-scores, kind="stable"), []
    while len(order):
        kept.append(int(order[0]))
        rest = order[1:]
        order = rest[overlap(boxes[order[0]], boxes[rest]) <= threshold]
    return kept


def average_precision(detections: list[np.ndarray], truth: list[np.ndarray], iou: float = 0.5) -> float:
    """Mean over the classes present of the area under the precision-recall curve (101 recall points, as in COCO).

    found: per image [n,6] class, score, x1, y1, x2, y2; truth: per image [m,5] class, x1, y1, x2, y2.
    """
    values = [_class_precision(detections, truth, c, iou) for c in np.unique(np.concatenate([t[:, 0] for t in truth]))]
    return float(np.mean(values))


def _class_precision(detections: list[np.ndarray], truth: list[np.ndarray], label: float, iou: float) -> float:
    mine = [f[f[:, 0] == label] for f in detections]
    wanted = [t[t[:, 0] == label, 1:] for t in truth]
    taken = [np.zeros(len(w), bool) for w in wanted]
    hits = []
    for score, image, i in sorted(((float(r[1]), k, i) for k, m in enumerate(mine) for i, r in enumerate(m)), reverse=True):
        hit = False
        if len(wanted[image]):
            share = np.where(taken[image], -1.0, overlap(mine[image][i, 2:], wanted[image]))
            best = int(share.argmax())
            hit = bool(share[best] >= iou)
            taken[image][best] |= hit
        hits.append((score, hit))
    if not hits:
        return 0.0
    true = np.cumsum([h for _, h in hits])
    recall, precision = true / sum(map(len, wanted)), true / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(recall, np.linspace(0, 1, 101))
    return float(np.mean(np.append(precision, 0.0)[np.minimum(at, len(precision))]))


# --- segmentation ---


def segmentation_scores(
    masks: Iterable[np.ndarray], predictions: Iterable[np.ndarray], categories: Sequence[int], least_pixels: int
) -> dict[str, float]:
    """Pixel accuracy (mean over images) and mean IoU (over classes of more than `least_pixels` true pixels).

    masks: category of each pixel [H,W], 0 = unlabeled and ignored; predictions: class of each pixel, at least [H,W], cropped to it.
    Class i+1 is categories[i]; every other category is class 0.
    """
    classes = len(categories) + 1
    as_class = np.zeros(256, np.int64)
    as_class[list(categories)] = np.arange(1, classes)
    accuracies, confusion = [], np.zeros((classes, classes), np.int64)
    for mask, prediction in zip(masks, predictions, strict=True):
        known = mask != 0
        truth, answer = as_class[mask][known], prediction[: mask.shape[0], : mask.shape[1]][known]
        accuracies.append(np.mean(truth == answer))
        confusion += np.bincount(truth * classes + answer, minlength=classes * classes).reshape(classes, classes)
    true, found, both = confusion.sum(1), confusion.sum(0), np.diag(confusion)
    large = true > least_pixels
    return {"pixel accuracy": float(np.mean(accuracies)), "mean IoU": float(np.mean(both[large] / (true + found - both)[large]))}


# --- NanoDet ---


def nanodet_boxes(levels: list[tuple[np.ndarray, np.ndarray]], side: int = 416, least: float = 0.05, iou: float = 0.6, most: int = 100) -> np.ndarray:
    """Decodes one image: per level (scores[n,80], distances[n,32]) with strides 8, 16, 32 -> [k,6] class, score, corners in 0..1."""
    scores, boxes = [], []
    for stride, (score, distance) in zip((8, 16, 32), levels, strict=True):
        cells = side // stride
        y, x = np.divmod(np.arange(cells * cells), cells)
        centre = np.stack([x, y], 1) * stride + (stride - 1) / 2
        bins = np.exp(distance.reshape(-1, 4, 8) - distance.reshape(-1, 4, 8).max(2, keepdims=True))
        reach = (bins / bins.sum(2, keepdims=True)) @ np.arange(8) * stride
        boxes.append(np.clip(np.concatenate([centre - reach[:, :2], centre + reach[:, 2:]], 1) / side, 0, 1))
        scores.append(score)
    score, box = np.concatenate(scores), np.concatenate(boxes)
    found = []
    for label in range(score.shape[1]):
        near = np.flatnonzero(score[:, label] > least)
        for k in suppress(box[near], score[near, label], iou):
            found.append([label, score[near[k], label], *box[near[k]]])
    found = np.array(found).reshape(-1, 6)
    return found[np.argsort(-found[:, 1], kind="stable")[:most]]


# --- Ultra-Light face detector ---


def face_priors(width: int, height: int) -> np.ndarray:
    """Centre x, centre y, width, height of each prior of a network with that input, relative to the image size."""
    priors = []
    for stride, sizes in ((8, (10, 16, 24)), (16, (32, 48)), (32, (64, 96)), (64, (128, 192, 256))):
        columns, rows = -(-width // stride), -(-height // stride)
        for j in range(rows):
            for i in range(columns):
                x, y = (i + 0.5) * stride / width, (j + 0.5) * stride / height
                priors += [(x, y, size / width, size / height) for size in sizes]
    return np.clip(np.array(priors), 0, 1)


def face_boxes_from_offsets(offsets: np.ndarray, width: int, height: int) -> np.ndarray:
    """The decoding that networks with postprocessing contain: offsets[n,4] to corners[n,4]."""
    priors = face_priors(width, height)
    centre = offsets[:, :2] * 0.1 * priors[:, 2:] + priors[:, :2]
    size = np.exp(offsets[:, 2:] * 0.2) * priors[:, 2:]
    return np.concatenate([centre - size / 2, centre + size / 2], 1)


def count_faces(scores: np.ndarray, boxes: np.ndarray, least: float = 0.7, iou: float = 0.4) -> int:
    """Faces in one image: scores[n,2] (background, face), boxes[n,4] corners."""
    chosen = scores[:, 1] > least
    return len(suppress(boxes[chosen], scores[chosen, 1], iou))
