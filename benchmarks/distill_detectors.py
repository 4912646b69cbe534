"""Cut detectors distilled from the uncut ones on unlabelled photos: reads and writes networks of pruned_detectors.py's folder.

    python benchmarks/distill_detectors.py --pack photos.npz [--more DIR]         # with the shared data folder: even photos, as WebP
    python benchmarks/distill_detectors.py --photos photos.npz --models DIR --cuts DIR --out DIR [--seconds 60]      # with a GPU

The evaluation photos (the odd ones of COCO and of the face photos) are not among them. `--more` adds the photos of a folder's subfolders
`scenes`, `crowds` and `objects`, without those that resemble an evaluation photo or one that was added before (difference hash). Every tenth
photo of scenes and crowds is held out: the state with the smallest loss on these is the result, of the trained weights or of their running mean.
A cut network starts from the result of whet's recovery. Each step shows both networks the same views: crops of random position and size,
mirrored or not, brighter or darker. The loss covers the whole detector's outputs: its scores at all positions (the quality focal loss of Li et
al. 2020, which weighs positions of disagreement), its boxes at positions with detections; and, with a decaying weight, the kept channels of each
convolution (hints, Romero et al. 2015), until a third of the time. Batch norms are inserted for the training and folded after it. The fastest
of several number formats and memory layouts is timed first, then the learning rate with the smallest loss after a short run is chosen. With
`--resume` a network trained by an earlier call starts in place of the recovered one.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _smaller import rounded

IMAGENET = 1000  # photos of one object each, for variety
HELD_OUT = 10  # one photo of so many scenes or crowds is for choosing the state
NEAR, SAME = 40, 22  # hashes of 256 bits with fewer different bits: resembles an evaluation photo; the same photo as another one
PLAIN, HINTED = 0.45, 0.3  # shares of the time after which the views are plain, and until which there are hints
EVALUATIONS, MEAN = 20, 0.998  # evaluations of the held-out photos in a training; decay of the running mean per step
SIDE = 512  # photos are read as squares of this side, resized like the detectors' own preprocessing
STORED = {"scenes": 448, "crowds": 448, "objects": 320}  # longest sides in the file
QUALITY = 62  # of the photos in the file (WebP)
RATES = (1e-3, 2e-3, 4e-3)  # learning rates that are tried
NORMALIZED = 8  # batches that the statistics of inserted batch norms are measured on
DECAY, CLIP, WARMUP = 1e-4, 10.0, 0.05
TRIED, TIMED, SKIPPED = 0.04, 20, 5  # share of the time for a learning rate; steps of a format that are timed, after those that are not
FORMATS = (("bf16", True), ("bf16", False), ("tf32", False), ("tf32", True))  # number format; channels last
HINTS = 3.0  # initial weight of the convolutions' mean relative squared error; it decays to 0 at HINTED


@dataclass(frozen=True)
class Taught:
    """A detector's file, the size of its input, its preprocessing, and the distance between two sets of its outputs."""

    file: str
    size: tuple[int, int]  # height, width
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bgr: bool
    loss: Callable
    shares: dict[str, float]  # of the views: photos of scenes, of crowds, of single objects


def seen_differently(p, q):
    """Quality focal loss of probabilities p against q, summed; and the weight of all detections."""
    import torch

    p, q = p.float().clamp(1e-6, 1 - 1e-6), q.float()
    cross = -(q * torch.log(p) + (1 - q) * torch.log(1 - p))
    return ((p - q).abs().pow(1.0) * cross).sum() / q.sum().clamp_min(1.0)


def nanodet_loss(mine: dict, teacher: dict):
    """Three levels of scores [n, cells, 80] and distances [n, cells, 4 x 8 bins]."""
    from torch.nn import functional as F

    total = 0.0
    for scores, distances in (("792", "795"), ("814", "817"), ("836", "839")):
        weight = teacher[scores].float().amax(2)
        a, b = (F.log_softmax(o[distances].float().unflatten(2, (4, 8)), 3) for o in (mine, teacher))
        apart = F.kl_div(a, b, reduction="none", log_target=True).sum((2, 3))
        total = total + seen_differently(mine[scores], teacher[scores]) + (weight * apart).sum() / weight.sum().clamp_min(1.0)
    return total


