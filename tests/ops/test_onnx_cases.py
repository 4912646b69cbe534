"""ONNX's node cases with shapes as inputs: with these as constants, as in models, each must give the expected outputs."""

import warnings

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx
from whet.ops import run_network

FLOOR = 290  # number of cases that ran at the time of writing
LOOPS = ("test_loop", "test_range_")  # their definitions contain a Loop
TRAINING = "test_training_dropout"  # random numbers


def as_array(v):
    return numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v)


def cases():
    """Cases with one data set that whet refuses because a shape is unknown."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are computed on import, overflows and all
        found = [c for c in load_model_tests(kind="node") if c.model is not None and c.data_sets and len(c.data_sets) == 1]
    for case in found:
        try:
            network_from_onnx(case.model)
        except UnsupportedError as e:
            if "computed" in str(e):
                yield case
        except FrontendError:
            pass


def with_constants(case, fed):
    """The case's model with all inputs but the first `fed` as weights."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for info, v in list(zip(model.graph.input, case.data_sets[0][0], strict=True))[fed:]:
        model.graph.initializer.append(numpy_helper.from_array(as_array(v), info.name))
    del model.graph.input[fed:]
    return model


def read(case):
    """(network, number of fed inputs) with as few constants as possible; (None, the reason) if no number suffices."""
    reason = ""
    for fed in (1, 0):
        try:
            return network_from_onnx(with_constants(case, fed)), fed
        except UnsupportedError as e:
            reason = str(e)
    return None, reason


def test_cases_with_constant_shapes():
    ran, wrong = 0, []
    for case in cases():
        net, fed = read(case)
        if net is None:
            if not case.name.startswith((*LOOPS, TRAINING)):
                wrong.append(f"{case.name}: {fed}")
            continue
        feeds, wants = case.data_sets[0]
        got = run_network(net, dict(zip((t.name for t in net.inputs), map(as_array, feeds[:fed]), strict=True)))
        wants = [w for want in wants for w in (want if isinstance(want, list) else [want])]  # a sequence is read as one output per element
        for a, want in zip(got.values(), map(as_array, wants), strict=True):
            if a.dtype != want.dtype or a.shape != want.shape:
                wrong.append(f"{case.name}: {a.dtype}{a.shape}, not {want.dtype}{want.shape}")
            elif not np.allclose(a.astype(np.float64), want.astype(np.float64), rtol=1e-4, atol=2e-5, equal_nan=True):
                wrong.append(f"{case.name}: values differ")
        ran += 1
    assert not wrong, "\n".join(wrong)
    assert ran >= FLOOR
