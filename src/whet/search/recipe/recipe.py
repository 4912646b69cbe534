"""The recipe of a search: model, data, metric, device, target, space and budget, from YAML or plain data, checked key by key."""
# ruff: noqa: RUF009 - key() is dataclasses.field with its reader

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.backends import BACKENDS, capabilities_of
from whet.errors import UsageError
from whet.passes import select
from whet.pruning.importance import KINDS
from whet.registry import OWN, nearest
from whet.search.recipe import fields as f
from whet.search.recipe.fields import Amount, key
from whet.search.recipe.fingerprint import SOURCES, contents
from whet.search.stages.training_options import FINETUNE, QAT, finetuning, quantization_training

DEPLOYED = "whet.auto.recipe"  # the format of recipe.json in a deploy folder
PRECISIONS = ("fp32", "bf16", "fp16", "int8", "fp8")  # widest first
STORAGE = {"fp16": "f16", "bf16": "bf16", "int8": "i8", "fp8": "f8e4m3"}  # precision -> storage type
_MOST_VALUES = 10_000  # in a recipe; real ones have tens
#: sections and keys that say what is searched: a search goes on only under the same ones, and the same contents (contents.py)
_IDENTITY = ("higher_is_better", "device", "threads", "shapes", "space", "scout")


@dataclass(frozen=True)
class Data:
    """Where data come from: as for `whet exec --calibData` (DIR, FILE.npz, FILE.npy, python:MODULE:FUNCTION); labelled ones also have `labels`."""

    calibrate: str = key(f.text)  # no labels: recovery and INT8 ranges
    score: str | None = key(f.text, None)  # labelled: each trial is scored on it (not needed with a metric function)
    judge: str | None = key(f.text, None)  # labelled, seen by nothing but the last comparison
    train: str | None = key(f.text, None)  # labelled, for fine-tuning
    preprocess: str | None = key(f.text, None)  # how images become numbers, as --calibPreprocess


@dataclass(frozen=True)
class Target:
    """What the engine is to reach; each key may be left out. Relative values (`0.5x`) are of the original in FP32, at the same batch."""

    latency: Amount | None = key(f.latency, None)  # ms of one run, median, at most
    throughput: Amount | None = key(f.throughput, None)  # samples a second, at least
    memory: Amount | None = key(f.size, None)  # bytes, at most
    energy: Amount | None = key(f.energy, None)  # mJ a sample, at most; all that the device draws meanwhile
    net_energy: Amount | None = key(f.energy, None)  # the same without what the device draws at rest
    engine_size: Amount | None = key(f.size, None)  # bytes, at most
    accuracy_drop: float | None = key(f.number(0), None)  # in units of the metric (top1: points), at most


@dataclass(frozen=True)
class Width:
    """Channels (and heads and features: whatever is cut together) to remove: a share for each class of groups."""

    most: float = key(f.number(0, 0.95), 0.8)  # largest share cut of a class
    step: float = key(f.number(0.01, 0.5), 0.1)
    classes: int = key(f.whole(1), 8)  # at most so many classes; groups alike in size and role share one
    multiple: int = key(f.whole(1), 8)  # kept channels are a multiple of this


def criterion(value: Any, where: str) -> str:
    """What channels are ranked by: a kind of importance, or python:MODULE:FUNCTION(net, group)."""
    if isinstance(value, str) and value.startswith(OWN) and value.count(":") == 2:
        return value
    if value not in KINDS:
        raise UsageError(f"'{where}' is one of {', '.join(KINDS)} or python:MODULE:FUNCTION, not {value!r}.{nearest(str(value), KINDS)}")
    return str(value)


@dataclass(frozen=True)
class Space:
    """What may be changed. A list is what is tried; one value is not searched over."""

    width: Width | None = key(f.section(Width, None), factory=Width)
    budget: bool = key(f.flag, False)  # also propose milliseconds, which the knapsack over measured layer times shares out (whet.pruning)
    skip: tuple[str, ...] = key(f.many(f.text), ())  # groups, layers and branches that stay whole, by name
    depth: bool = key(f.flag, True)  # whole residual blocks, where the network has some that can go
    importance: tuple[str, ...] = key(f.many(criterion), ("l1",))
    precision: tuple[str, ...] = key(f.many(f.one_of(*PRECISIONS)), ())  # (): those that the device has
    two_four: tuple[bool, ...] = key(f.many(f.flag), (False,))
    fusion: tuple[str, ...] = key(f.many(f.text), ("all",))  # "all", or pass switches as --passes takes them: "-fuse_conv_add,-fuse_silu"
    batch: tuple[int, ...] = key(f.many(f.whole(1)), (1,))


