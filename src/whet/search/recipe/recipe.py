"""The recipe of a search: model, data, metric, device, target, space and budget, from YAML or plain data, validated key by key."""
# ruff: noqa: RUF009 - make_field() is dataclasses.field with its reader

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.backends import BACKENDS, get_capabilities
from whet.errors import UsageError
from whet.files import read_bounded
from whet.measure.tensorrt_engine import find_tensorrt_version
from whet.passes import select
from whet.pruning.importance import KINDS
from whet.registry import PYTHON_PREFIX, suggest_name
from whet.search.recipe import fields as f
from whet.search.recipe.fields import Amount, make_field
from whet.search.recipe.fingerprint import SOURCES, digest_contents
from whet.search.stages.training_options import FINETUNE, QAT, read_finetuning, read_quantization_training

DEPLOYED = "whet.auto.recipe"  # the format of recipe.json in a deploy folder
PRECISIONS = ("fp32", "bf16", "fp16", "int8", "fp8")  # in order of decreasing width
STORAGE = {"fp16": "f16", "bf16": "bf16", "int8": "i8", "fp8": "f8e4m3"}  # precision -> storage type
_LARGEST = 2**17  # bytes of a recipe: PyYAML reads 30,000 of them in a second
_MOST_VALUES = 10_000  # limit per recipe; real ones have tens
#: sections and keys that define the search: it resumes only with equal values and equal contents (fingerprint.py)
_IDENTITY = ("higher_is_better", "device", "threads", "shapes", "space", "scout")


@dataclass(frozen=True)
class Data:
    """Data sources, as for `whet exec --calibData` (DIR, FILE.npz, FILE.npy, python:MODULE:FUNCTION); labelled ones also have `labels`."""

    calibrate: str = make_field(f.read_string)  # unlabelled, for recovery and INT8 ranges
    score: str | None = make_field(f.read_string, None)  # labelled, scores each trial (not needed with a metric function)
    judge: str | None = make_field(f.read_string, None)  # labelled, used only by the final comparison
    train: str | None = make_field(f.read_string, None)  # labelled, for fine-tuning
    preprocess: str | None = make_field(f.read_string, None)  # image preprocessing, as --calibPreprocess


@dataclass(frozen=True)
class Target:
    """Targets of the engine; each key is optional. Relative values (`0.5x`) refer to the FP32 original at the same batch."""

    latency: Amount | None = make_field(f.latency, None)  # ms per run, median, at most
    throughput: Amount | None = make_field(f.throughput, None)  # samples per second, at least
    memory: Amount | None = make_field(f.size, None)  # bytes, at most
    energy: Amount | None = make_field(f.energy, None)  # mJ per sample, at most; gross energy of the device
    net_energy: Amount | None = make_field(f.energy, None)  # the same net of the device's idle power
    engine_size: Amount | None = make_field(f.size, None)  # bytes, at most
    accuracy_drop: float | None = make_field(f.make_number_reader(0), None)  # in units of the metric (top1: points), at most


@dataclass(frozen=True)
class Width:
    """Channels (or heads, features: coupled units) to remove: a share for each class of groups."""

    most: float = make_field(f.make_number_reader(0, 0.95), 0.8)  # largest share removed from a class
    step: float = make_field(f.make_number_reader(0.01, 0.5), 0.1)
    classes: int = make_field(f.make_integer_reader(1), 8)  # maximum number of classes; groups of equal size and role share one
    multiple: int = make_field(f.make_integer_reader(1), 8)  # kept channels are a multiple of this


def read_criterion(value: Any, where: str) -> str:
    """Reads the importance criterion of channels: a kind of importance, or python:MODULE:FUNCTION(net, group)."""
    if isinstance(value, str) and value.startswith(PYTHON_PREFIX) and value.count(":") == 2:
        return value
    if value not in KINDS:
        raise UsageError(f"'{where}' is one of {', '.join(KINDS)} or python:MODULE:FUNCTION, not {value!r}.{suggest_name(str(value), KINDS)}")
    return str(value)


