"""The trained models of the shared data folder, each with its real inputs and its expected scores.

    for model in models():
        outputs = [predict(feeds) for feeds in model.inputs(limit=20)]     # feeds: name -> array, one sample
        model.score(outputs, limit=20)                                     # outputs: name -> array; metric -> value

    evaluate(model, predict, batch=8) does both and stacks samples if the model's batch is dynamic.

A metric's `stated` value is that of the data folder's README; `tolerance` covers its rounding and one unstated detail (the detector's
box limits). vit_mnist needs mean 0.1307 and deviation 0.3081 subtracted and divided, which gives the stated 97.21 %; with x/255 only
it scores 78.4 %.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support import datasets as data
from support import detection

Feeds = dict[str, np.ndarray]
Outputs = Mapping[str, np.ndarray]
Predict = Callable[[Feeds], Outputs]

# PASCAL VOC's classes 1..20 as COCO's category numbers
VOC_AS_COCO = (5, 2, 16, 9, 44, 6, 3, 17, 62, 21, 67, 18, 19, 4, 1, 64, 20, 63, 7, 72)


@dataclass(frozen=True)
class Metric:
    """A score that the model reaches on all its samples."""

    name: str
    stated: float
    tolerance: float  # absolute


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """One trained model. inputs(limit) yields samples (batch 1); score(outputs, limit) evaluates their outputs in that order."""

    name: str
    file: str  # within the data folder
    samples: int  # number of samples
    inputs: Callable[..., Iterator[Feeds]]
    metrics: tuple[Metric, ...] = ()  # empty for feature extractors, which have no score
    score: Callable[..., dict[str, float]] | None = None
    dynamic_batch: bool = True

    @property
    def path(self) -> Path:
        """The ONNX file."""
        return data.path_of(self.file)


def models(names: Sequence[str] | None = None) -> list[RealModel]:
    """All models, or those named, in a fixed order. KeyError for an unknown name. Reads no data."""
    known = {m.name: m for m in _all()}
    return list(known.values()) if names is None else [known[n] for n in names]


def evaluate(model: RealModel, predict: Predict, *, limit: int | None = None, batch: int = 1) -> dict[str, float]:
    """The model's metrics with the outputs of `predict`, on `limit` samples spread evenly over the set (default: all)."""
    if model.score is None:
        raise ValueError(f"{model.name} gives features: there is nothing to score")
    return model.score(list(run(model, predict, limit=limit, batch=batch)), limit)


def run(model: RealModel, predict: Predict, *, limit: int | None = None, batch: int = 1) -> Iterator[Outputs]:
    """The outputs of each sample. `batch` samples are stacked if the model's batch permits it; the last batch may be smaller."""
    size = batch if model.dynamic_batch else 1
    waiting: list[Feeds] = []
    for feeds in model.inputs(limit):
        waiting.append(feeds)
        if len(waiting) == size:
            yield from _run_together(waiting, predict)
            waiting = []
    if waiting:
        yield from _run_together(waiting, predict)


def _run_together(waiting: list[Feeds], predict: Predict) -> Iterator[Outputs]:
    outputs = predict({k: np.concatenate([f[k] for f in waiting]) for k in waiting[0]})
    for i in range(len(waiting)):
        yield {k: v[i : i + 1] for k, v in outputs.items()}