@dataclass(frozen=True)
class Effort:
    """How hard a trial works: samples to recover on, rows of each least squares, the builder's level, seconds of timing."""

    samples: int = key(f.whole(1), 64)
    rows: int = key(f.whole(1), 2048)
    level: int = key(f.whole(0), 2)
    seconds: float = key(f.seconds, 0.5)


@dataclass(frozen=True)
class Survivor(Effort):
    """The same for the few that go on; `count` of them."""

    samples: int = key(f.whole(1), 256)
    rows: int = key(f.whole(1), 8192)
    level: int = key(f.whole(0), 3)
    seconds: float = key(f.seconds, 2.0)
    count: int = key(f.whole(1), 4)


@dataclass(frozen=True)
class Budget:
    """When to stop, and how much runs at once."""

    trials: int = key(f.whole(1), 40)
    timeout: float | None = key(f.seconds, None)  # seconds of this call until no new trial begins
    trial_timeout: float = key(f.seconds, 1200.0)  # a trial that takes longer is ended and counts as failed
    workers: int = key(f.whole(0), 0)  # 0: one on a CPU, one a GPU
    seed: int = key(f.whole(0), 0)
    sampler: str = key(f.one_of("tpe", "nsga2", "random"), "tpe")


@dataclass(frozen=True)
class AutoRecipe:
    """Everything that `whet auto` is told. Paths are absolute once loaded; `folder` is where Python modules are looked for."""

    model: str = key(f.text)
    data: Data = key(f.section(Data))
    target: Target = key(f.section(Target))
    metric: str = key(f.text, "top1")  # top1, or python:MODULE:FUNCTION (see metrics.py)
    higher_is_better: bool = key(f.flag, True)
    device: str = key(f.text, "cpu")  # a backend, with a number where it has several devices: cpu, cuda, cuda:1
    threads: int = key(f.whole(0), 0)
    shapes: dict[str, tuple[int, ...]] | None = key(f.shapes, None)  # input: 1x3x224x224, where the model leaves more than the batch open
    prefer: str = key(f.one_of("latency", "accuracy"), "latency")  # which of the engines that meet the target
    space: Space = key(f.section(Space), factory=Space)
    baselines: tuple[str, ...] = key(f.many(f.one_of(*PRECISIONS)), ())  # types of the original to compare with; (): FP32, 16 bits and INT8
    scout: Effort = key(f.section(Effort), factory=Effort)
    survivor: Survivor = key(f.section(Survivor), factory=Survivor)
    finetune: dict[str, Any] | None = key(finetuning, factory=lambda: dict(FINETUNE))  # of the survivors, with data.train and PyTorch
    qat: dict[str, Any] | None = key(quantization_training, factory=lambda: dict(QAT))  # of survivors in INT8, after that
    search: Budget = key(f.section(Budget), factory=Budget)
    timing_cache: str | None = key(f.text, None)  # file; none: the user's cache, shared with all builds
    out: str | None = key(f.text, None)  # work folder; none: NAME.auto beside the recipe
    folder: str = key(f.text, ".")

    @property
    def backend(self) -> str:
        """The backend's name: the device without its number."""
        return self.device.partition(":")[0]

    @property
    def ordinal(self) -> int:
        """The GPU's number."""
        return int(self.device.partition(":")[2] or 0)

    def to_plain(self) -> dict[str, Any]:
        """Plain data that `recipe_from` reads back."""
        return _plain(self)

    def identity(self) -> dict[str, Any]:
        """What must not change while a search goes on: settings, and digests of what the recipe names. Raises FrontendError, OSError."""
        plain = self.to_plain()
        settings = {k: plain[k] for k in _IDENTITY if k in plain} | {"data.preprocess": self.data.preprocess}
        return settings | contents(self)


def load_recipe(path: str | os.PathLike[str]) -> AutoRecipe:
    """The recipe in a YAML (or JSON) file. Raises UsageError: no such file, no YAML, a key given twice, unknown or with a bad value."""
    try:
        written = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise UsageError(f"the recipe {path} cannot be read: {why}. Give a YAML file as examples/auto/digits.yaml; docs/auto.md has all keys.") from e
    try:
        found = _yaml(written)
        if isinstance(found, dict) and found.get("format") == DEPLOYED:
            raise UsageError("this says what a search has found. `whet rebuild` of its folder makes that engine again; the search's recipe is the "
                             "YAML file that it was called with")  # fmt: skip
        return recipe_from(found, Path(path).resolve().parent, Path(path).stem)
    except UsageError as e:
        raise UsageError(f"{path}: {e}") from None


