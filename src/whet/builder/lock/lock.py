"""The tactic lock: a JSON file that pins every decision of a build. The same lock gives the same engine, or the build fails.

It holds digests of the model, of the tactics' sources and of the result; passes, options and profiles; each layer's tactic and formats;
the memory plan; threads, libraries and the machine. Nothing is timed under a lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.backends import Backend, get_backend
from whet.builder.assemble import KernelMemory, assemble, compute_model_digest, make_sample_parallel
from whet.builder.batching.profiles import OPT, bind_profile_symbols, bound_layers
from whet.builder.candidates.reformats import with_reformats
from whet.builder.candidates.unfuse import unfuse
from whet.builder.config import BuildConfig
from whet.engine.codec import MOST_CONCURRENT_SAMPLES
from whet.engine.host_tail import HostTail
from whet.engine.plan import Choice, EnginePlan, Profile
from whet.engine.schema import encode
from whet.errors import BackendError, BuildError, EngineError, LockError
from whet.files import read_json_text, replace_atomically
from whet.measure.option import Option
from whet.measure.timing_key import compute_source_digest
from whet.network import Network, Tensor, format_network
from whet.ops import why_samples_touch
from whet.runtime.kernels import make_signature
from whet.tactics import Operand, PlanRefused, Signature, Tactic, get_tactic

FORMAT, VERSION = "whet tactic lock", 2

#: options that determine the engine; the others only control the search
_OPTIONS = (
    "optimization_level",
    "passes",
    "no_fuse",
    "precisions",
    "precision_constraints",
    "layer_precisions",
    "layer_output_types",
    "sparsity",
    "deterministic",
    "strict_numerics",
)


_FIELDS = {
    "model": str, "backend": str, "machine": str, "threads": int, "options": dict, "profiles": list, "passes": list, "unfused": list,
    "tactics": dict, "layers": list, "arenas": list, "digest": str,
}  # fmt: skip


def save_lock(plan: EnginePlan, path: str | Path) -> None:
    """Writes the lock of a built engine. Raises LockError when the file cannot be written."""
    try:
        with replace_atomically(path) as part:
            part.write_text(json.dumps(lock_of(plan), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as e:
        raise LockError(f"the lock cannot be written to {path}: {e}") from e


def lock_of(plan: EnginePlan) -> dict[str, Any]:
    """The lock as data; separately tuned profiles have a lock each, those after the first under "further"."""
    first, *others = (_lock_of(p) for p in plan.by_profile())
    tail = {} if plan.tail is None else {"tail": plan.tail.digest}
    return first | ({"further": others} if others else {}) | tail


def _lock_of(plan: EnginePlan) -> dict[str, Any]:
    used = sorted({c.tactic for c in plan.choices.values()})
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model_digest,
        "backend": plan.backend,
        "machine": plan.machine_key,
        "threads": plan.threads,
        "options": {k: _convert_tuples_to_lists(plan.options.get(k)) for k in _OPTIONS},
        "profiles": [_convert_tuples_to_lists(p.shapes) for p in plan.profiles],
        "passes": list(plan.report.passes.order),
        "unfused": [entry[0] for entry in plan.report.unfused],
        "tactics": {n: _convert_tactic_to_json(n) for n in used},
        "layers": [{"name": layer.name, **_convert_choice_to_json(plan.choices[layer.name])} for layer in plan.network.layers],
        "arenas": [_convert_tuples_to_lists(a.data()) for a in plan.arenas],
        "digest": plan_digest(plan),
        **{k: encode(v) for k in ("asked", "quantized") if (v := getattr(plan.report, k)) is not None},  # builder/lock/relock.py
    }


def plan_digest(plan: EnginePlan) -> str:
    """SHA-256 over the network (weights by digest), choices, profiles, arenas, threads and backend."""
    if plan.others:
        return hashlib.sha256("".join(map(plan_digest, plan.by_profile())).encode()).hexdigest()
    h = hashlib.sha256(format_network(plan.network).encode())
    data = [
        [[layer.name, _convert_choice_to_json(plan.choices[layer.name])] for layer in plan.network.layers],
        [_convert_tuples_to_lists(p.shapes) for p in plan.profiles],
        [_convert_tuples_to_lists(a.data()) for a in plan.arenas],
        [plan.threads, plan.backend],
    ]
    h.update(json.dumps(data, sort_keys=True).encode())
    return h.hexdigest()


def read_lock(path: str | Path) -> dict[str, Any]:
    """The lock in a file. Raises LockError if it is missing, damaged or of another version."""
    try:
        found = json.loads(read_json_text(path))
    except (OSError, ValueError, RecursionError) as e:
        raise LockError(f"the lock {path} cannot be read: {e}. Write one with --saveLock.") from e
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise LockError(f"{path} is no tactic lock. Write one with --saveLock.")
    if found.get("version") != VERSION:
        raise LockError(f"the lock {path} is of version {found.get('version')}, this whet reads version {VERSION}. Write it again with --saveLock.")
    further = found.get("further", [])
    if not isinstance(further, list):
        raise LockError(f"the lock {path} is damaged: 'further' is no list. Write it again with --saveLock.")
    for part in (found, *further):
        _check_fields(part, path)
    return found


def _check_fields(lock: Any, path: str | Path) -> None:
    for key, kind in _FIELDS.items():
        if not isinstance(lock, dict) or not isinstance(lock.get(key), kind):
            raise LockError(f"the lock {path} is damaged: '{key}' is missing or no {kind.__name__}. Write it again with --saveLock.")
    if not all(isinstance(t, dict) for t in lock["tactics"].values()) or not all(isinstance(n, str) for n in lock["unfused"]):
        raise LockError(f"the lock {path} is damaged: 'tactics' holds objects and 'unfused' names. Write it again with --saveLock.")


def check_lock(lock: Mapping[str, Any], source: Network, config: BuildConfig, backend: Backend) -> None:
    """Raises LockError, naming every difference, when the build does not match the lock."""
    moved = []

    def compare(subject: str, was: Any, now: Any) -> None:
        if was != now:
            moved.append(f"{subject}: was {_shorten_around(was, now)}, is {_shorten_around(now, was)}")

    compare("the model", lock["model"], compute_model_digest(source))
    compare("the backend", lock["backend"], backend.name)
    compare("the machine", lock["machine"], backend.key())
    compare("the number of threads", lock["threads"], backend.threads)
    for k in _OPTIONS:
        was, now = lock["options"].get(k), _convert_tuples_to_lists(getattr(config, k))
        if k == "precisions" and isinstance(was, list) and sorted(map(str, was)) == sorted(now):
            continue  # permissions have no order
        compare(f"the option {k}", was, now)
    for name, pinned in lock["tactics"].items():
        try:
            now = _convert_tactic_to_json(name)
        except BuildError:
            moved.append(f"the tactic {name} is gone")
            continue
        for part, was in pinned.items():
            compare(f"{name}, {part}", was, now.get(part))
    if moved:
        raise LockError(_format_text(moved))


def check_locked_tail(lock: Mapping[str, Any], tail: HostTail | None) -> None:
    """Raises LockError when the layers that run on the host are others than the lock's."""
    if lock.get("tail") != (None if tail is None else tail.digest):
        raise LockError(_format_text(["the layers that run on the host, because their sizes depend on the data, are others"]))


