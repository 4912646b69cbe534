"""Measuring policies: rounds per comparison, when a candidate is dropped, which differences are significant. All such constants are here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal


@dataclass(frozen=True)
class Budget:
    """Seconds that limit the rounds of a stage, between its fewest and its most.

    `per` "comparison": of all candidates together; "candidate": on average of each; "fastest": of the fastest candidate, however long others take.
    """

    seconds: float = inf
    per: Literal["comparison", "candidate", "fastest"] = "candidate"


@dataclass(frozen=True)
class Block:
    """Consecutive runs of one candidate in a round: at most `most`, about `seconds` long; the first `discard` of them do not count. The median
    of a block is one sample."""

    seconds: float = 0.0
    most: int = 1
    discard: int = 0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Rounds with one drop-out rule. `rounds` are the fewest and the most.

    After round k a candidate is dropped when the lower quartile of its samples exceeds `drop[k]` (the last factor stays) times the leader's
    median. At the end of the stage candidates with a median above `drop_at_end` times the leader's are dropped. With `until_decided` the stage
    is repeated up to so often, while the leader does not differ significantly from the incumbent.
    """

    rounds: tuple[int, int]
    budget: Budget = Budget()
    drop: tuple[float, ...] = ()
    drop_at_end: float = inf
    until_decided: int = 0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How `compare` measures, and which differences count: those above max(resolution x fastest, min(noise, noise_limit x fastest)).

    Noise is the spread of the samples (statistics.noise_between), or with `accept_errors` so many standard errors of the difference.
    """

    stages: tuple[Stage, ...]
    warmup_rounds: int = 1  # uncounted runs of each candidate; their times determine the rounds within the budget
    block: Block = Block()
    keep_incumbent: bool = False  # the first candidate is never dropped: the others have to beat it
    drop_after_warmup: float = inf  # times the fastest
    drop_after_seconds: float = 0.0  # that a candidate has run before it may be dropped
    hopeless: tuple[float, float] = (inf, inf)  # (factor, seconds): a run beyond both is explained by no disturbance, so one such run is enough
    long: Policy | None = None  # used instead if the fastest warm-up run takes at least `long_seconds`
    long_seconds: float = inf
    attempts: float = 1  # a comparison under external load is repeated up to so often
    pool: bool = True  # samples of disturbed attempts are pooled; else the least disturbed attempt counts
    resolution: float = 0.0
    noise_limit: float = inf
    paired: bool = True  # noise of the differences round by round, from which common slowdowns cancel
    accept_errors: float | None = None
    decide_errors: float = 0.0  # the same, for a stage `until_decided` to end early

    def tolerance(self, fastest: float, noise: float) -> float:
        """The largest difference from `fastest` that does not count, in its unit."""
        return max(self.resolution * fastest, min(noise, self.noise_limit * fastest))

    def with_rounds(self, most: int) -> Policy:
        """The same policy with at most so many rounds in its one stage, and in that for long candidates."""
        (stage,) = self.stages
        fewest = min(stage.rounds[0], most)
        longer = None if self.long is None else self.long.with_rounds(most)
        return replace(self, stages=(replace(stage, rounds=(fewest, most)),), long=longer)

    def with_seconds(self, seconds: float) -> Policy:
        """The same policy with another time budget for its one stage."""
        (stage,) = self.stages
        return replace(self, stages=(replace(stage, budget=replace(stage.budget, seconds=seconds)),))


#: Disturbed measurements that one build repeats. On a machine that is never idle further repetitions would not help.
PATIENCE = 6

# --- options of a layer -------------------------------------------------------------------------------------------------------------------

_LAYER_STAGE = Stage(
    rounds=(3, 8),  # three: a median that one interruption does not move. BuildConfig.avg_timing sets the most
    budget=Budget(0.02, "fastest"),  # 20 ms of samples: beyond it more rounds change no selection
    drop=(4.0, 4.0, 1.5, 1.2),  # microsecond kernels: one or two samples may each be several times too long
)
_LONG_LAYERS = Policy(
    stages=(replace(_LAYER_STAGE, drop=(2.0, 1.3, 1.2)),),  # from a millisecond on a disturbance of microseconds does not show
    drop_after_warmup=4.0,  # first touches of memory and code never take that much of a long kernel
    hopeless=(20.0, 0.020),
    attempts=inf,
    resolution=0.005,
)
#: Options of one layer on their own buffers, with caches as the network leaves them.
LAYERS = Policy(
    stages=(_LAYER_STAGE,),
    hopeless=(20.0, 0.020),  # interruptions take a few milliseconds; reference loops take a second, others half a millisecond
    long=_LONG_LAYERS,
    long_seconds=1e-3,
    attempts=inf,  # limited by PATIENCE
    resolution=0.005,  # smaller differences between layers timed alone do not show in the network
)
#: Reformats: simple copies with times that differ by multiples.
REFORMAT_ROUNDS = 2
#: A fused layer against the chain of its parts. Four rounds are enough to see that the parts are slower, as they mostly are.
FUSED_ROUNDS = 4
UNFUSED = Policy(stages=LAYERS.stages, resolution=0.03)  # 3 %: the parts' candidates are timed in full only if they clearly win

#: Finalists of a layer with weights out of the L2 cache.
COLD_WEIGHTS = Policy(
    stages=(Stage(rounds=(1, 8), drop=(inf, 1.5)),),  # finalists are within 25 % with warm weights: 1.5 after two rounds is no noise
    resolution=0.005,
)
COLD_FINALIST = 1.25  # times the fastest with warm weights: options up to here are timed with cold weights too
COLD_FINALISTS = 8  # of a layer at most; each needs copies of its weights

# --- kernels in the network ---------------------------------------------------------------------------------------------------------------

_DECIDE = Stage(rounds=(5, 12), budget=Budget(0.03, "comparison"), until_decided=3)
#: Kernels exchanged in the whole network if launches overlap; the incumbent is the kernel selected by its own time. Replays of a GPU
#: graph scatter by a few tenths of a percent, so factors are close to 1; 30 ms per stage bound the time of slow networks.
IN_NETWORK = Policy(
    stages=(
        Stage(rounds=(4, 4), drop_at_end=1.04),
        Stage(rounds=(0, 8), budget=Budget(0.03, "comparison"), drop_at_end=1.01),
        _DECIDE,
    ),
    keep_incumbent=True,
    resolution=0.0007,  # smaller gains are below the resolution of a replay
    accept_errors=1.0,
    decide_errors=2.0,
)
IN_NETWORK_NEAR = 1.015  # of the fastest: tried again once other kinds of layers have changed
#: The same for candidates that were near before: one stage, then the decision.
IN_NETWORK_AGAIN = replace(IN_NETWORK, stages=(Stage(rounds=(4, 4), drop_at_end=IN_NETWORK_NEAR), _DECIDE))

#: Two whole engines that differ in their layers' kernels, compared layer by layer if launches do not overlap.
LAYER_PAIRS = Policy(
    stages=(Stage(rounds=(3, 7), budget=Budget(1.5, "comparison")),),
    warmup_rounds=0,  # both have run
    resolution=0.03,  # launches one by one scatter by 2 to 3 %
    noise_limit=0.0,
)

# --- whole engines ------------------------------------------------------------------------------------------------------------------------

# After one round a candidate leaves at 1.5 times the leader; four rounds narrow that to 1.06, the largest difference that clocks and caches
# were seen to make between engines of equal speed.
_ENGINE_DROP = (1.5, 1.2, 1.1, 1.06)
_ENGINE_DROP_S = 0.02  # an interruption takes a few milliseconds, which is all of a short engine's first run

#: Different whole engines of one build.
ENGINES = Policy(
    stages=(Stage(rounds=(3, 30), budget=Budget(0.8), drop=_ENGINE_DROP),),
    drop_after_seconds=_ENGINE_DROP_S,
    attempts=2,
    resolution=0.003,  # whole engines repeat to three thousandths
)
#: Of the fastest engine: engines up to here are re-timed together with the engine of kernels selected in the network.
ENGINE_NEAR = 1.06
#: Engines of different precisions: they may nearly tie, and the selection decides about accuracy too, so more rounds.
PRECISIONS = Policy(
    stages=(Stage(rounds=(3, 40), budget=Budget(3.0), drop=_ENGINE_DROP),),
    drop_after_seconds=_ENGINE_DROP_S,
    resolution=0.003,
    paired=False,  # load slows down integer and float engines, or one and many threads, differently
    noise_limit=0.02,  # engines that differ by a fiftieth are not equal, however much they scatter
)
#: A batch at once or sample by sample: engines differ in how they use the threads, so their times scatter differently.
SAMPLE_MODES = replace(PRECISIONS, stages=(Stage(rounds=(3, 30), budget=Budget(1.5), drop=_ENGINE_DROP),))
#: One engine on several thread counts. The first run after another count builds the thread pool and does not count. Runs on several threads scatter
#: by multiples where the system places the threads badly: 3 % of the fastest decide nevertheless.
THREAD_COUNTS = Policy(stages=(Stage(rounds=(5, 30), budget=Budget(0.8)),), block=Block(discard=1), resolution=0.003, noise_limit=0.03)
#: Times the whole engine: a layer's recorded time beyond it was taken under load. Caches may be colder for a layer alone than in the network.
CONTRADICTION = 1.5
#: Layers of the kept engine, for the report; a long engine has three runs.
LAYER_PROFILE = Policy(stages=(Stage(rounds=(3, 5), budget=Budget(1.0)),), warmup_rounds=0)
#: Layers of several engines, interleaved.
LAYERS_SIDE_BY_SIDE = Policy(stages=(Stage(rounds=(5, 25), budget=Budget(1.0)),), warmup_rounds=1)
PROFILE_ATTEMPTS = 3  # of layer times that contradict the whole engine's; load that outlasts three will not pass

# --- measurements for users ---------------------------------------------------------------------------------------------------------------

#: Trials of a search against the original, until the seconds that the recipe grants are used. Blocks of 4 ms leave caches and clocks
#: as the engine alone would; the first run of a block finds another engine's caches.
TRIALS = Policy(
    stages=(Stage(rounds=(12, 400)),), warmup_rounds=4, block=Block(4e-3, 50, discard=1), attempts=3, pool=False,
)  # fmt: skip
#: Pruned engines against the original one.
PRUNED = Policy(stages=(Stage(rounds=(5, 100_000)),), warmup_rounds=2, block=Block(10e-3, 20))
#: Engines in benchmarks: all rounds for all of them, since every time is reported.
BENCHMARKS = Policy(stages=(Stage(rounds=(7, 200), budget=Budget(6.0, "comparison")),), warmup_rounds=3)
