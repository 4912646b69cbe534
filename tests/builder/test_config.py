"""Options of a build are checked where they are made: a string in place of a tuple would be read letter by letter."""

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
        ({"sparsity": "on"}, "none of disable, enable, force"),
        ({"profiling_verbosity": "verbose"}, "none of layer_names_only"),
        ({"optimization_level": -1}, "the least is 0"),
        ({"avg_timing": 0}, "the least is 1"),
        ({"threads": -2}, "the least is -1"),
    ],
)
def test_values_that_an_option_does_not_take_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        BuildConfig(**options)


def test_what_the_flags_give_is_taken():
    BuildConfig(precisions=("fp32", "fp16", "bf16", "int8", "fp8", "best"), threads=-1, optimization_level=5)