@dataclass(frozen=True)
class Space:
    """The search space. A list holds the values to try; a single value is fixed."""

    width: Width | None = make_field(f.make_section_reader(Width, None), factory=Width)
    budget: bool = make_field(f.flag, False)  # also propose latency budgets, distributed by the knapsack over measured layer times (whet.pruning)
    skip: tuple[str, ...] = make_field(f.make_list_reader(f.read_string), ())  # names of groups, layers and branches that are not pruned
    hidden: bool = make_field(f.flag, False)  # also cut the residual width, through the statistics of norms (groups(net, hidden=True))
    steps: int = make_field(f.make_integer_reader(1), 1)  # selections of a trial's channels, each scored on the recovered network of the one before
    # with `budget`: selections with reweighted importances, compared by their outputs (prune --trials)
    budget_trials: int = make_field(f.make_integer_reader(0), 0)
    depth: bool = make_field(f.flag, True)  # remove whole residual branches if the network allows it
    importance: tuple[str, ...] = make_field(f.make_list_reader(read_criterion), ("l1",))
    precision: tuple[str, ...] = make_field(f.make_list_reader(f.make_choice_reader(*PRECISIONS)), ())  # (): those the device supports
    two_four: tuple[bool, ...] = make_field(f.make_list_reader(f.flag), (False,))
    # "all", or pass switches as --passes takes them: "-fuse_conv_add,-fuse_silu"
    fusion: tuple[str, ...] = make_field(f.make_list_reader(f.read_string), ("all",))
    batch: tuple[int, ...] = make_field(f.make_list_reader(f.make_integer_reader(1)), (1,))


@dataclass(frozen=True)
class Effort:
    """Effort of a trial: recovery samples, rows per least-squares problem, optimization level, seconds of timing."""

    samples: int = make_field(f.make_integer_reader(1), 64)
    rows: int = make_field(f.make_integer_reader(1), 2048)
    level: int = make_field(f.make_integer_reader(0), 2)
    seconds: float = make_field(f.read_seconds, 0.5)


@dataclass(frozen=True)
class Survivor(Effort):
    """Effort of the survivors, `count` of them."""

    samples: int = make_field(f.make_integer_reader(1), 256)
    rows: int = make_field(f.make_integer_reader(1), 8192)
    level: int = make_field(f.make_integer_reader(0), 3)
    seconds: float = make_field(f.read_seconds, 2.0)
    count: int = make_field(f.make_integer_reader(1), 4)


@dataclass(frozen=True)
class Budget:
    """Limits of the search and the number of workers."""

    trials: int = make_field(f.make_integer_reader(1), 40)
    timeout: float | None = make_field(f.read_seconds, None)  # seconds in this call after which no new trial starts
    trial_timeout: float = make_field(f.read_seconds, 1200.0)  # a longer trial is terminated and counts as failed
    workers: int = make_field(f.make_integer_reader(0), 0)  # 0: one on a CPU, one per GPU
    seed: int = make_field(f.make_integer_reader(0), 0)
    # scouts that lose several times the permitted accuracy after recovery get no engine: their cost is estimated by their FLOPs
    early_stop: bool = make_field(f.flag, True)
    sampler: str = make_field(f.make_choice_reader("gp", "tpe", "nsga2", "random"), "gp")


