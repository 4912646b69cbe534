"""ONNX's node cases with shapes as inputs: with these as constants, as in models, each must give the expected outputs."""

import warnings
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx
from whet.ops import is_data_sized, run_network

FLOOR = 290  # number of cases that ran at the time of writing
# Modules whose cases have shapes as inputs; the others take 20 s to compute and read, and none of their cases is taken.
WITH_SHAPES = (
    "affinegrid", "blackmanwindow", "center_crop_pad", "col2im", "constantofshape", "cumprod", "cumsum", "dft", "dropout", "expand", "hammingwindow",
    "hannwindow", "loop", "maxunpool", "melweightmatrix", "onehot", "pad", "rangeop", "reduce_log_sum", "reduce_log_sum_exp", "reducel1", "reducel2",
    "reducemax", "reducemean", "reducemin", "reduceprod", "reducesum", "reducesumsquare", "reshape", "resize", "slice", "split", "splittosequence",
    "squeeze", "stft", "tile", "topk", "trilu", "unsqueeze", "upsample",
)  # fmt: skip
LOOPS = ("test_loop", "test_range_")  # their definitions contain a Loop
TRAINING = "test_training_dropout"  # random numbers


def as_array(v):
    return numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v)


def load_cases(modules):
    """The cases of these modules of `onnx.backend.test.case.node`, or of all; those of modules that another test imported are among them."""
    from onnx.backend.test.case import node
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are computed on import, overflows and all
        if modules is None:
            return load_model_tests(kind="node")
        for name in modules:
            if find_spec(f"{node.__name__}.{name}") is not None:  # older versions of onnx have fewer
                import_module(f"{node.__name__}.{name}")
        return node._NodeTestCases


def cases(modules):
    """Cases with one data set that whet refuses because a shape is unknown, or of which a size depends on the data."""
    for case in load_cases(modules):
        if case.model is None or not case.data_sets or len(case.data_sets) != 1:
            continue
        try:
            if any(is_data_sized(layer) for layer in network_from_onnx(case.model).layers):
                yield case
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


@pytest.mark.parametrize("modules", [pytest.param(WITH_SHAPES, id="with shapes"), pytest.param(None, id="all", marks=pytest.mark.slow)])
def test_cases_with_constant_shapes(modules):
    ran, wrong = 0, []
    for case in cases(modules):
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