def build_locked_plan(
    lock: Mapping[str, Any], source: Network, lowered: Network, profiles: Sequence[Profile], backend: Backend, config: BuildConfig
) -> EnginePlan:
    """The engine that the lock describes, built without timing. Raises LockError if it would differ."""
    if [_convert_tuples_to_lists(p.shapes) for p in profiles] != lock["profiles"]:
        raise LockError(_format_text(["the profiles are others"]))
    by_name = {layer.name: layer for layer in lowered.layers}
    for name in lock["unfused"]:
        if name not in by_name:
            raise LockError(_format_text([f"the layer '{name}' is gone from the lowered network: a pass works differently"]))
        unfuse(lowered, by_name[name])
    try:
        choices = {entry["name"]: _read_choice(entry) for entry in lock["layers"]}
        if count := _read_concurrent_samples(lock, lowered, profiles, config):  # choices are per sample: one thread per sample, or all threads
            single, own = [p.of_one_sample() for p in profiles], backend if count == 1 else get_backend(backend.name, threads=1)
            plan = make_sample_parallel(_replay(choices, source, lowered, single, own, config), profiles, backend, count)
            backend.activate()
        else:
            plan = _replay(choices, source, lowered, profiles, backend, config)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise LockError(f"the lock is damaged: {e!r}. Write it again with --saveLock.") from e
    moved = _list_differences(lock, plan)
    if moved or plan_digest(plan) != lock["digest"]:
        raise LockError(_format_text(moved or ["the lowered network is another: a pass or a weight changed"]))
    return plan


