"""Opens one (mutated) engine as a user would, runs it if it opens, and reports the outcome."""

from __future__ import annotations

import warnings

import numpy as np
from mutants import MARK

from whet.errors import BackendError, EngineError, WhetError
from whet.inspector import engine_information, explain
from whet.network import Network, parse_network, parse_type
from whet.ops._cost import count_network_operations
from whet.runtime import Runtime
from whet.tactics import TACTICS

MEMORY = 256 << 20  # arena bytes up to which an opened engine is run
WORK = 2_000_000_000  # operations up to which it is run


TOLERANCE = 0.05  # of ||answer||: a plausible edit may store f32 tensors in 16 bits, and the probe has a bound of its own


def attempt(data: bytes, answers: dict[str, np.ndarray] | None = None) -> str:
    """`refused: ...`, `opened and ran`, `opened: ...` (one of whet's run-time errors), or `BAD ...`.

    `answers` are those of the engine that `data` was made of (see `answers_of`), if an edit must keep them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = Runtime().load(data)
            outcome = _run(engine)
            if answers is not None and outcome == "opened and ran" and (why := _other_answers(engine, answers)):
                return f"BAD other answers than the unmodified engine: {why}"
            return outcome
    except (EngineError, BackendError) as e:  # the latter: a tactic of a library that this machine does not have
        return f"BAD MemoryError: {e}" if "MemoryError" in str(e) else f"refused: {e}"
    except Exception as e:  # noqa: BLE001 - any other exception is what is looked for
        return f"BAD {type(e).__name__}: {e}"


def answers_of(data: bytes) -> dict[str, np.ndarray]:
    """The outputs of a good engine for `_feed`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Runtime().load(data)
    return engine.create_context(0).run(_feed(engine))


def _feed(engine) -> dict[str, np.ndarray]:
    rng, plan = np.random.default_rng(5), engine.plan
    given = plan.profiles[0].shapes if plan.profiles else {}
    feed = {}
    for t in plan.network.inputs:
        shape = given[t.name][1] if t.name in given else tuple(t.shape)
        feed[t.name] = (rng.standard_normal(shape) if t.dtype.is_float else rng.integers(0, 2, shape)).astype(t.dtype.numpy)
    return feed


def _other_answers(engine, answers: dict[str, np.ndarray]) -> str:
    """How the engine's outputs differ from `answers`; "" if they do not, or its profiles have other shapes."""
    got = engine.create_context(0).run(_feed(engine))
    if set(got) != set(answers):
        return f"outputs {sorted(got)}"
    for name, want in answers.items():
        a, b = np.asarray(got[name], np.float64), np.asarray(want, np.float64)
        if a.shape != b.shape:
            continue
        finite = np.isfinite(b)
        if not np.array_equal(np.isfinite(a), finite):
            return f"'{name}' is finite elsewhere"
        if (error := np.linalg.norm(a[finite] - b[finite])) > TOLERANCE * (np.linalg.norm(b[finite]) or 1.0):
            return f"'{name}' differs by {error:.3g} of {np.linalg.norm(b[finite]):.3g}"
    return ""


def refuse_marked_configs(patch=None) -> None:
    """Makes every tactic report (as RuntimeError) a config to plan whose values have text that no tactic lists."""
    for t in TACTICS.values():
        kind = type(t)
        if "plan" in vars(kind) and not hasattr(kind.plan, "watched"):
            (patch.setattr if patch is not None else setattr)(kind, "plan", _watched(kind.plan))


def _watched(plan):
    def watched(self, layer, signature, config, backend):
        if any(MARK in str(v) for _, v in config):
            raise RuntimeError(f"{self.name} plans {config}")  # no error of whet: it is reported as bad
        return plan(self, layer, signature, config, backend)

    watched.watched = True
    return watched