def onnxruntime_predict(path: Path, threads: int = 1) -> Predict:
    """ONNX Runtime as a predict function, the common reference."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # it warns once per weight that is listed as graph input
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


# --- the models ---


def _all() -> list[RealModel]:
    found = [
        _classifier("resnet20_cifar10", "cifar10/resnet20_cifar10.onnx", "x", "logits", _cifar_norm, 1000, 91.5),
        _classifier("resnet56_cifar10", "cifar10/resnet56_cifar10.onnx", "x", "logits", _cifar_norm, 1000, 92.6),
        _classifier("resnet8_mlperftiny", "cifar10/resnet8_mlperftiny.onnx", "input", "probs", _cifar_raw, 1000, 88.1),
        _classifier("lenet_mnist", "mnist/lenet_mnist.onnx", "x", "logits", _mnist, 10000, 98.95),
        _classifier("vit_mnist", "mnist/vit_mnist.onnx", "x", "logits", _mnist_norm, 10000, 97.21),
        _classifier("squeezenet1.1", "imagenet_sample/squeezenet1.1.onnx", "data", "logits", _imagenet, 1000, 62.5, 83.0),
        RealModel(
            name="squeezenet1.1_reference",
            file="imagenet_sample/squeezenet1.1.onnx",
            samples=1,
            inputs=_reference_inputs,
            metrics=(Metric("max difference to reference", 1.1e-4, 1e-4),),
            score=_reference_score,
        ),
        _nanodet(),
        _deeplab(),
        _vww(),
        _face("version-RFB-320", 320, 240, 604),
        _face("version-RFB-640", 640, 480, 725),
        _face("version-slim-320", 320, 240, 557),
        _face("version-RFB-320_without_postprocessing", 320, 240, 604),
        RealModel(name="mobilenetv2_backbone", file="imagenet_sample/mobilenetv2_backbone.onnx", samples=1000, inputs=_imagenet_as("input")),
        RealModel(name="resnet50v2_stages1-3", file="imagenet_sample/resnet50v2_stages1-3.onnx", samples=1000, inputs=_imagenet_as("data")),
    ]
    return found


Labelled = Callable[[int | None], tuple[np.ndarray, np.ndarray]]


def _classifier(name: str, file: str, into: str, out: str, load: Labelled, samples: int, top1: float, top5: float | None = None) -> RealModel:
    def inputs(limit: int | None = None) -> Iterator[Feeds]:
        for x in load(limit)[0]:
            yield {into: np.ascontiguousarray(x[None])}

    def score(outputs: Sequence[Outputs], limit: int | None = None) -> dict[str, float]:
        labels = load(limit)[1]
        ranks = np.stack([np.argsort(-o[out].ravel(), kind="stable")[:5] for o in outputs])
        hits = ranks == labels[:, None]
        found = {"top-1 %": 100 * float(hits[:, 0].mean()), "top-5 %": 100 * float(hits.any(1).mean())}
        return {m.name: found[m.name] for m in metrics}

    metrics = (Metric("top-1 %", top1, 0.051),) + (() if top5 is None else (Metric("top-5 %", top5, 0.051),))
    return RealModel(name=name, file=file, samples=samples, inputs=inputs, metrics=metrics, score=score)


def _cifar_raw(limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    x, y = data.cifar10_lossless()
    chosen = data.spread(len(x), limit)
    return x[chosen].astype(np.float32).transpose(0, 3, 1, 2), y[chosen]


def _cifar_norm(limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    x, y = data.cifar10_lossless()
    chosen = data.spread(len(x), limit)
    return data.imagenet_norm(x[chosen]), y[chosen]


def _mnist(limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    x, y = data.mnist_test()
    chosen = data.spread(len(x), limit)
    return x[chosen], y[chosen]


def _mnist_norm(limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    x, y = _mnist(limit)
    return (x - np.float32(0.1307)) / np.float32(0.3081), y


def _imagenet(limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    x, y = data.imagenet_sample(limit)
    return data.imagenet_norm(x), y


def _imagenet_as(into: str) -> Callable[..., Iterator[Feeds]]:
    def inputs(limit: int | None = None) -> Iterator[Feeds]:
        for image in data.imagenet_sample(limit)[0]:
            yield {into: np.ascontiguousarray(data.imagenet_norm(image)[None])}

    return inputs


def _reference_inputs(limit: int | None = None) -> Iterator[Feeds]:
    with np.load(data.path_of("imagenet_sample/squeezenet1.1_ref_io.npz")) as f:
        yield {"data": f["data"].astype(np.float32)}


def _reference_score(outputs: Sequence[Outputs], limit: int | None = None) -> dict[str, float]:
    with np.load(data.path_of("imagenet_sample/squeezenet1.1_ref_io.npz")) as f:
        return {"max difference to reference": float(np.abs(outputs[0]["logits"].ravel() - f["logits"].ravel()).max())}


def _vww() -> RealModel:
    def names(limit: int | None) -> list[str]:
        return [data.coco_names()[i] for i in data.spread(128, limit)]

    def inputs(limit: int | None = None) -> Iterator[Feeds]:
        for name in names(limit):
            pixels = data.coco_image(name, (96, 96)).astype(np.float32) / 255
            yield {"input": np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])}

    def score(outputs: Sequence[Outputs], limit: int | None = None) -> dict[str, float]:
        right = []
        for name, out in zip(names(limit), outputs, strict=True):
            boxes = data.coco_boxes(name)
            person = ((boxes[:, 0] == 0) & (boxes[:, 3] * boxes[:, 4] > 0.005)).any()
            right.append(bool(out["probs"].argmax() == 1) == person)
        return {"person/no person %": 100 * float(np.mean(right))}

    return RealModel(
        name="vww_mobilenet025_96",
        file="coco_val128/vww_mobilenet025_96.onnx",
        samples=128,
        inputs=inputs,
        metrics=(Metric("person/no person %", 86.7, 0.051),),
        score=score,
    )


def _nanodet() -> RealModel:
    levels = (("792", "795"), ("814", "817"), ("836", "839"))
    mean, std = np.float32([103.53, 116.28, 123.675]), np.float32([57.375, 57.12, 58.395])

    def names(limit: int | None) -> list[str]:
        return [data.coco_names()[i] for i in data.spread(128, limit)]

    def inputs(limit: int | None = None) -> Iterator[Feeds]:
        for name in names(limit):
            bgr = data.coco_image(name, (416, 416))[:, :, ::-1].astype(np.float32)
            yield {"input.1": np.ascontiguousarray(((bgr - mean) / std).transpose(2, 0, 1)[None])}

    def score(outputs: Sequence[Outputs], limit: int | None = None) -> dict[str, float]:
        truth = []
        for name in names(limit):
            b = data.coco_boxes(name)
            truth.append(np.concatenate([b[:, :1], b[:, 1:3] - b[:, 3:] / 2, b[:, 1:3] + b[:, 3:] / 2], 1))
        found = [detection.nanodet_boxes([(o[s][0], o[d][0]) for s, d in levels]) for o in outputs]
        return {"AP50": detection.average_precision(found, truth)}

    return RealModel(
        name="nanodet_m",
        file="coco_val128/nanodet_m.onnx",
        samples=128,
        inputs=inputs,
        metrics=(Metric("AP50", 0.413, 0.01),),
        score=score,
        dynamic_batch=False,
    )


def _deeplab() -> RealModel:
    def names(limit: int | None) -> list[str]:
        return [data.coco_masked_names()[i] for i in data.spread(100, limit)]

    def inputs(limit: int | None = None) -> Iterator[Feeds]:
        for name in names(limit):
            pixels = data.coco_image(name)
            canvas = np.full((513, 513, 3), 127.5, np.float32)
            canvas[: pixels.shape[0], : pixels.shape[1]] = pixels
            yield {"image": np.ascontiguousarray((canvas / 127.5 - 1).transpose(2, 0, 1)[None])}

    def score(outputs: Sequence[Outputs], limit: int | None = None) -> dict[str, float]:
        return detection.segmentation_scores(
            (data.coco_mask(name, data.coco_image(name).shape[1::-1]) for name in names(limit)),
            (out["logits"][0].argmax(0) for out in outputs),
            VOC_AS_COCO,
            least_pixels=20_000 * len(outputs) // 100,
        )

    return RealModel(
        name="deeplabv3_mnv2_voc",
        file="coco_val128/deeplabv3_mnv2_voc.onnx",
        samples=100,
        inputs=inputs,
        metrics=(Metric("pixel accuracy", 0.885, 0.001), Metric("mean IoU", 0.67, 0.005)),
        score=score,
        dynamic_batch=False,
    )


def _face(name: str, width: int, height: int, stated: float) -> RealModel:
    def inputs(limit: int | None = None) -> Iterator[Feeds]:
        for image in data.face_images(width, height, limit):
            yield {"input": image}

    def score(outputs: Sequence[Outputs], limit: int | None = None) -> dict[str, float]:
        faces = 0
        for out in outputs:
            boxes = out["boxes"][0]
            if name.endswith("without_postprocessing"):
                boxes = detection.face_boxes_from_offsets(boxes, width, height)
            faces += detection.count_faces(out["scores"][0], boxes)
        return {"faces found": float(faces)}

    return RealModel(
        name=name, file=f"face/{name}.onnx", samples=24, inputs=inputs, metrics=(Metric("faces found", stated, 0),), score=score, dynamic_batch=False
    )