@dataclass(frozen=True)
class AutoRecipe:
    """The input of `whet auto`. Paths are absolute once loaded; Python modules are searched in `folder`."""

    model: str = make_field(f.read_string)
    data: Data = make_field(f.make_section_reader(Data))
    target: Target = make_field(f.make_section_reader(Target))
    metric: str = make_field(f.read_string, "top1")  # top1, or python:MODULE:FUNCTION (see metrics.py)
    higher_is_better: bool = make_field(f.flag, True)
    device: str = make_field(f.read_string, "cpu")  # a backend, with an optional device number: cpu, cuda, cuda:1
    threads: int = make_field(f.make_integer_reader(0), 0)
    executor: str = make_field(f.make_choice_reader("whet", "tensorrt"), "whet")  # runs the networks that are measured and scored
    shapes: dict[str, tuple[int, ...]] | None = make_field(f.read_shapes, None)  # input: 1x3x224x224, if more than the batch is dynamic
    prefer: str = make_field(f.make_choice_reader("latency", "accuracy"), "latency")  # preference among engines that meet the target
    space: Space = make_field(f.make_section_reader(Space), factory=Space)
    # precisions of the original to compare with; (): FP32, 16 bits and INT8
    baselines: tuple[str, ...] = make_field(f.make_list_reader(f.make_choice_reader(*PRECISIONS)), ())
    scout: Effort = make_field(f.make_section_reader(Effort), factory=Effort)
    survivor: Survivor = make_field(f.make_section_reader(Survivor), factory=Survivor)
    # fine-tuning of survivors, needs data.train and PyTorch
    finetune: dict[str, Any] | None = make_field(read_finetuning, factory=lambda: dict(FINETUNE))
    qat: dict[str, Any] | None = make_field(read_quantization_training, factory=lambda: dict(QAT))  # INT8 training of survivors, after fine-tuning
    search: Budget = make_field(f.make_section_reader(Budget), factory=Budget)
    timing_cache: str | None = make_field(f.read_string, None)  # file; None: the user's cache, shared by all builds
    out: str | None = make_field(f.read_string, None)  # work folder; None: NAME.auto in the recipe's folder
    folder: str = make_field(f.read_string, ".")

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
        return _to_plain(self)

    @property
    def executor_identity(self) -> dict[str, str]:
        """TensorRT's version if it is the executor: its plans and times belong to one version. Raises UsageError if it is not installed."""
        return {"executor": f"tensorrt {find_tensorrt_version()}"} if self.executor == "tensorrt" else {}

    def identity(self) -> dict[str, Any]:
        """Settings and content digests that must be equal to resume a search. Raises FrontendError, OSError."""
        plain = self.to_plain()
        settings = {k: plain[k] for k in _IDENTITY if k in plain} | {"data.preprocess": self.data.preprocess}
        return settings | self.executor_identity | digest_contents(self)


def load_recipe(path: str | os.PathLike[str]) -> AutoRecipe:
    """Reads a YAML or JSON recipe. Raises UsageError for a missing or malformed file and for a duplicate or unknown key or a bad value."""
    try:
        written = read_bounded(path, _LARGEST).decode()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise UsageError(f"the recipe {path} cannot be read: {why}. Give a YAML file like examples/auto/digits.yaml; all keys: docs/auto.md.") from e
    try:
        found = _read_yaml(written)
        if isinstance(found, dict) and found.get("format") == DEPLOYED:
            raise UsageError("this is the result of a search. `whet rebuild` of its folder rebuilds that engine; the search's recipe is the "
                             "YAML file given to `whet auto`")  # fmt: skip
        return recipe_from(found, Path(path).resolve().parent, Path(path).stem)
    except UsageError as e:
        raise UsageError(f"{path}: {e}") from None


def recipe_from(data: Any, folder: str | os.PathLike[str] = ".", name: str = "search") -> AutoRecipe:
    """A recipe from plain data; relative paths start at `folder`. Raises UsageError."""
    recipe = f.read(AutoRecipe, data)
    base = Path(recipe.folder if recipe.folder != "." else folder).resolve()

    def make_absolute(path: str) -> str:
        return path if path.startswith("python:") else str((base / path).resolve())

    sources = {n: make_absolute(v) for n in SOURCES if (v := getattr(recipe.data, n))}
    if recipe.data.preprocess and (base / recipe.data.preprocess).is_file():
        sources["preprocess"] = make_absolute(recipe.data.preprocess)
    recipe = dataclasses.replace(
        recipe, model=make_absolute(recipe.model), data=dataclasses.replace(recipe.data, **sources), folder=str(base),
        out=make_absolute(recipe.out or f"{name}.auto"), timing_cache=make_absolute(recipe.timing_cache) if recipe.timing_cache else None,
    )  # fmt: skip
    _check(recipe)
    return recipe


