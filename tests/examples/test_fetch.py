"""examples/fetch.py on local archives: valid files are written, invalid ones refused without leaving anything."""

import hashlib
import importlib.util
import io
import sys
import tarfile
import urllib.error
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "examples" / "fetch.py"


@pytest.fixture
def fetch(monkeypatch):
    spec = importlib.util.spec_from_file_location("fetch_example", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_example", module)
    spec.loader.exec_module(module)
    return module


def packed(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def images(fetch, monkeypatch):
    files = {f"repo/{part}/{kind}/{i:04d}.jpg": f"{part}{kind}{i}".encode() for part in ("train", "test") for kind in ("cat", "ship") for i in (2, 1)}
    for part in ("train", "test"):
        each = sorted(bytes([fetch.CLASSES.index(n.split("/")[2])]) + hashlib.sha256(d).digest() for n, d in files.items() if n.split("/")[1] == part)
        monkeypatch.setitem(fetch.JPEG, part, hashlib.sha256(b"".join(each)).hexdigest())
    return files


def test_archives_become_the_files_of_the_example(fetch, monkeypatch, tmp_path):
    image = pytest.importorskip("PIL.Image")
    weights, jpegs, exact = fetch.SOURCES["cifar10"]
    monkeypatch.setattr(fetch, "WEIGHTS", hashlib.sha256(b"weights").hexdigest())
    packed(tmp_path / weights.archive, {"r/pretrained_models/resnet56-4bfd9763.th": b"weights", "r/README.md": b"no"})
    packed(tmp_path / jpegs.archive, images(fetch, monkeypatch))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1024, 3), np.uint8)
    png = io.BytesIO()
    image.fromarray(pixels).save(png, "PNG")
    labels = [0] * 50_000 + [3, 8, 8, 0] + [1] * 10
    monkeypatch.setattr(fetch, "EXACT", (hashlib.sha256(pixels.tobytes()).hexdigest(), hashlib.sha256(bytes([3, 8, 8, 0])).hexdigest()))
    files = {"batch_50.png": png.getvalue(), "labels.js": f"var labels={labels};".encode()}
    packed(tmp_path / exact.archive, {f"r/demo/cifar10/cifar10_{n}": d for n, d in files.items()})
    assert fetch.main(["cifar10", "--to", str(tmp_path / "data"), "--archives", str(tmp_path)]) == 0
    made = tmp_path / "data" / "cifar10"
    assert (made / "resnet" / "resnet56-4bfd9763.th").read_bytes() == b"weights"
    with np.load(made / "cifar10_jpeg60k.npz") as f:
        assert f["train_label"].tolist() == [3, 3, 8, 8]
        assert f["train_jpeg"].tobytes() == b"traincat1traincat2trainship1trainship2"
        assert f["test_len"].tolist() == [8, 8, 9, 9]
    with np.load(made / "cifar10_lossless.npz") as f:
        np.testing.assert_array_equal(f["x_test"], pixels.reshape(4, 32, 32, 3))
        assert f["y_test"].tolist() == [3, 8, 8, 0]


def test_invalid_archives_are_refused(fetch, tmp_path, capsys):
    weights = fetch.SOURCES["cifar10"][0]
    to = tmp_path / "data"
    assert fetch.main(["cifar10", "--to", str(to), "--archives", str(tmp_path)]) == 1
    assert weights.url in capsys.readouterr().err
    packed(tmp_path / weights.archive, {"r/pretrained_models/resnet56-4bfd9763.th": b"other"})
    assert fetch.main(["cifar10", "--to", str(to), "--archives", str(tmp_path)]) == 1
    assert "Nothing was kept" in capsys.readouterr().err
    packed(tmp_path / weights.archive, {"r/README.md": b"other"})
    with pytest.raises(fetch.FetchError, match="another repository or commit"):
        fetch.fetch(weights, to, tmp_path)
    (tmp_path / weights.archive).write_bytes(b"no archive")
    with pytest.raises(fetch.FetchError, match=r"not a readable archive \([^\n]*\): download it again$"):
        fetch.fetch(weights, to, tmp_path)
    assert not to.exists()


def test_the_error_without_internet_access_gives_a_remedy(fetch, monkeypatch, tmp_path):
    def unreachable(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(fetch.urllib.request, "urlopen", unreachable)
    to = tmp_path / "data"
    with pytest.raises(fetch.FetchError, match=r"no route to host.*--archives FOLDER"):
        fetch.fetch(fetch.SOURCES["cifar10"][0], to, None)
    assert not to.exists()


def test_the_list_names_source_commit_and_licence(fetch, capsys):
    assert fetch.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "BSD-2-Clause" in said
    assert "d5489e8" in said


def test_the_face_detector_and_its_photos(fetch, monkeypatch, tmp_path):
    (source,) = fetch.SOURCES["faces"]
    files = {"r/models/onnx/version-RFB-320.onnx": b"model", "r/imgs/1.jpg": b"one", "r/imgs/12.jpg": b"two", "r/imgs/testset.png": b"no"}
    monkeypatch.setattr(fetch, "FACES", hashlib.sha256(b"model").hexdigest())
    monkeypatch.setattr(fetch, "PHOTOS", hashlib.sha256(b"".join(sorted(hashlib.sha256(d).digest() for d in (b"one", b"two")))).hexdigest())
    packed(tmp_path / source.archive, files)
    assert fetch.main(["faces", "--to", str(tmp_path), "--archives", str(tmp_path)]) == 0
    assert (tmp_path / "face" / "version-RFB-320.onnx").read_bytes() == b"model"
    assert sorted(p.name for p in (tmp_path / "face" / "imgs").iterdir()) == ["1.jpg", "12.jpg"]
    packed(tmp_path / source.archive, files | {"r/imgs/12.jpg": b"other"})
    assert fetch.main(["faces", "--to", str(tmp_path / "again"), "--archives", str(tmp_path)]) == 1
    assert not (tmp_path / "again").exists()


def test_the_list_names_source_commit_licence_and_digests(fetch, capsys):
    assert fetch.main(["--list"]) == 0
    said = capsys.readouterr().out
    for source in (s for several in fetch.SOURCES.values() for s in several):
        assert all(text in said for text in (source.url, source.commit, source.licence, source.archive, *source.digests()))
        assert source.digests()