def face_loss(mine: dict, teacher: dict):
    """Scores [n, places, 2] and corners [n, places, 4]."""
    weight = teacher["scores"][..., 1].float()
    a, b = mine["boxes"].float(), teacher["boxes"].float()
    size = (b[..., 2:] - b[..., :2]).clamp_min(1e-2).repeat(1, 1, 2)
    apart = ((a - b).abs() / size).clamp_max(10.0).sum(2)
    return seen_differently(mine["scores"][..., 1], teacher["scores"][..., 1]) + (weight * apart).sum() / weight.sum().clamp_min(1.0)


TAUGHT = {
    "nanodet_m": Taught("nanodet_m.onnx", (416, 416), (103.53, 116.28, 123.675), (57.375, 57.12, 58.395), True, nanodet_loss,
                        {"scenes": 0.6, "crowds": 0.12, "objects": 0.28}),
    "version-RFB-320": Taught("version-RFB-320.onnx", (240, 320), (127.0,) * 3, (128.0,) * 3, False, face_loss,
                              {"scenes": 0.25, "crowds": 0.6, "objects": 0.15}),
}  # fmt: skip


def any_batch(path: Path):
    """The network with a dynamic batch: its input's first dimension a symbol, the first entries of Reshape's shapes copied from the input, sizes of
    Resize as factors.
    """
    import onnx

    import whet

    model = onnx.load(path)
    g, shapes = model.graph, whet.network_from_onnx(path)
    fixed = {i.name: i for i in g.initializer}
    for i in g.input:
        if i.name not in fixed:
            i.type.tensor_type.shape.dim[0].dim_param = "N"
    for o in g.output:
        o.type.tensor_type.ClearField("shape")
    del g.value_info[:]
    for node in g.node:
        if node.op_type == "Reshape" and node.input[1] in fixed:
            t = fixed[node.input[1]]
            shape = onnx.numpy_helper.to_array(t).copy()
            if shape[0] == 1:
                shape[0] = 0
                t.CopyFrom(onnx.numpy_helper.from_array(shape, t.name))
        if node.op_type == "Resize" and len(node.input) == 4 and node.input[3] in fixed:
            sizes = onnx.numpy_helper.to_array(fixed[node.input[3]])
            factors = sizes / np.array(shapes.tensor(node.input[0]).shape)
            g.initializer.append(onnx.numpy_helper.from_array(factors.astype(np.float32), f"{node.name}.factors"))
            node.input[2] = f"{node.name}.factors"
            del node.input[3]
    return whet.network_from_onnx(model.SerializeToString())