def _run(engine) -> str:
    plan = engine.plan
    engine_information(plan)
    explain(plan)
    engine.describe()
    env = {s: 8 for s in plan.network.symbols()}
    needed = max(a.total * max(a.concurrent_samples, 1) for a in plan.arenas)
    if needed > MEMORY or any(count_network_operations(p.network, env) > WORK for p in (plan, *plan.others)):
        return "opened: too large to run"
    for k in range(max(1, len(plan.profiles))):
        shapes = plan.profiles[k].shapes if plan.profiles else {}
        feed = {}
        for t in plan.network.inputs:
            shape = shapes[t.name][1] if t.name in shapes else tuple(t.shape)
            feed[t.name] = np.zeros(shape, t.dtype.numpy)
        try:
            engine.create_context(k).run(feed)
        except EngineError as e:  # a weight is read and checked when it is first needed
            return f"refused at its first use: {e}"
        except WhetError as e:
            return f"opened: {type(e).__name__}: {e}"
    return "opened and ran"


def base_networks() -> list[Network]:
    """Small `source` networks whose engines together contain most parts of the format."""
    residual = parse_network(
        """
        network residual source
        in %x: f32[N,3,12,12]
        const %w1: f32[16,3,3,3] = seed(1)
        const %scale: f32[16] = seed(2)
        const %mean: f32[16] = seed(3)
        const %var: f32[16] = [1.5, 1.5, 1.5, 1.5, 2.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]
        const %w2: f32[16,16,3,3] = seed(4)
        const %w3: f32[10,16] = seed(5)
        const %b3: f32[10] = seed(6)
        %a = Conv(%x, %w1, pads=(1, 1, 1, 1)) from "conv1"
        %b = BatchNormalization(%a, %scale, %mean, %mean, %var) from "bn1"
        %c = Relu(%b) from "relu1"
        %d = Conv(%c, %w2, pads=(1, 1, 1, 1)) from "conv2"
        %e = Add(%d, %c) from "add"
        %f = Relu(%e) from "relu2"
        %g = GlobalAveragePool(%f) from "pool"
        %h = Flatten(%g) from "flatten"
        %y = Gemm(%h, %w3, %b3, transB=1) from "fc"
        out %y
        """
    )
    moves = Network("moves")
    x = moves.add_input("x", parse_type("f32[2,6,8]"))
    w = moves.constant(np.random.default_rng(1).standard_normal((8, 8)).astype("f4"), "w")
    q = moves.add("MatMul", x, w, sources=["q"])
    t = moves.add("Transpose", q, perm=(0, 2, 1), sources=["turn"])
    s = moves.add("Softmax", moves.add("MatMul", q, t, sources=["scores"]), axis=-1, sources=["softmax"])
    m = moves.add("MatMul", s, q, sources=["mix"])
    z = moves.add("Concat", m, moves.add("Sigmoid", x, sources=["gate"]), axis=2, sources=["join"])
    moves.mark_output(moves.add("Reshape", z, moves.constant(np.array([2, -1], "i8"), "shape"), sources=["flat"]), "y")
    return [residual, moves]


def base_engines() -> list[bytes]:
    """Engines of `base_networks`, built without timing; the first with packed weights, the third with two profiles that have their own networks,
    the last in a per-sample mode.
    """
    from whet.builder import BuildConfig, build
    from whet.builder.batching.per_profile import join_plans
    from whet.engine import engine_bytes

    def at(net, n):
        return {t.name: tuple(d if isinstance(d, int) else n for d in t.shape) for t in net.inputs}

    def plan_of(net, *profile, **options):
        profiles = (tuple(at(net, n) for n in profile),) if any(not t.type.static for t in net.inputs) else ()
        return build(net, BuildConfig(optimization_level=1, timing_cache="", profiles=profiles, threads=1, **options))

    residual, moves = base_networks()
    first = plan_of(residual, 1, 2, 4)
    apart = join_plans([plan_of(base_networks()[0], 1, 1, 1), plan_of(base_networks()[0], 2, 4, 4, passes=("none",))])
    assert apart.others, "the profiles' networks differ"
    dealt = plan_of(base_networks()[0], 1, 3, 4, samples="parallel")
    assert dealt.arenas[0].concurrent_samples, "a per-sample mode was selected"
    plans = [(first, Runtime().load(first).packed_weights()), (plan_of(moves), None), (apart, None), (dealt, None)]
    return [engine_bytes(plan, packed_weights=packed) for plan, packed in plans]
