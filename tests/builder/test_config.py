"""Build options are checked at construction: a string in place of a tuple would be read letter by letter."""

import pytest

from whet.builder.config import BuildConfig
from whet.errors import UsageError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precisions": "fp16"}, r"a tuple of names: \('fp16',\)"),
        ({"precisions": ("fp61",)}, "'fp61' is none of fp32, .* Did you mean 'fp16'"),
        ({"passes": "-fuse_silu"}, "a tuple of names"),
        ({"precision_constraints": "obay"}, "Did you mean 'obey'"),
        ({"sparsity": "on"}, "none of disable, enable, force, force:positional"),
        ({"profiling_verbosity": "verbose"}, "none of layer_names_only"),
        ({"optimization_level": -1}, "the least is 0"),
        ({"avg_timing": 0}, "the least is 1"),
        ({"threads": -2}, "the least is -1"),
    ],
)
def test_invalid_option_values_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        BuildConfig(**options)


def test_values_from_the_flags_are_accepted():
    BuildConfig(precisions=("fp32", "fp16", "bf16", "int8", "fp8", "best"), threads=-1, optimization_level=5)


def test_levels_end_at_five():
    with pytest.raises(UsageError, match=r"BuildConfig\.optimization_level: 6 is too large; the largest is 5"):
        BuildConfig(optimization_level=6)


@pytest.mark.parametrize(("seed", "said"), [(-1, "-1 is too small; the least is 0"), (2**32, "4294967296 is too large; the largest is 4294967295")])
def test_a_seed_has_32_bits(seed, said):
    with pytest.raises(UsageError, match=f"BuildConfig.seed: {said}"):
        BuildConfig(seed=seed)
    assert BuildConfig(seed=2**32 - 1).seed == 2**32 - 1
