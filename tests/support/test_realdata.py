"""The real models reach the scores of their README with ONNX Runtime, so that a miss elsewhere is not an error of the evaluation."""

import numpy as np
import pytest

from support import datasets, detection, realdata

MODELS = realdata.models()
SCORED = [m for m in MODELS if m.metrics]
SECONDS = {  # all samples of these take longer
    "resnet20_cifar10", "resnet56_cifar10", "squeezenet1.1", "deeplabv3_mnv2_voc", "vit_mnist", "nanodet_m", "version-RFB-640",
}  # fmt: skip
needs_data = [pytest.mark.data, pytest.mark.skipif(datasets.root() is None, reason="no shared data folder")]


def parameters(models, slow):
    return [pytest.param(m, id=m.name, marks=[*needs_data, *([pytest.mark.slow] if m.name in slow else [])]) for m in models]


@pytest.mark.parametrize("model", parameters(SCORED, SECONDS))
def test_all_samples_reach_the_stated_scores(model):
    found = realdata.evaluate(model, realdata.onnxruntime_predict(model.path), batch=50)
    assert found.keys() == {m.name for m in model.metrics}
    for metric in model.metrics:
        assert found[metric.name] == pytest.approx(metric.stated, abs=metric.tolerance), metric.name


@pytest.mark.parametrize(
    ("name", "limit", "least"),
    [
        pytest.param(name, limit, least, marks=needs_data, id=name)
        for name, limit, least in [
            ("squeezenet1.1", 60, {"top-1 %": 50, "top-5 %": 70}),
            ("resnet56_cifar10", 200, {"top-1 %": 89}),
            ("vit_mnist", 200, {"top-1 %": 94}),
            ("nanodet_m", 12, {"AP50": 0.3}),
            ("deeplabv3_mnv2_voc", 6, {"pixel accuracy": 0.75, "mean IoU": 0.4}),
        ]
    ],
)
def test_a_subset_for_slow_models(name, limit, least):
    (model,) = realdata.models([name])
    found = realdata.evaluate(model, realdata.onnxruntime_predict(model.path), limit=limit)
    assert all(found[metric] >= value for metric, value in least.items()), found


@pytest.mark.parametrize("model", parameters(MODELS, ()))
def test_inputs_fit_the_model_and_outputs_react_to_them(model):
    predict = realdata.onnxruntime_predict(model.path)
    feeds = list(model.inputs(limit=2))
    assert len(feeds) == min(2, model.samples)
    outputs = [predict(f) for f in feeds]
    assert all(np.isfinite(v).all() for o in outputs for v in o.values())
    if len(outputs) == 2:
        assert all(np.abs(outputs[0][k] - outputs[1][k]).max() > 1e-3 for k in outputs[0])


@pytest.mark.parametrize("model", parameters([m for m in SCORED if m.samples > 1], ()))
def test_a_model_that_ignores_its_input_scores_badly(model):
    predict = realdata.onnxruntime_predict(model.path)
    first = {k: v[:1] for k, v in predict(next(model.inputs(limit=2))).items()}
    limit = 40 if model.dynamic_batch else 10

    def deaf(feeds):
        n = len(next(iter(feeds.values())))
        return {k: np.repeat(v * 0, n, axis=0) for k, v in first.items()}

    found = realdata.evaluate(model, deaf, limit=limit, batch=8)
    main = model.metrics[0]
    assert abs(found[main.name] - main.stated) > 0.1 * main.stated


@pytest.mark.data
@pytest.mark.skipif(datasets.root() is None, reason="no shared data folder")
def test_batches_are_stacked_and_split_in_order():
    (model,) = realdata.models(["resnet8_mlperftiny"])
    predict = realdata.onnxruntime_predict(model.path)
    sizes = []

    def counting(feeds):
        sizes.append(len(feeds["input"]))
        return predict(feeds)

    together = [o["probs"] for o in realdata.run(model, counting, limit=10, batch=4)]
    single = [o["probs"] for o in realdata.run(model, predict, limit=10)]
    assert sizes == [4, 4, 2]
    np.testing.assert_allclose(np.concatenate(together), np.concatenate(single), rtol=1e-5, atol=1e-6)


def test_an_unknown_model_is_refused():
    with pytest.raises(KeyError):
        realdata.models(["resnet20"])


# --- the evaluation ---


def test_overlap_of_known_boxes():
    boxes = np.array([[0, 0, 2, 2], [1, 1, 3, 3], [5, 5, 6, 6.0]])
    np.testing.assert_allclose(detection.overlap(boxes[0], boxes), [1, 1 / 7, 0])
    assert detection.suppress(boxes, np.array([0.5, 0.9, 0.1]), 0.1) == [1, 2]
    assert detection.suppress(boxes, np.array([0.5, 0.9, 0.1]), 0.2) == [1, 0, 2]


def test_average_precision_of_known_rankings():
    truth = [np.array([[0, 0, 0, 1, 1], [0, 2, 2, 3, 3.0]])]
    right, wrong = [0, 0.9, 0, 0, 1, 1], [0, 0.8, 7, 7, 8, 8]
    late = [0, 0.7, 2, 2, 3, 3]
    assert detection.average_precision([np.array([right, late])], truth) == 1
    assert detection.average_precision([np.array([right])], truth) == pytest.approx(51 / 101)
    assert detection.average_precision([np.array([right, wrong, late])], truth) == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert detection.average_precision([np.array([right, right])], truth) == pytest.approx(51 / 101)  # a box is counted once
    assert detection.average_precision([np.zeros((0, 6))], truth) == 0


def test_segmentation_scores_of_known_masks():
    mask = np.array([[0, 5, 5, 9]], np.uint8)  # unlabeled, class 1, class 1, none of the classes
    found = detection.segmentation_scores([mask], [np.array([[1, 1, 0, 0, 7]])], [5], least_pixels=0)
    assert found["pixel accuracy"] == pytest.approx(2 / 3)
    assert found["mean IoU"] == pytest.approx(0.5)  # class 0: 1 of 2, class 1: 1 of 2
    only_one = detection.segmentation_scores([mask], [np.array([[1, 1, 1, 1]])], [5], least_pixels=1)
    assert only_one["mean IoU"] == pytest.approx(2 / 3)  # class 0 has only one pixel