def pack(out: Path, more: Path | None) -> None:
    """Training photos, as WebP bytes in one file, with the kind of each."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from PIL import Image

    from support import datasets

    scenes = [datasets.path_of(f"coco_val128/images/{n}.jpg") for n in datasets.coco_names()]
    crowds = [datasets.path_of(f"face/imgs/{n}") for n in datasets.face_names()]
    evaluated = np.stack([_hash(Image.open(f)) for f in (*scenes[1::2], *crowds[1::2])])
    found = [("scenes", Image.open(f)) for f in scenes[::2]] + [("crowds", Image.open(f)) for f in crowds[::2]]
    for kind in ("scenes", "crowds", "objects") if more is not None else ():
        found += [(kind, Image.open(f)) for f in sorted((more / kind).glob("*.jp*g"))]
    if more is None:
        found += [("objects", Image.fromarray(i)) for i in datasets.imagenet_sample(IMAGENET)[0]]
    pieces, kinds, seen, left = [], [], np.zeros((0, evaluated.shape[1]), bool), 0
    for kind, image in found:
        bits = _hash(image)
        if (evaluated != bits).sum(1).min() < NEAR or (len(seen) and (seen != bits).sum(1).min() < SAME):
            left += 1
            continue
        seen = np.concatenate([seen, bits[None]])
        pieces.append(_smaller(image.convert("RGB"), STORED[kind]))
        kinds.append(kind)
    np.savez(out, bytes=np.frombuffer(b"".join(pieces), np.uint8), len=np.array([len(p) for p in pieces]), kind=np.array(kinds))
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in ("scenes", "crowds", "objects"))
    print(f"{out}: {counts}; {left} left out as similar to an evaluation photo or to another one; {out.stat().st_size / 1e6:.1f} MB")


def _hash(image) -> np.ndarray:
    """256 bits: where the brightness of a 16 x 17 version falls from left to right."""
    grey = np.asarray(image.convert("L").resize((17, 16))).astype(np.int16)
    return (grey[:, 1:] > grey[:, :-1]).ravel()


def _smaller(image, side: int) -> bytes:
    """As WebP, at most `side` pixels per side."""
    image.thumbnail((side, side))
    written = io.BytesIO()
    image.save(written, "WEBP", quality=QUALITY)
    return written.getvalue()


def photos(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [photos, 3, SIDE, SIDE] RGB, and their kinds."""
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    with np.load(path) as f:
        raw, lengths, kinds = f["bytes"], f["len"], f["kind"]
    ends = np.cumsum(lengths)

    def one(i: int) -> np.ndarray:
        image = Image.open(io.BytesIO(raw[ends[i] - lengths[i] : ends[i]].tobytes())).convert("RGB")
        return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)).transpose(2, 0, 1)

    with ThreadPoolExecutor(8) as pool:
        return np.stack(list(pool.map(one, range(len(lengths))))), kinds