def _read_concurrent_samples(lock: Mapping[str, Any], lowered: Network, profiles: Sequence[Profile], config: BuildConfig) -> int:
    """The number of samples that the locked engine runs at once; 0: a whole batch. Raises LockError if the options or the network forbid that."""
    count = int(lock["arenas"][0].get("lanes", 0))
    if not 0 <= count <= MOST_CONCURRENT_SAMPLES:
        raise ValueError(f"{count} concurrent samples")
    kept = ("parallel" if count > 1 or lock["threads"] == 1 else "sequential") if count else "together"
    if config.samples not in ("auto", kept):
        raise LockError(_format_text([f"it has --samples={kept}, the build --samples={config.samples}"]))
    if count and (why := why_samples_touch(lowered, {n: s[2] for n, s in profiles[0].shapes.items()})) is not None:
        raise LockError(_format_text([f"its samples run separately, but they are not independent: {why}"]))
    return count


def _replay(choices: dict[str, Choice], source: Network, lowered: Network, profiles, backend: Backend, config: BuildConfig) -> EnginePlan:
    layers = bound_layers(lowered, bind_profile_symbols(lowered, profiles[0], OPT))
    picked = {}
    for name, layer in layers.items():
        if name not in choices:
            raise LockError(_format_text([f"the lowered network has a layer '{name}' that the lock does not have"]))
        picked[name] = _find_option(choices[name], layer, backend)
    reformats = {name: c for name, c in choices.items() if name not in layers}
    net, chosen = with_reformats(lowered, picked, _LockedReformats(reformats, backend))
    moved = bound_layers(net, bind_profile_symbols(net, profiles[0], OPT))
    for name in chosen.keys() - picked.keys():
        if name not in reformats:
            raise LockError(_format_text([f"the engine needs a reformat '{name}' that the lock does not have"]))
        chosen[name] = _find_option(reformats[name], moved[name], backend)
    return assemble(net, chosen, profiles, config, source, KernelMemory(backend))


class _LockedReformats:
    """Reformat options taken from a lock."""

    def __init__(self, choices: Mapping[str, Choice], backend: Backend):
        self.choices, self.backend = choices, backend

    def option(self, t: Tensor, source: Operand, target: Operand, *, out_of_place: bool = False) -> Option:
        wanted = ((source.format, source.dtype.name),), ((target.format, target.dtype.name),)
        same = [c for c in self.choices.values() if (c.inputs, c.outputs) == wanted and not (out_of_place and c.inplace)]
        own = [c for n, c in self.choices.items() if c in same and n == f"{t.name}_{target.format}_{target.dtype}"]
        for c in [*own, *same]:
            tactic = _find_tactic(c)
            kernel: Any = _Named(c)  # only its names are read: the engine's kernels are planned when it is loaded
            return Option(tactic, Signature((source,), (target,), c.inplace), c.config, kernel, 0)
        raise LockError(_format_text([f"%{t.name} needs a reformat from {source} to {target} that the lock does not have"]))


class _Named:
    """The names of a locked reformat's kernel."""

    def __init__(self, c: Choice):
        self.implementation, self.rtol, self.deterministic = c.implementation, c.rtol, c.deterministic


