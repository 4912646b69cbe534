"""Data files from strangers: arrays, images, recipes, external weights. Each is refused with an error of whet, in bounded memory and time."""

import io
import json
import os
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import onnx
import pytest
from onnx import helper

from whet.array_files import read_arrays
from whet.cli._infer import read_input_file as read_input
from whet.errors import CalibrationError, FrontendError, TrainingError, UsageError, WhetError
from whet.files import read_bounded
from whet.frontends import external_files, network_from_onnx
from whet.network import Network, parse_type
from whet.precision import Preprocessing, calibration_data
from whet.precision.data import read_image
from whet.search.recipe.data import load_labelled, load_unlabelled


def network(shape: str = "1,3,8,8") -> Network:
    net = Network("n")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type(f"f32[{shape}]"))), "y")
    return net


def header(shape, descr="<f4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


def archive(path, **members: bytes):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(f"{name}.npy", data)
    return path


def patched(path, offset_in_entry: int, value: int):
    """Changes a byte of the first member's entry in the archive's directory, and of its local header."""
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + offset_in_entry] = data[offset_in_entry - 2] = value
    path.write_bytes(bytes(data))
    return path


def bomb(path):
    """16 MiB of zeros in 16 kB."""
    return archive(path, x=header((2**24 // 768, 3, 8, 8)) + bytes(2**24))


def damaged(path):
    np.savez_compressed(path, x=np.arange(4 * 192, dtype=np.float32))
    data = bytearray(path.read_bytes())
    data[60:90] = b"\xff" * 30
    path.write_bytes(bytes(data))
    return path


def saved(path, value, save=np.save):
    save(path, value, allow_pickle=True)
    return path


def written(path, data: bytes):
    path.write_bytes(data)
    return path


deep = b"(" * 9000
ARRAYS = {
    "more than the file holds": (lambda p: written(p / "a.npy", header((2**40, 3, 8, 8))), "takes 844,424,930,131,968 bytes by its header"),
    "more than the member holds": (lambda p: archive(p / "a.npz", x=header((2**40, 3, 8, 8))), "takes 844,424,930,131,968 bytes by its header"),
    "more than 64 bits": (lambda p: archive(p / "a.npz", x=header((2**62, 2**62))), "by its header"),
    "a negative length": (lambda p: archive(p / "a.npz", x=header((-1, 3))), "negative length"),
    "Python objects": (lambda p: saved(p / "a.npy", np.array([{}], object)), "Python objects, which are never loaded"),
    "text": (lambda p: saved(p / "a.npy", np.array(["a"])), "no type of numbers"),
    "records": (lambda p: saved(p / "a.npy", np.zeros(3, [("a", "f4")])), "no type of numbers"),
    "a header of 2 GiB": (lambda p: written(p / "a.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31 - 1)), "header of 2,147,483,647 bytes"),
    "nested brackets": (lambda p: written(p / "a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(deep)) + deep), "damaged"),
    "a bomb": (lambda p: bomb(p / "a.npz"), "over 100 times as many"),
    "damaged compression": (lambda p: damaged(p / "a.npz"), "damaged"),
    "encryption": (lambda p: patched(archive(p / "a.npz", x=header((0,))), 8, 1), "encrypted"),
    "an unknown compression": (lambda p: patched(archive(p / "a.npz", x=header((0,))), 10, 99), "not supported"),
    "no archive": (lambda p: written(p / "a.npz", b"PK\x03\x04" + bytes(100)), "damaged"),
    "an empty file": (lambda p: written(p / "a.npy", b""), "damaged"),
    "a folder": (lambda p: (p / "a.npy").mkdir() or p / "a.npy", "it is a folder or a device"),
    "nothing": (lambda p: p / "a.npy", "no such file"),
}


@pytest.fixture(autouse=True)
def small_files_are_bombs(monkeypatch):
    monkeypatch.setattr("whet.array_files.ALWAYS_EXPANDED", 2**20)


@pytest.mark.parametrize("name", ARRAYS)
def test_array_files_are_refused_before_memory_is_allocated(name, tmp_path):
    make, why = ARRAYS[name]
    path = make(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(CalibrationError, match=f"data: .*a.np[yz] cannot be read as NumPy arrays: .*{why}.* Give a file of np.save"):
            read_arrays(path, CalibrationError, "data: ")
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_every_reader_of_arrays_refuses_a_bomb(tmp_path):
    training = pytest.importorskip("whet.training.data")
    path, net = bomb(tmp_path / "a.npz"), network()
    for read, error in [
        (lambda: list(calibration_data(str(path), net)), CalibrationError),
        (lambda: load_unlabelled(str(path), net, 4), CalibrationError),
        (lambda: load_labelled(str(path), net, "data.score"), CalibrationError),
        (lambda: training.read_training_data(str(path), net), TrainingError),
        (lambda: read_input(path, "x", (1, 3, 8, 8), np.dtype(np.float32)), UsageError),
    ]:
        with pytest.raises(error, match="over 100 times as many"):
            read()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "i1", "?", "<c8"])
def test_arrays_of_numbers_are_read_as_numpy_reads_them(order, dtype, tmp_path):
    a = np.asarray(np.arange(24).reshape(2, 3, 4) % 5, dtype, order=order)
    np.savez_compressed(tmp_path / "a.npz", a=a, names=np.array(["x"]), empty=a[:0], single=a[0, 0, 0])
    found = read_arrays(tmp_path / "a.npz", CalibrationError)
    assert set(found) == {"a", "empty", "single"}, "text among numbers is left out"
    with np.load(tmp_path / "a.npz") as expected:
        for name, value in found.items():
            assert (value.dtype, value.shape, value.tobytes()) == (expected[name].dtype, expected[name].shape, expected[name].tobytes())
    np.save(tmp_path / "a.npy", a)
    assert np.array_equal(read_arrays(tmp_path / "a.npy", CalibrationError), a)


def png(path, width: int, height: int, *chunks: tuple[bytes, bytes]):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", size), *chunks, (b"IDAT", zlib.compress(bytes((3 * 8 + 1) * 8))), (b"IEND", b"")]
    return written(path, b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*p) for p in parts))


IMAGES = {
    "many pixels": (lambda p: png(p, 2**16, 2**16), "pixels"),
    "just too many pixels": (lambda p: png(p, 2**13, 2**14 + 1), r"8192 x 16385 pixels, more than 134,217,728\. Remove the image"),
    "a text bomb": (lambda p: png(p, 8, 8, (b"zTXt", b"k\0\0" + zlib.compress(bytes(2**26)))), "too large.*Remove the image"),
    "no pixels": (lambda p: png(p, 0, 5), "Remove the image"),
    "PostScript": (lambda p: written(p, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot identify image file"),
    "no image": (lambda p: written(p, b"hello"), "cannot identify image file"),
    "an empty file": (lambda p: written(p, b""), "cannot identify image file"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_refused(name, tmp_path):
    pytest.importorskip("PIL")
    make, why = IMAGES[name]
    with pytest.raises(CalibrationError, match=rf"a.png cannot be decoded: .*{why}"):
        read_image(make(tmp_path / "a.png"), network(), Preprocessing())


def test_a_thin_image_is_not_scaled_without_bound(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (1, 20000)).save(tmp_path / "thin.png")
    with pytest.raises(CalibrationError, match=r"resize:256 makes 256 x 5120000 of them, more than .* lower resize:"):
        read_image(tmp_path / "thin.png", network(), Preprocessing(resize=256))


@pytest.mark.parametrize("text", ["std:0", "scale:nan", "mean:inf", "resize:-1", "resize:9999999999", "scale:1/0", "std:1/0/1"])
def test_preprocessing_without_meaning_is_refused(text):
    with pytest.raises(UsageError, match="is not a value for"):
        Preprocessing.parse(text)


def test_preprocessing_that_does_not_fit_the_images_is_refused(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    with pytest.raises(CalibrationError, match=r"mean: has 2 values, the images have 3 channels\. Give one value"):
        read_image(tmp_path / "a.png", network(), Preprocessing.parse("mean:1/2"))
    (tmp_path / "settings.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"settings\.txt cannot be read as text"):
        Preprocessing.parse(str(tmp_path / "settings.txt"))


@pytest.mark.parametrize("label", ["1" * 5000, "²", "-1", "1.5"])
def test_labels_of_a_table_are_class_indices(label, tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "list.csv").write_text(f"a.png,{label}\n")
    with pytest.raises(CalibrationError, match="labels are class indices from 0"):
        load_unlabelled(str(tmp_path / "list.csv"), network(), 3)


RECIPES = {
    "aliases": ("k0: &k0 [x, x, x]\n" + "".join(f"k{i + 1}: &k{i + 1} [*k{i}, *k{i}, *k{i}]\n" for i in range(12)), "aliases"),
    "a list as a key": ("? [[a, b], c]\n: 1\n", "a key is a list or a mapping .line 1"),
    "an integer of 20,000 digits": ("model: " + "9" * 20000, "a value cannot be read"),
    "a date that does not exist": ("model: 2026-99-99", "a value cannot be read: month must be"),
    "nesting": ("[" * 20000, "nested too deeply"),
    "itself": ("a: &a [*a]", "recursive"),
    "Python": ("a: !!python/object/apply:os.system ['true']", "python/object/apply:os.system"),
    "300 kB": ("x: '" + "a" * 300_000 + "'", "has more than 131,072 bytes|File too large"),
    "a key twice": ("model: a\nmodel: b", "'model' is given twice"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_refused(name, tmp_path):
    pytest.importorskip("yaml")
    from whet.search.recipe.recipe import load_recipe

    text, why = RECIPES[name]
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UsageError, match=rf"recipe.yaml.*({why})"):
        load_recipe(tmp_path / "recipe.yaml")


def test_an_endless_file_is_read_up_to_a_limit():
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_bounded("/dev/zero", 1000)


def test_json_files_nested_without_bound_are_no_results(tmp_path):
    from whet.search.jobs.job import read_json

    (tmp_path / "result.json").write_text("[" * 100_000)
    assert read_json(tmp_path / "result.json") is None
    (tmp_path / "result.json").write_text(json.dumps({"a": 1}))
    assert read_json(tmp_path / "result.json") == {"a": 1}


VALUES = np.arange(4, dtype=np.float32)
EXTERNAL = {
    "the parent folder": ("../secret", lambda f: None, "outside the model's folder .* copy it into that folder"),
    "an absolute path": ("{secret}", lambda f: None, "outside the model's folder"),
    "a link that leaves": ("w.bin", lambda f: os.symlink(f.parent / "secret", f / "w.bin"), "outside the model's folder"),
    "a folder's link that leaves": ("d/secret", lambda f: os.symlink(f.parent, f / "d"), "outside the model's folder"),
    "a link to a device": ("w.bin", lambda f: os.symlink("/dev/zero", f / "w.bin"), "outside the model's folder"),
    "a link to itself": ("w.bin", lambda f: os.symlink("w.bin", f / "w.bin"), "damaged: Symlink loop|cannot read"),
    "a pipe": ("w.bin", lambda f: os.mkfifo(f / "w.bin"), "which is not a file"),
    "a folder": ("d", lambda f: (f / "d").mkdir(), "which is not a file"),
    "nothing": ("", lambda f: None, "outside the model's folder"),
    "a zero byte": ("a\0b", lambda f: None, "damaged"),
    "5000 letters": ("a" * 5000, lambda f: None, "cannot read"),
}


def external(folder, location: str, **keys: str):
    folder.mkdir()
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=1)
    for key, value in {"location": location, **keys}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    x, y = (helper.make_tensor_value_info(n, 1, [4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return written(folder / "m.onnx", model.SerializeToString())


@pytest.mark.parametrize("name", EXTERNAL)
def test_external_weights_stay_in_the_models_folder(name, tmp_path):
    location, make, why = EXTERNAL[name]
    written(tmp_path / "secret", VALUES.tobytes())
    model = external(tmp_path / "m", location.format(secret=tmp_path / "secret"))
    make(model.parent)
    with pytest.raises(FrontendError, match=why) as refused:
        network_from_onnx(model)
    assert len(str(refused.value)) < 1500
    assert external_files(model) == [], "a search would copy these files to its workers"


@pytest.mark.parametrize("keys", [{"offset": "-5"}, {"offset": "9" * 400}, {"offset": "9" * 40000}, {"length": "9" * 15}, {"offset": "abc"}])
def test_external_weights_at_impossible_positions(keys, tmp_path):
    model = external(tmp_path / "m", "w.bin", **keys)
    written(model.parent / "w.bin", VALUES.tobytes())
    with pytest.raises(FrontendError) as refused:
        network_from_onnx(model)
    assert len(str(refused.value)) < 1500


def test_external_weights_of_the_models_folder_are_read(tmp_path):
    model = external(tmp_path / "m", "d/w.bin")
    (model.parent / "d").mkdir()
    written(model.parent / "values", VALUES.tobytes())
    os.symlink("../values", model.parent / "d" / "w.bin")  # a link within the folder
    assert network_from_onnx(model).constants["w"].array().tolist() == VALUES.tolist()
    assert external_files(model) == [model.parent / "d" / "w.bin"]
    with pytest.raises(WhetError, match="came from memory"):
        network_from_onnx(model.read_bytes())