class Views:
    """Random views of the photos, on the device, preprocessed for a detector."""

    def __init__(self, pixels: np.ndarray, kinds: np.ndarray, how: Taught, device: str, seed: int = 0):
        import torch

        many = np.flatnonzero(kinds != "objects")
        held = many[::HELD_OUT]
        self.pixels, self.held = torch.from_numpy(pixels).to(device), torch.from_numpy(held).to(device)
        present = {k: np.setdiff1d(np.flatnonzero(kinds == k), held) for k in how.shares}
        weight = {k: how.shares[k] * (len(at) > 0) for k, at in present.items()}
        self.likely = torch.zeros(len(pixels), device=device)
        for k, at in present.items():
            self.likely[torch.from_numpy(at).to(device)] = weight[k] / sum(weight.values()) / max(len(at), 1)
        self.how, self.device = how, device
        self.channels_last = self.plain = False
        self.generator = torch.Generator(device).manual_seed(seed)
        self.mean, self.std = (torch.tensor(v, device=device).reshape(1, 3, 1, 1) for v in (how.mean, how.std))

    def batch(self, n: int):
        """float32 [n, 3, height, width]: single views, mosaics of four views and of sixteen; some blended with another one of the batch. With `plain`
        only single views of most of a photo, as the detector will see them.

        Both networks see the same views, so blended ones are as good as others: they make few photos last longer (Beyer et al. 2022).
        """
        import torch

        height, width = self.how.size
        if self.plain:
            return self._lit(self.views(n, (height, width), smallest=0.75))
        fours, sixteens = 3 * n // 8, n // 8
        parts = [self.views(n - fours - sixteens, (height, width))]
        for count, side in ((fours, 2), (sixteens, 4)):
            v = self.views(side * side * count, (height // side, width // side)).unflatten(0, (count, side, side))
            parts.append(v.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, height, width))
        x = torch.cat(parts)
        blend = torch.where(self._rand(n) < 0.35, 0.5 * self._rand(n), torch.zeros(n, device=self.device))[:, None, None, None]
        x = (1 - blend) * x + blend * x[torch.randperm(n, generator=self.generator, device=self.device)]
        return self._lit(x)

    def _lit(self, x):
        """Each image in another light, preprocessed."""
        n = len(x)
        x = x * (0.85 + 0.3 * self._rand(3 * n).reshape(n, 3, 1, 1))
        middle = x.mean((1, 2, 3), keepdim=True)
        contrast, light = 0.7 + 0.6 * self._rand(n), 0.75 + 0.5 * self._rand(n)
        return self._prepared((((x - middle) * contrast[:, None, None, None] + middle) * light[:, None, None, None]).clamp(0, 255).round())

    def whole(self, at):
        """The photos `at`, resized as the detector's users do."""
        from torch.nn import functional as F

        return self._prepared(
            F.interpolate(self.pixels[at].float(), self.how.size, mode="bilinear", antialias=True, align_corners=False).clamp(0, 255).round()
        )

    def _prepared(self, x):
        import torch

        x = x.flip(1) if self.how.bgr else x
        x = (x - self.mean) / self.std
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x.contiguous()

    def views(self, n: int, size: tuple[int, int], smallest: float = 0.45):
        """float32 [n, 3, *size], 0 to 255: each shows at least the share `smallest` of a photo's sides."""
        import torch
        from torch.nn import functional as F

        at = torch.multinomial(self.likely, n, replacement=True, generator=self.generator)
        scale = torch.exp(self._rand(n) * (math.log(1.15) - math.log(smallest)) + math.log(smallest))  # share of the photo in a view
        scale = torch.where(self._rand(n) < 0.2, torch.ones_like(scale), scale)
        stretch = torch.exp((self._rand(n) - 0.5) * 0.4)
        sx, sy = scale * stretch, scale / stretch
        room_x, room_y = (1 - sx).clamp_min(0), (1 - sy).clamp_min(0)
        theta = torch.zeros(n, 2, 3, device=self.device)
        theta[:, 0, 0] = sx * torch.where(self._rand(n) < 0.5, -1.0, 1.0)
        theta[:, 1, 1] = sy
        theta[:, 0, 2], theta[:, 1, 2] = (2 * self._rand(n) - 1) * room_x, (2 * self._rand(n) - 1) * room_y
        grid = F.affine_grid(theta, [n, 3, *size], align_corners=False)
        return F.grid_sample(self.pixels[at].float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)

    def _rand(self, count: int):
        import torch

        return torch.rand(count, generator=self.generator, device=self.device)


class Hints:
    """Adds the outputs of the inner convolutions as outputs of both networks, restricted to the channels of the cut network."""

    def __init__(self, original, teacher, cut, channels: dict, device: str):
        import torch

        from whet.pruning.cut import find_kept_indices

        at = {t.name: torch.from_numpy(i).to(device) for (t, axis), i in find_kept_indices(original, channels).items() if axis == 1}
        outputs, users = {t.name for t in cut.outputs}, cut.users()
        inner = [layer.output for layer in cut.layers if layer.op == "Conv" and layer.output.name not in outputs]
        self.names = [t.name for t in inner]
        self.at = [at.get(n) for n in self.names]
        for t in inner:
            teacher.mark_output(teacher.tensor(t.name))
            reader = users[t][0][0]
            cut.mark_output(reader.output if reader.op == "BatchNormalization" else t)
        self.weight = torch.tensor(HINTS, device=device)

    def loss(self, mine: list, theirs: list):
        """Mean over convolutions of the squared error relative to the variance."""
        total = 0.0
        for a, b, at in zip(mine, theirs, self.at, strict=True):
            b = (b if at is None else b.index_select(1, at)).float()
            total = total + (a.float() - b).square().mean() / b.var().clamp_min(1e-6)
        return self.weight * total / len(self.at)


@dataclass
class Training:
    """A cut network in training: `step` runs one training step and returns the loss, `loss` that of the whole network's outputs on a batch."""

    module: Any
    step: Callable
    rate: Callable[[float], None]
    loss: Callable


class Best:
    """The state with the smallest loss on held-out photos, of the trained weights and of their running mean; `keep` saves it when it is found."""

    def __init__(self, cut, views: Views, loss: Callable, keep: Callable):
        self.cut, self.views, self.loss, self.keep = cut, views, loss, keep
        self.mean = self._copy()
        self.value, self.state, self.history = math.inf, self.mean, []

    def _copy(self) -> dict:
        return {n: t.detach().clone() for n, t in self.cut.state_dict().items()}

    def follow(self, done: int) -> None:
        """The running mean after a step; short at the start."""
        import torch

        pairs = [(m, t) for (m, t) in zip(self.mean.values(), self.cut.state_dict().values(), strict=True) if m.is_floating_point()]
        torch._foreach_lerp_([m for m, _ in pairs], [t.detach() for _, t in pairs], 1 - min(MEAN, done / (done + 10)))

    def compare(self) -> None:
        """Evaluates both states."""
        import torch

        trained = self._copy()
        self.cut.eval()
        found = []
        for state in (trained, self.mean):
            self.cut.load_state_dict(state)
            with torch.no_grad():
                parts = [float(self.loss(self.views.whole(at))) * len(at) for at in self.views.held.split(32)]
            found.append(sum(parts) / len(self.views.held))
            if found[-1] < self.value:
                self.value, self.state = found[-1], {n: t.clone() for n, t in state.items()}
                self.keep(self.cut)
        self.history.append(tuple(round(v, 4) for v in found))
        self.cut.load_state_dict(trained)
        self.cut.train()


def start_training(teacher, cut, how: Taught, hints: Hints, args: argparse.Namespace, precision: str, *, with_hints: bool, optimizer=None):
    """A training step as a CUDA graph if there is a GPU; with the state of `optimizer` if that is given. Returns it with its optimizer."""
    import torch

    from whet.training.graphed import GraphedStep

    names = [t.name for t in cut.network.outputs]
    ends = len(names) - len(hints.names)
    graphed = args.device == "cuda" and args.graph
    rate = torch.tensor(0.0, device=args.device) if graphed else 0.0
    more = {"fused": True, "capturable": True} if graphed else {}
    if optimizer is None:
        optimizer = torch.optim.AdamW(cut.parameters(), lr=rate, weight_decay=DECAY, **more)

    def outputs(x):
        with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16"):
            with torch.no_grad():
                theirs = teacher(x)
            return cut(x), theirs

    def distance(mine, theirs):
        have, want = (dict(zip(names[:ends], found, strict=False)) for found in (mine, theirs))
        return how.loss(have, want)

    def step(feeds, labels, answers=()):
        mine, theirs = outputs(feeds["x"])
        loss = distance(mine, theirs)
        if with_hints:
            loss = loss + hints.loss(mine[ends:], theirs[ends:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(cut.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    def set_rate(value: float) -> None:
        for group in optimizer.param_groups:
            group["lr"].fill_(value) if graphed else group.update(lr=value)

    return Training(cut, GraphedStep(step) if graphed else step, set_rate, lambda x: distance(*outputs(x))), optimizer


def fastest_format(teacher, make_cut: Callable, how: Taught, views: Views, make_hints: Callable, args: argparse.Namespace):
    """The number format and memory layout with the shortest steps, and the seconds of each."""
    import torch

    times = {}
    if args.format is not None:
        views.channels_last = args.format == "bf16"
        return args.format, {}
    for precision, last in FORMATS if args.device == "cuda" else (("tf32", False),):
        views.channels_last = last
        training, _ = start_training(teacher, make_cut(), how, make_hints(), args, precision, with_hints=True)
        for n in range(SKIPPED + TIMED if args.device == "cuda" else 1):
            if n == SKIPPED:
                torch.cuda.synchronize()
                began = time.time()
            training.step({"x": views.batch(args.batch)}, None)
        if args.device == "cuda":
            torch.cuda.synchronize()
            times[precision, last] = (time.time() - began) / TIMED
        else:
            times[precision, last] = 0.0
    best = min(times, key=lambda k: times[k])
    views.channels_last = best[1]
    return best[0], {f"{p}{', channels last' if last else ''}": round(t, 4) for (p, last), t in times.items()}


def train(teacher, cut, how: Taught, views: Views, hints: Hints, args: argparse.Namespace, precision: str, lr: float, seconds: float, keep=None):
    """Trains until the time limit; returns the number of steps, the losses by 50 steps and the comparisons of states (None for a short run).

    A short run, one without `keep`, stays at the learning rate; a whole one ends with the best state in `cut`.
    """
    whole_run = keep is not None
    began, done, total, history = time.time(), 0, 0.0, []
    cut.train()
    training, optimizer = start_training(teacher, cut, how, hints, args, precision, with_hints=True)
    hinted, best, evaluated = True, Best(cut, views, training.loss, keep) if whole_run else None, 0
    if best is not None:
        best.compare()
    while (share := (time.time() - began) / seconds) < 1 or not done:
        if hinted and whole_run and share > HINTED:
            training, _ = start_training(teacher, cut, how, hints, args, precision, with_hints=False, optimizer=optimizer)
            hinted = False
        views.plain = whole_run and share > PLAIN
        training.rate(lr * min(share / WARMUP, (1 + math.cos(math.pi * min(share, 1.0))) / 2 if whole_run else 1.0))
        hints.weight.fill_(HINTS * max(1 - share / HINTED, 0.0) if whole_run else HINTS)
        total = total + training.step({"x": views.batch(args.batch)}, None)
        done += 1
        if best is not None:
            best.follow(done)
            if int(share * EVALUATIONS) > evaluated:
                evaluated = int(share * EVALUATIONS)
                best.compare()
                print(f"  {share:.0%}, step {done}: held-out loss {best.history[-1]}", flush=True)
        if done % 50 == 0:
            history.append(round(float(total) / 50, 4))
            total = 0.0
    views.plain = False
    if best is not None:
        best.compare()
        cut.load_state_dict(best.state)
    return done, history, best


def distil(net, path: Path, how: Taught, views: Views, recipe, start: Path, args: argparse.Namespace, seconds: float, keep: Callable):
    """Trains the network in `start` and returns a record of the training. `keep(weights, about)` saves the best state so far and the final one."""
    import torch

    from whet.training import TrainingData
    from whet.training.batch_norms import InsertedBatchNorm, fold_weights, insert_batch_norms
    from whet.training.module import NetworkModule

    began = time.time()

    inserted: list[InsertedBatchNorm] = []

    def pair():
        teacher, cut = any_batch(path), any_batch(start)
        if args.norms:
            seen = TrainingData({cut.inputs[0].name: torch.cat([views.batch(args.batch) for _ in range(NORMALIZED)]).cpu().numpy()})
            cut, inserted[:] = insert_batch_norms(cut, seen, batch=args.batch, device=torch.device(args.device))
        hints = Hints(net, teacher, cut, recipe.kept(), args.device)
        whole = NetworkModule(teacher).to(args.device).eval().requires_grad_(False)
        return whole, NetworkModule(cut).to(args.device), hints

    def save(module, about: str = "{}") -> None:
        keep(fold_weights(module.weights(), inserted), about)

    whole, cut, hints = pair()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    precision, times = fastest_format(whole, lambda: cut, how, views, lambda: hints, args)
    print(f"seconds per step: {times}", flush=True)
    tried: dict[float, float] = {}
    for lr in args.lr if len(args.lr) > 1 else ():
        whole, cut, hints = pair()
        _, history, _ = train(whole, cut, how, views, hints, args, precision, lr, TRIED * seconds)
        tried[lr] = history[-1] if history else math.inf
        print(f"learning rate {lr:g}: losses {history}", flush=True)
    lr = min(tried, key=lambda r: tried[r] if math.isfinite(tried[r]) else math.inf) if tried else args.lr[0]
    whole, cut, hints = pair()
    left = max(seconds - (time.time() - began), 1.0)
    steps, history, best = train(whole, cut, how, views, hints, args, precision, lr, left, save)
    told = {"steps": steps, "batch_norms": len(inserted), "batch": args.batch, "seconds": round(left, 1), "lr": lr, "format": precision,
            "seconds_per_step": times, "tried": {f"{r:g}": v for r, v in tried.items() if math.isfinite(v)},
            "loss": history[:: max(1, len(history) // 12)],
            "held_out_photos": len(views.held), "held_out_loss": best.history, "held_out_best": round(best.value, 4)}  # fmt: skip
    save(cut, json.dumps({"what": "distilled", **told}))
    return told


def main() -> int:
    """The command line; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--pack", type=Path, help="write the photos to learn from into this file, and end")
    p.add_argument("--more", type=Path, help="with --pack: folder with the subfolders scenes, crowds and objects of further photos (JPEG)")
    p.add_argument("--photos", type=Path)
    p.add_argument("--models", type=Path, help="folder with the detectors' ONNX files")
    p.add_argument("--cuts", type=Path, help="folder that pruned_detectors.py --stages make --work wrote")
    p.add_argument("--detectors", nargs="+", choices=list(TAUGHT), default=list(TAUGHT))
    p.add_argument("--ratios", default="0.1,0.2,0.3")
    p.add_argument("--way", choices=("default", "chosen", "even"), default="default", help="which cuts, as in pruned_detectors.py")
    p.add_argument("--seconds", type=float, nargs="+", default=[60.0], help="for each network of a detector: one number, or one for each detector")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, nargs="+", default=RATES, help=f"the highest learning rate; the best of several (default: {RATES})")
    p.add_argument("--format", choices=("bf16", "tf32"), help="number format, bf16 with channels last (default: the fastest is timed)")
    p.add_argument("--resume", type=Path, help="folder of networks that an earlier call trained, to train on")
    p.add_argument("--no-norms", dest="norms", action="store_false", help="do not insert batch norms for the training")
    p.add_argument("--device", default="cuda")
    p.add_argument("--no-graph", dest="graph", action="store_false", help="do not record a step as a CUDA graph")
    p.add_argument("--out", type=Path, default=Path(".detectors"))
    args = p.parse_args()
    if args.pack is not None:
        pack(args.pack, args.more)
        return 0
    from whet.frontends import network_from_onnx, save_onnx
    from whet.pruning import load_recipe
    from whet.training.module import with_weights

    args.out.mkdir(parents=True, exist_ok=True)
    pixels, kinds = photos(args.photos)
    print(f"{len(pixels)} photos: {dict(zip(*np.unique(kinds, return_counts=True), strict=True))}", flush=True)
    seconds = dict(zip(args.detectors, args.seconds * (len(args.detectors) if len(args.seconds) == 1 else 1), strict=True))
    for name in args.detectors:
        how, told = TAUGHT[name], {}
        path = args.models / how.file
        net = network_from_onnx(path)
        views = Views(pixels, kinds, how, args.device)
        for ratio in (float(r) for r in args.ratios.split(",")):
            stem = f"{name}-{ratio:g}-{args.way}"
            start, recipe = args.cuts / f"{stem}.recovered.onnx", load_recipe(args.cuts / f"{stem}.recipe.json")
            start = args.resume / f"{stem}.onnx" if args.resume and (args.resume / f"{stem}.onnx").exists() else start

            def keep(weights, about, start=start, stem=stem) -> None:
                save_onnx(rounded(with_weights(network_from_onnx(start), weights, about=about)), args.out / f"{stem}.onnx")

            record = distil(net, path, how, views, recipe, start, args, seconds[name], keep)
            told[stem] = {"photos": len(pixels), **({"resumed": True} if args.resume else {}), **record}
            print(stem, told[stem], flush=True)
            (args.out / f"{name}.told.json").write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
