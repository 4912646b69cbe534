"""The zoo writes the published architectures: counts, names, determinism, and outputs equal to ONNX Runtime's."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from support.selection import with_long_variants, with_slow_names
from whet import zoo
from whet.errors import UsageError
from whet.frontends import network_from_onnx
from whet.ops import run_network
from whet.zoo.layers import conv
from whet.zoo.registry import find_entry, register
from whet.zoo.writer import GraphWriter

PUBLISHED = {                         # trainable parameters as torchvision, transformers and Ultralytics print them
    "bert_base": 109_482_240, "convnext_tiny": 28_589_128, "densenet121": 7_978_856, "efficientnet_b0": 5_288_548, "lenet5": 61_706,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032, "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032,
    "resnet101": 44_549_160, "resnext50_32x4d": 25_028_904, "squeezenet1_1": 1_235_496, "swin_t": 28_288_354, "unet": 31_037_698,
    "vgg16": 138_357_544, "vit_b_16": 86_567_656,
    "yolov5s": 7_235_389}
GMACS = {"convnext_tiny": 4.46, "swin_t": 4.49, "densenet121": 2.83, "efficientnet_b0": 0.39, "mobilenet_v2": 0.30,
         "mobilenet_v3_large": 0.22, "resnet18": 1.81,
         "resnet34": 3.66, "resnet50": 4.09, "resnet101": 7.80, "resnext50_32x4d": 4.23, "squeezenet1_1": 0.35, "vgg16": 15.47, "vit_b_16": 17.56,
         "yolov5s": 8.2}
LARGE = {"bert_base", "convnext_tiny", "resnet34", "resnet101", "resnext50_32x4d", "swin_t", "unet", "vgg16", "vit_b_16", "yolov5s"}
NARROW = {"hidden": 96, "heads": 4}  # a BERT for tests of the graph only
ALL = with_slow_names(sorted(PUBLISHED), LARGE)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def feeds_of(name: str, batch: int, sequence: int = 12, image: int | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    feeds = {}
    for input_name, (dtype, shape) in zoo.info(name).inputs.items():
        if dtype == "int64":
            feeds[input_name] = rng.integers(0, 30_000 if input_name == "input_ids" else 2, (batch, sequence))
        else:
            sizes = [batch, *shape[1:]] if image is None else [batch, shape[1], image, image]
            feeds[input_name] = rng.random(sizes, np.float32) if name == "yolov5s" else rng.standard_normal(sizes, np.float32)
    if "attention_mask" in feeds:
        feeds["attention_mask"] = np.ones((batch, sequence), np.int64)
        feeds["attention_mask"][0, sequence // 2:] = 0
    return feeds


def nodes(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def test_names_are_the_published_networks():
    assert zoo.names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_and_macs_are_the_published_ones(name):
    info = zoo.info(name)
    assert info.parameters == PUBLISHED[name] == find_entry(name).parameters
    if name in GMACS:
        assert info.macs / 1e9 == pytest.approx(GMACS[name], abs=0.05 if GMACS[name] > 1 else 0.006)
    assert info.gflops == 2 * info.macs / 1e9
    assert "\n" not in info.about
    assert info.family in {p.stem for p in (Path(zoo.__file__).parent / "families").glob("*.py")}


def test_yolov5s_folds_to_the_other_published_count():
    model = zoo.build("yolov5s", batch=1)
    dims = {w.name: w.dims for w in model.graph.initializer}
    channels = sum(dims[n.input[1]][0] for n in model.graph.node if n.op_type == "BatchNormalization")
    assert zoo.info("yolov5s").parameters - channels == 7_225_885       # gamma and beta go, a bias comes


@pytest.mark.parametrize("name", ALL)
def test_a_model_is_valid_finite_and_depends_on_its_input(name):
    model = zoo.build(name)
    onnx.checker.check_model(model, full_check=True)
    counted = sum(int(np.prod(w.dims)) for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT)
    statistics = sum(2 * int(np.prod(w.dims)) for w in model.graph.initializer if w.name.endswith("running_mean"))
    assert counted - statistics == PUBLISHED[name]
    feeds = feeds_of(name, 2)
    info = zoo.info(name)
    for output, (_, shape) in zip(run(model, feeds), info.outputs.values(), strict=True):
        assert output.shape == tuple(2 if d == "N" else 12 if d == "sequence" else d for d in shape)
        assert np.isfinite(output).all()
        assert np.abs(output).max() < (3000 if name == "yolov5s" else 100)
        assert output.std() > 0.05
        least = 0.003 if name == "yolov5s" else 0.01  # its coordinates mostly come from the grid
        assert (output[0] - output[1]).std() > least * output.std()


SMALL = {  # the same layers at a size that the NumPy reference runs quickly
    "bert_base": {"layers": 1, **NARROW}, "convnext_tiny": {"image": 32, "blocks": (1, 1, 2, 1)},
    "swin_t": {"image": 64, "window": 2, "blocks": (1, 1, 2, 1), "hidden": 24},
    "unet": {"image": 32, "width": 16}, "vit_b_16": {"layers": 1, "image": 32, "hidden": 96, "heads": 4}, "yolov5s": {"image": 64}, "lenet5": {},
    "vgg16": {"image": 64, "width": 16, "hidden": 128}, "resnet101": {"image": 64, "width": 16},
    "resnext50_32x4d": {"image": 32, "width": 32}}


@pytest.mark.parametrize("name", with_slow_names(sorted(PUBLISHED), {"resnet34", "resnet50"}))
def test_whet_equals_onnx_runtime(name):
    model = zoo.build(name, **SMALL.get(name, {"image": 64}))
    image = SMALL.get(name, {"image": 64}).get("image")
    feeds = feeds_of(name, 2, image=image)
    got = run_network(network_from_onnx(model), feeds)
    for output, expected in zip(got.values(), run(model, feeds), strict=True):
        assert np.abs(output - expected).max() <= 1e-4 * max(np.abs(expected).max(), 1.0)


def test_swin_masks_shifted_windows():
    """Pixels from opposite edges share a window after the shift: the mask must prevent attention between them."""
    options = {"image": 64, "window": 2, "blocks": (2, 1, 1, 1), "heads": (1, 1, 1, 1), "hidden": 32}
    net = network_from_onnx(zoo.build("swin_t", **options))
    second = next(t for t in net.tensors() if t.name == "/features/features.1/features.1.1/Add_output_0")
    net.mark_output(second)
    x = np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32)
    other = x.copy()
    other[:, :, :4] += 1.0  # the first row of patches
    a, b = (run_network(net, {"input": v})[second.name] for v in (x, other))
    moved = np.abs(a - b).max((0, 2, 3)) > 1e-4  # per row of patches, 16 in total
    assert moved[0]
    assert moved[1]
    assert moved[2], "the shifted windows cross the edges of the first ones"
    assert not moved[3:].any()


@pytest.mark.parametrize("name", ["resnet18", "yolov5s", "vit_b_16", "bert_base"])
def test_a_fixed_batch_gives_the_same_results_without_shape_arithmetic(name):
    options = {"yolov5s": {"image": 64}, "vit_b_16": {"image": 32, "layers": 2}, "bert_base": {"layers": 2, **NARROW}}
    small = options.get(name, {"image": 64})
    fixed = zoo.build(name, batch=3, **small, **({"sequence": 12} if name == "bert_base" else {}))
    dynamic = zoo.build(name, batch="batch", **small)
    assert "Shape" not in nodes(fixed)
    assert ("Shape" in nodes(dynamic)) == (name != "resnet18")
    assert {d.dim_param for i in dynamic.graph.input for d in i.type.tensor_type.shape.dim} - {""} <= {"batch", "sequence"}
    feeds = feeds_of(name, 3, image=small.get("image"))
    for a, b in zip(run(fixed, feeds), run(dynamic, feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # ONNX Runtime fuses more if shapes are known


@pytest.mark.parametrize("opset", with_long_variants([13, 14, 17, 22, 18, 21]))
@pytest.mark.parametrize(("name", "options"), [("resnet18", {"image": 64, "width": 16}), ("mobilenet_v3_large", {"image": 64}),
                                               ("yolov5s", {"image": 64}), ("bert_base", {"layers": 1, **NARROW}),
                                               ("vit_b_16", {"layers": 1, "image": 32})])
def test_every_opset_is_valid_and_means_the_same(name, options, opset):
    feeds = feeds_of(name, 1, image=options.get("image"))
    model = zoo.build(name, opset=opset, **options)
    assert model.opset_import[0].version == opset
    onnx.checker.check_model(model, full_check=True)
    for got, expected in zip(run(model, feeds), outputs_of_the_default_opset(name, *options.items()), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@cache
def outputs_of_the_default_opset(name, *options):
    return run(zoo.build(name, **dict(options)), feeds_of(name, 1, image=dict(options).get("image")))


def test_layer_norm_can_be_decomposed():
    whole = zoo.build("bert_base", layers=1, **NARROW)
    parts = zoo.build("bert_base", layers=1, **NARROW, decomposed_layer_norm=True)
    assert nodes(whole).count("LayerNormalization") == 3
    assert "LayerNormalization" not in nodes(parts)
    feeds = feeds_of("bert_base", 2)
    for a, b in zip(run(whole, feeds), run(parts, feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_bert_ignores_masked_tokens():
    model, feeds = zoo.build("bert_base", layers=2, **NARROW), feeds_of("bert_base", 2)
    changed = dict(feeds, input_ids=feeds["input_ids"].copy())
    changed["input_ids"][0, 6:] = 5  # masked positions
    a, b = run(model, feeds)[0], run(model, changed)[0]
    np.testing.assert_array_equal(a[0, :6], b[0, :6])
    changed["input_ids"][0, 2] = 5
    assert np.abs(a[0, :2] - run(model, changed)[0][0, :2]).max() > 1e-3


def test_bert_with_a_classifier():
    model = zoo.build("bert_base", layers=1, **NARROW, classes=2)
    assert [o.name for o in model.graph.output] == ["logits"]
    assert run(model, feeds_of("bert_base", 2))[0].shape == (2, 2)
    assert "bert.embeddings.word_embeddings.weight" in {w.name for w in model.graph.initializer}


def test_yolo_boxes_are_in_the_image_and_scores_in_0_to_1():
    found = run(zoo.build("yolov5s", image=128), feeds_of("yolov5s", 1, image=128))[0][0]
    assert found.shape == (3 * (16 * 16 + 8 * 8 + 4 * 4), 85)
    assert ((found[:, :2] >= -16) & (found[:, :2] <= 128 + 16)).all()
    assert ((found[:, 4:] >= 0) & (found[:, 4:] <= 1)).all()
    cells = found[:3 * 256].reshape(3, 16, 16, 85)
    np.testing.assert_allclose(cells[..., 0].mean((0, 1)), np.arange(16) * 8 + 4, atol=8)  # x increases along a row
    np.testing.assert_allclose(cells[..., 1].mean((0, 2)), np.arange(16) * 8 + 4, atol=8)


def test_names_are_the_exporters():
    model = zoo.build("resnet18")
    by_name = {n.name: n for n in model.graph.node}
    conv = by_name["/layer2/layer2.0/downsample/downsample.0/Conv"]
    assert conv.input[1] == "layer2.0.downsample.0.weight"
    assert by_name["/layer1/layer1.0/relu/Relu_1"].input[0] == "/layer1/layer1.0/Add_output_0"
    assert by_name["/fc/Gemm"].output[0] == "output"
    assert nodes(model).count("BatchNormalization") == 20
    yolo = {n.name: n for n in zoo.build("yolov5s").graph.node}
    assert yolo["/model.2/m/m.0/cv1/conv/Conv"].input[1] == "model.2.m.0.cv1.conv.weight"
    assert yolo["/model.0/act/Mul"].input[1] == "/model.0/act/Sigmoid_output_0"
    assert "/encoder/layer.11/attention/self/query/MatMul" in {n.name for n in zoo.build("bert_base", **NARROW).graph.node}


def test_a_seed_defines_the_weights_independent_of_batch_and_opset():
    def weights(**how):
        return {w.name: w.raw_data for w in zoo.build("squeezenet1_1", **how).graph.initializer}

    base = weights()
    assert zoo.build("squeezenet1_1").SerializeToString() == zoo.build("squeezenet1_1").SerializeToString()
    assert base == weights(batch=4, opset=18)
    assert all(base[name] != raw for name, raw in weights(seed=1).items())


def test_save_writes_the_file_that_was_asked_for(tmp_path):
    path = zoo.save("resnet18", tmp_path / "resnet18-v1-7.onnx")
    assert path.name == "resnet18-v1-7.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    assert path.stat().st_size < 50e6
    with pytest.raises(UsageError, match="no folder"):
        zoo.save("lenet5", tmp_path / "missing" / "x.onnx")


def test_large_weights_are_stored_in_a_separate_file(tmp_path):
    whole = zoo.save("lenet5", tmp_path / "whole.onnx")
    for _ in range(2):  # a second save must not append
        split = zoo.save("lenet5", tmp_path / "split.onnx", external_above=100_000)
    assert split.stat().st_size < 20_000
    assert (tmp_path / "split.onnx.data").stat().st_size < 300_000
    a, b = onnx.load(whole), onnx.load(split)
    assert [w.raw_data for w in a.graph.initializer] == [w.raw_data for w in b.graph.initializer]


@pytest.mark.parametrize(("call", "text"), [
    (lambda: zoo.build("resnet-18"), "Did you mean 'resnet18'"),
    (lambda: zoo.info("zzz"), "It has bert_base"),
    (lambda: zoo.build("lenet5", batch=0), "at least one element"),
    (lambda: zoo.build("lenet5", opset=11), "opsets 13 to"),
    (lambda: zoo.build("lenet5", classes=3), "num_classes=10"),
    (lambda: zoo.build("resnet18", groups=3), "no option 'groups'"),
])
def test_mistakes_are_explained(call, text):
    with pytest.raises(UsageError, match=text):
        call()


def test_a_writer_accepts_trained_values():
    values = {"stem.weight": np.arange(4 * 3 * 9, dtype=np.float32).reshape(4, 3, 3, 3)}
    g = GraphWriter(batch=1, opset=17, values=values)
    g.output(conv(g, g.input("x", (1, 3, 8, 8)), "stem", 3, 4, 3), "y", (1, 4, 6, 6))
    weight, = g.model("m").graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(weight), values["stem.weight"])
    with pytest.raises(ValueError, match=r"no 'head\.weight'"):
        conv(g, "y", "head", 4, 4, 3)
    with pytest.raises(ValueError, match="written twice"):
        conv(g, "y", "stem", 3, 4, 3)
    other = GraphWriter(batch=1, opset=17, values=values)
    with pytest.raises(ValueError, match="has shape"):
        conv(other, "x", "stem", 3, 5, 3)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match=r"families/lenet\.py"):
        register("lenet5", find_entry("lenet5").builder, about="", parameters=0)


def test_importing_and_listing_names_is_light():
    code = "import sys; from whet import zoo; zoo.names(); print([m for m in ('onnx', 'torch', 'onnxruntime') if m in sys.modules])"
    source = Path(zoo.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(source)})
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("batch", ["-1", "a b", ""])
def test_a_batch_is_a_number_or_a_name(batch):
    with pytest.raises(UsageError, match="neither a positive number nor a name"):
        zoo.build("lenet5", batch=batch)
