"""Users' own images: one subfolder per class, or a CSV file of paths and labels, as data for calibration, scoring and training."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="images need Pillow: pip install pillow")

from support.search_case import RECIPE
from whet.errors import CalibrationError
from whet.frontends import network_from_onnx, save_onnx
from whet.network import parse_network
from whet.search import dry_run, recipe_from
from whet.search.recipe.data import load_labelled, load_unlabelled
from whet.search.recipe.image_data import list_images, pick_evenly
from whet.search.stages.finetune import read_training_set

NET = """network gray source
in %x: f32[N,1,8,8]
const %w: f32[3,64] = seed(1)
%flat: f32[N,64] = Flatten(%x)
%y: f32[N,3] = Gemm(%flat, %w, transB=1)
out %y
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """model.onnx; images/{cat,dog,owl}/*.png, 10 of each, all pixels of an image 10 * class + number; images.csv of the same, classes reversed."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    save_onnx(parse_network(NET), folder / "model.onnx")
    rows = [["path", "label"]]
    for k, name in enumerate(("cat", "dog", "owl")):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(np.full((8, 8), 10 * k + i, np.uint8)).save(folder / "images" / name / f"{i}.png")
            rows.append([f"images/{name}/{i}.png", str(2 - k)])
    with (folder / "images.csv").open("w", newline="") as f:
        csv.writer(f).writerows(rows)
    (folder / "bare.csv").write_text("".join(f"images/cat/{i}.png\n" for i in range(10)))
    return folder


def test_images_are_labelled_by_their_folders_or_by_a_file(home):
    net = network_from_onnx(home / "model.onnx")
    for source, classes in (("images", [0, 1, 2]), ("images.csv", [2, 1, 0])):
        data = load_labelled(str(home / source), net, "data.score", "scale:1/2")
        np.testing.assert_array_equal(data.inputs["x"][:, 0, 3, 5], np.arange(30, dtype=np.float32) / 2)
        np.testing.assert_array_equal(data.labels, np.repeat(classes, 10))


def test_samples_are_of_all_classes(home, tmp_path):
    """Recovery and INT8 ranges computed from one class would fit only that class."""
    net = network_from_onnx(home / "model.onnx")
    for source in ("images", "images.csv"):
        np.testing.assert_array_equal(load_unlabelled(str(home / source), net, 4)["x"][:, 0, 0, 0], [0, 10, 19, 29])
    np.savez(tmp_path / "sorted.npz", x=np.arange(30, dtype=np.float32)[:, None, None, None].repeat(8, 2).repeat(8, 3))
    np.testing.assert_array_equal(load_unlabelled(str(tmp_path / "sorted.npz"), net, 4)["x"][:, 0, 0, 0], [0, 10, 19, 29])
    assert pick_evenly([1, 2, 3], 5) == [1, 2, 3]
    assert list_images(str(tmp_path)) is None


def test_a_dry_run_takes_every_form(home):
    plain = {**RECIPE, "model": "model.onnx", "data": {"calibrate": "bare.csv", "score": "images", "judge": "images.csv", "train": "images"}}
    assert dry_run(recipe_from(plain, home))["data"] == {"calibrate": {"x": [1, 8, 8]}, "score": 30, "judge": 30, "train": 30}
    by_file = recipe_from({**plain, "data": {**plain["data"], "train": "images.csv"}}, home)
    found = read_training_set(by_file, network_from_onnx(home / "model.onnx"))
    np.testing.assert_array_equal(found.labels, np.repeat([2, 1, 0], 10))


@pytest.mark.parametrize(("rows", "text"), [
    ("images/cat/0.png,cat\n", r"the label of images/cat/0\.png is 'cat'; labels are class indices"),
    ("images/cat/0.png,0\nimages/cat/77.png,1\n", r"no such file: .*77\.png \(row 2 of 2\)"),
    ("path,label\n", "lists no files"),
    ("images/cat/0.png\n", "has images without labels"),
])  # fmt: skip
def test_invalid_files_are_refused(home, rows, text):
    (home / "wrong.csv").write_text(rows)
    with pytest.raises(CalibrationError, match=text):
        load_labelled(str(home / "wrong.csv"), network_from_onnx(home / "model.onnx"), "data.score")