def recipe_from(data: Any, folder: str | os.PathLike[str] = ".", name: str = "search") -> AutoRecipe:
    """The recipe in plain data; relative paths are of `folder`. Raises UsageError."""
    made = f.read(AutoRecipe, data)
    base = Path(made.folder if made.folder != "." else folder).resolve()

    def absolute(path: str) -> str:
        return path if path.startswith("python:") else str((base / path).resolve())

    sources = {n: absolute(v) for n in SOURCES if (v := getattr(made.data, n))}
    if made.data.preprocess and (base / made.data.preprocess).is_file():
        sources["preprocess"] = absolute(made.data.preprocess)
    made = dataclasses.replace(
        made, model=absolute(made.model), data=dataclasses.replace(made.data, **sources), folder=str(base),
        out=absolute(made.out or f"{name}.auto"), timing_cache=absolute(made.timing_cache) if made.timing_cache else None,
    )  # fmt: skip
    _check(made)
    return made


def _check(r: AutoRecipe) -> None:
    """What no single key can tell. Raises UsageError."""
    kind, colon, ordinal = r.device.partition(":")
    known = BACKENDS.get(kind)
    if known is None or (colon and not (known.capabilities.numbered_devices and ordinal.isdigit())):
        names = (f"{n} or {n}:N" if b.capabilities.numbered_devices else n for n, b in sorted(BACKENDS.items()))
        raise UsageError(f"'device' is one of {', '.join(names)}, not {r.device!r}")
    if not os.path.isfile(r.model):
        raise UsageError(f"'model': there is no file {r.model}")
    if r.metric != "top1" and (not r.metric.startswith("python:") or r.metric.count(":") != 2):
        raise UsageError(f"'metric' is top1 or python:MODULE:FUNCTION, not {r.metric!r}")
    if r.metric == "top1" and r.data.score is None:
        raise UsageError("'data.score' is missing: top1 needs labelled data (an .npz with `labels`, or python:MODULE:FUNCTION)")
    for n in SOURCES:
        source = getattr(r.data, n)
        if source and not source.startswith("python:") and not os.path.exists(source):
            raise UsageError(f"'data.{n}': there is no file or folder {source}")
    if all(getattr(r.target, x.name) is None for x in dataclasses.fields(r.target)):
        raise UsageError(f"'target' is empty: give at least one of {', '.join(x.name for x in dataclasses.fields(r.target))}")
    for text in r.space.fusion:
        try:
            select(switches=switches(text))
        except UsageError as e:
            raise UsageError(f"'space.fusion': {e}") from None
    for where, types in (("space.precision", r.space.precision), ("baselines", r.baselines)):
        missing = [p for p in types if STORAGE.get(p) in capabilities_of(kind).unsupported_types]
        if missing:
            raise UsageError(f"'{where}': no kernel of the backend '{kind}' computes in {missing[0]}")


def switches(fusion: str) -> tuple[str, ...]:
    """The builder's pass switches of a value of `space.fusion`."""
    return () if fusion == "all" else tuple(p.strip() for p in fusion.split(",") if p.strip())


def _plain(v: Any) -> Any:
    if isinstance(v, Amount):
        return v.to_plain()
    if dataclasses.is_dataclass(v) and not isinstance(v, type):
        made = {x.name: _plain(getattr(v, x.name)) for x in dataclasses.fields(v)}
        off = {k: False for k in ("width", "finetune", "qat") if k in made and made[k] is None}
        return {k: x for k, x in made.items() if x is not None and x != []} | off
    if isinstance(v, tuple | list):
        return [_plain(x) for x in v]
    if isinstance(v, dict):
        return {k: _plain(x) for k, x in v.items()}
    return v


def _yaml(written: str) -> Any:
    try:
        import yaml
    except ImportError:
        try:
            return json.loads(written)
        except ValueError:
            raise UsageError("recipes are YAML, which PyYAML reads: pip install 'whet[search]' (a recipe in JSON needs nothing)") from None

    class Once(yaml.SafeLoader):
        """Refuses a key that is given twice, which YAML lets pass."""

    def mapping(loader: Any, node: Any) -> dict:
        names = [loader.construct_object(k) for k, _ in node.value]
        twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
        if twice is not None:
            raise UsageError(f"the key '{twice}' is given twice (line {node.start_mark.line + 1} and on)")
        return {loader.construct_object(k): loader.construct_object(v, deep=True) for k, v in node.value}

    Once.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        made = yaml.load(written, Once)
        if _values(made, {}) > _MOST_VALUES:
            raise UsageError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    except yaml.YAMLError as e:
        raise UsageError(f"this is no YAML: {' '.join(str(e).split())}") from None
    except RecursionError:
        raise UsageError("its lists and keys stand too deep inside each other") from None
    return made


def _values(node: Any, known: dict[int, int]) -> int:
    """How many values there are when each alias is written out; `known` holds those of lists and mappings that were counted."""
    if not isinstance(node, list | dict):
        return 1
    if id(node) not in known:
        inner = [*node, *node.values()] if isinstance(node, dict) else node
        known[id(node)] = 1 + sum(_values(v, known) for v in inner)
    return known[id(node)]