def _find_tactic(choice: Choice) -> Tactic:
    """The tactic named by a choice. Raises LockError for an unknown name."""
    try:
        return get_tactic(choice.tactic)
    except BuildError as e:
        raise LockError(_format_text([str(e)])) from e


def _find_option(choice: Choice, layer, backend: Backend) -> Option:
    tactic = _find_tactic(choice)
    try:
        signature = make_signature(choice, layer)
        reason = tactic.why_not(layer) or tactic.refuses(layer, signature, backend)
        if reason is not None:
            raise LockError(_format_text([f"{choice.tactic} refuses '{layer.name}' now: {reason}"]))
        kernel = tactic.plan(layer, signature, choice.config, backend)
    except (PlanRefused, BackendError, EngineError) as e:
        raise LockError(_format_text([f"{choice.tactic} cannot run '{layer.name}' as locked: {e}"])) from e
    if kernel.implementation != choice.implementation:
        raise LockError(_format_text([f"{choice.tactic} runs '{layer.name}' by {kernel.implementation}, locked is {choice.implementation}"]))
    return Option(tactic, signature, choice.config, kernel, 0)


def _list_differences(lock: Mapping[str, Any], plan: EnginePlan) -> list[str]:
    now = [{"name": layer.name, **_convert_choice_to_json(plan.choices[layer.name])} for layer in plan.network.layers]
    moved = [f"layer '{b['name']}' differs" for a, b in zip(lock["layers"], now, strict=False) if a != b]
    if len(lock["layers"]) != len(now):
        moved.append(f"the engine has {len(now)} layers, the lock {len(lock['layers'])}")
    if lock["arenas"] != [_convert_tuples_to_lists(a.data()) for a in plan.arenas]:
        moved.append("the memory plan is another")
    return moved


def _format_text(moved: list[str]) -> str:
    return (
        "the lock cannot be kept, because something moved:\n  "
        + "\n  ".join(moved)
        + "\nBuild without --lock and save a new one, or bring back what it names."
    )


def _shorten_around(v: Any, other: Any) -> str:
    """A value in at most 160 characters, from shortly before its first difference from `other`."""
    text, their = (x if isinstance(x, str) else json.dumps(x) for x in (v, other))
    if len(text) == 64 and " " not in text:
        return text[:16] + "..."
    same = next((i for i, (a, b) in enumerate(zip(text, their, strict=False)) if a != b), min(len(text), len(their)))
    begin = 0 if len(text) <= 160 else max(0, min(same - 40, len(text) - 160))
    return ("..." if begin else "") + text[begin : begin + 160]


def _convert_tactic_to_json(name: str) -> dict[str, Any]:
    t = get_tactic(name)
    return {"sources": compute_source_digest(t), "library": t.library_version(), "version": t.version}


def _convert_choice_to_json(c: Choice) -> dict[str, Any]:
    return _convert_tuples_to_lists(vars(c))


def _read_choice(entry: Mapping[str, Any]) -> Choice:
    return Choice(
        tactic=str(entry["tactic"]),
        config=tuple((str(k), v if isinstance(v, int) else str(v)) for k, v in entry["config"]),
        inputs=tuple(None if o is None else (str(o[0]), str(o[1])) for o in entry["inputs"]),
        outputs=tuple((str(f), str(d)) for f, d in entry["outputs"]),
        inplace=tuple((int(i), int(o)) for i, o in entry["inplace"]),
        implementation=str(entry["implementation"]),
        rtol=float(entry["rtol"]),
        deterministic=bool(entry["deterministic"]),
    )


def _convert_tuples_to_lists(v: Any) -> Any:
    """Converts tuples to lists, so that a value equals its JSON round trip."""
    if isinstance(v, Mapping):
        return {str(k): _convert_tuples_to_lists(x) for k, x in v.items()}
    if isinstance(v, list | tuple):
        return [_convert_tuples_to_lists(x) for x in v]
    return v