def _check(r: AutoRecipe) -> None:
    """Validates across keys. Raises UsageError."""
    kind, colon, ordinal = r.device.partition(":")
    known = BACKENDS.get(kind)
    if known is None or (colon and not (known.capabilities.numbered_devices and ordinal.isdigit())):
        names = (f"{n} or {n}:N" if b.capabilities.numbered_devices else n for n, b in sorted(BACKENDS.items()))
        raise UsageError(f"'device' is one of {', '.join(names)}, not {r.device!r}")
    if not os.path.isfile(r.model):
        raise UsageError(f"'model': no such file: {r.model}")
    if r.metric != "top1" and (not r.metric.startswith("python:") or r.metric.count(":") != 2):
        raise UsageError(f"'metric' is top1 or python:MODULE:FUNCTION, not {r.metric!r}")
    if r.metric == "top1" and r.data.score is None:
        raise UsageError("'data.score' is missing: top1 needs labelled data (an .npz with `labels`, or python:MODULE:FUNCTION)")
    for n in SOURCES:
        source = getattr(r.data, n)
        if source and not source.startswith("python:") and not os.path.exists(source):
            raise UsageError(f"'data.{n}': no such file or folder: {source}")
    if all(getattr(r.target, x.name) is None for x in dataclasses.fields(r.target)):
        raise UsageError(f"'target' is empty: give at least one of {', '.join(x.name for x in dataclasses.fields(r.target))}")
    for text in r.space.fusion:
        try:
            select(switches=list_switches(text))
        except UsageError as e:
            raise UsageError(f"'space.fusion': {e}") from None
    for where, types in (("space.precision", r.space.precision), ("baselines", r.baselines)):
        missing = [p for p in types if STORAGE.get(p) in get_capabilities(kind).unsupported_types]
        if missing:
            raise UsageError(f"'{where}': no kernel of the backend '{kind}' computes in {missing[0]}")
        if r.executor == "tensorrt" and "fp8" in types:
            raise UsageError(f"'{where}': with TensorRT as executor fp8 is not searched, since whet writes no ONNX model with FP8 Q/DQ nodes")


def list_switches(fusion: str) -> tuple[str, ...]:
    """The builder's pass switches for a value of `space.fusion`."""
    return () if fusion == "all" else tuple(p.strip() for p in fusion.split(",") if p.strip())


def _to_plain(v: Any) -> Any:
    if isinstance(v, Amount):
        return v.to_plain()
    if dataclasses.is_dataclass(v) and not isinstance(v, type):
        plain = {x.name: _to_plain(getattr(v, x.name)) for x in dataclasses.fields(v)}
        off = {k: False for k in ("width", "finetune", "qat") if k in plain and plain[k] is None}
        return {k: x for k, x in plain.items() if x is not None and x != []} | off
    if isinstance(v, tuple | list):
        return [_to_plain(x) for x in v]
    if isinstance(v, dict):
        return {k: _to_plain(x) for k, x in v.items()}
    return v


def _read_yaml(written: str) -> Any:
    try:
        import yaml
    except ImportError:
        try:
            return json.loads(written)
        except (ValueError, RecursionError):
            raise UsageError("YAML recipes need PyYAML: pip install 'whet[search]' (a JSON recipe needs nothing)") from None

    class Once(yaml.SafeLoader):
        """A loader that refuses duplicate keys."""

    def construct_mapping(loader: Any, node: Any) -> dict:
        found: dict = {}
        for k, v in node.value:
            name = loader.construct_object(k, deep=True)
            if isinstance(name, list | dict | set):
                raise UsageError(f"a key is a list or a mapping (line {k.start_mark.line + 1}); keys are names")
            if name in found:
                raise UsageError(f"the key '{name}' is given twice (line {node.start_mark.line + 1} and on)")
            found[name] = loader.construct_object(v, deep=True)
        return found

    Once.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_mapping)
    # YAML 1.2 and JSON read 1e-4 as a number; PyYAML, of YAML 1.1, as text
    Once.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))
    try:
        data = yaml.load(written, Once)
        if _count_values(data, {}) > _MOST_VALUES:
            raise UsageError(f"its aliases expand to more than {_MOST_VALUES:,} values")
    except yaml.YAMLError as e:
        raise UsageError(f"malformed YAML: {' '.join(str(e).split())}") from None
    except RecursionError:
        raise UsageError("its lists and mappings are nested too deeply") from None
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as e:  # a date such as 2026-99-99, an integer of 10,000 digits
        raise UsageError(f"a value cannot be read: {' '.join(str(e).split())[:200]}") from None
    return data


def _count_values(node: Any, known: dict[int, int]) -> int:
    """Number of values with all aliases expanded; `known` caches the counts of lists and mappings by id."""
    if not isinstance(node, list | dict):
        return 1
    if id(node) not in known:
        inner = [*node, *node.values()] if isinstance(node, dict) else node
        known[id(node)] = 1 + sum(_count_values(v, known) for v in inner)
    return known[id(node)]
