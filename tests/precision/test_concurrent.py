"""Samples on several threads: the same values in the same order, the first error, and samples that are loaded when they are needed."""

import numpy as np
import pytest
from test_calibration import samples, small_network

from whet.builder.verify.engine_values import EngineRun
from whet.builder.verify.segments import SegmentedRuns
from whet.precision import calibrate, find_quantization_sites
from whet.precision.concurrent import map_concurrently
from whet.precision.sensitivity import Analysis


def test_results_keep_their_order_and_few_items_are_taken_ahead():
    taken = []

    def items():
        for i in range(20):
            taken.append(i)
            yield i

    results = map_concurrently(lambda i: i * i, items(), 3)
    assert next(results) == 0
    assert len(taken) == 3
    assert list(results) == [i * i for i in range(1, 20)]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_is_raised(workers):
    def fail(i):
        if i >= 4:
            raise ValueError(str(i))
        return i

    with pytest.raises(ValueError, match="4"):
        list(map_concurrently(fail, range(9), workers))


def test_ranges_do_not_depend_on_the_number_of_threads():
    net = small_network()
    names = find_quantization_sites(net).names()
    one, four = (calibrate(net, samples(6), run=EngineRun(net, names), workers=n) for n in (1, 4))
    assert one.tensors == four.tensors


def test_an_engine_runs_samples_of_several_threads_and_ignores_other_inputs():
    net = small_network()
    run, data = EngineRun(net, [t.name for t in net.outputs]), [{**f, "other": np.zeros(3, np.float32)} for f in samples(8)]
    want = [run(f) for f in data]
    got = list(map_concurrently(run, data * 4, 4))
    for k, values in enumerate(got):
        for name, a in values.items():
            np.testing.assert_array_equal(a, want[k % 8][name])


def test_sensitivities_do_not_depend_on_the_number_of_threads():
    net, data = small_network(), list(samples(5))
    ranges = calibrate(net, data)

    def rank(workers, count):
        return Analysis(net, "int8", data, SegmentedRuns(net, data), ranges, workers=workers).rank_layers(count=count)

    assert rank(1, 0) == rank(4, 0)
    assert rank(1, 2) == rank(4, 2)
    assert rank(1, 2) == Analysis(net, "int8", data[:2], SegmentedRuns(net, data[:2]), ranges).rank_layers()
