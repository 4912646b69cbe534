"""The ONNX standard's backend tests (nodes, simple models, models of PyTorch): each passes, or is listed with its reason in
onnx_backend_refusals.txt.

Cases with sizes, axes and counts as inputs run with these as weights, as models have them: an engine needs shapes in advance.
`python tests/frontends/test_onnx_backend_suite.py` rewrites the list.
"""

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, OptionalProto, SequenceProto, TensorProto, numpy_helper

from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx
from whet.frontends._onnx_convert import convert
from whet.ops import run_network

LIST = Path(__file__).with_name("onnx_backend_refusals.txt")
SHARE = 0.98  # of the cases of tensors and control flow that must pass (99.1 % when this was written)
# Cases outside of networks of tensors: strings, sequences and optional values, classical machine learning, training, decoding of files.
OTHER = re.compile(
    r"holds strings|is an? (sequence|optional|map)|ai\.onnx\.(ml|preview)|ImageDecoder|TfIdfVectorizer|String|RegexFullMatch|"
    r"random numbers|drops values|element type (STRING|UNDEFINED)"
)


FILES = Path(onnx.__file__).parent / "backend" / "test" / "data"


@dataclass
class Case:
    """A test with its model and data in files."""

    name: str
    model: ModelProto
    data_sets: list
    rtol: float = 1e-3
    atol: float = 1e-7


def array(v):
    return numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v)


def arrays(values):
    """The arrays of values, those of sequences and of optional values one after the other."""
    return [a for v in values for a in (arrays(v) if isinstance(v, list) else [array(v)])]


def stored(path, info):
    """The value of a file of test data, of the type of `info`."""
    kind = info.type.WhichOneof("value")
    proto = {"sequence_type": SequenceProto, "optional_type": OptionalProto}.get(kind, TensorProto)()
    proto.ParseFromString(path.read_bytes())
    return {"sequence_type": numpy_helper.to_list, "optional_type": numpy_helper.to_optional}.get(kind, numpy_helper.to_array)(proto)


def cases_of_files() -> Iterator[tuple[str, Case]]:
    """The simple models and those of PyTorch; older opsets are converted as by the reader, but in this process."""
    for kind in ("simple", "pytorch-converted", "pytorch-operator"):
        for folder in sorted((FILES / kind).glob("test_*")):
            model = onnx.load(folder / "model.onnx")
            if model.opset_import[0].version < 7:
                model = convert(model)
            sets = [
                [
                    [stored(data / f"{side}_{i}.pb", info) for i, info in enumerate(infos) if (data / f"{side}_{i}.pb").exists()]
                    for side, infos in (("input", model.graph.input), ("output", model.graph.output))
                ]
                for data in sorted(folder.glob("test_data_set_*"))
            ]
            yield kind, Case(folder.name, model, sets)


def with_weights(case, fed):
    """The case's model with all inputs but those at the indices `fed` as weights."""
    model = ModelProto()
    model.CopyFrom(case.model)
    kept = [info for i, info in enumerate(model.graph.input) if i in fed]
    for i, (info, v) in enumerate(zip(case.model.graph.input, case.data_sets[0][0], strict=False)):
        if i not in fed:
            model.graph.initializer.append(numpy_helper.from_array(array(v), info.name))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def wrong(case, net, feeds, wants):
    """How the network's outputs differ from the expected ones; "" if they do not."""
    got = run_network(net, dict(zip((t.name for t in net.inputs), feeds, strict=True)))
    for a, w in zip(got.values(), arrays(wants), strict=True):
        if a.dtype != w.dtype or a.shape != w.shape:
            return f"{a.dtype}{a.shape}, not {w.dtype}{w.shape}"
        if a.dtype.kind in "iub" and not np.array_equal(a, w):
            return "integers differ"
        eps = {"float16": 2e-3, "bfloat16": 2e-2}.get(str(a.dtype), 1e-4)
        a, w = a.astype(np.float64), w.astype(np.float64)
        if not np.allclose(a, w, rtol=max(case.rtol, eps), atol=max(case.atol, eps / 10, 1e-6), equal_nan=True):
            return "values differ"
    return ""


def outcome(case):
    """("passed" | "refused" | "wrong", reason) of one case."""
    reason = ""
    count = len(case.data_sets[0][0])  # of the inputs: weights may be listed after them
    subsets = [tuple(range(count))]
    if all(i.type.HasField("tensor_type") for i in case.model.graph.input[:count]):
        floats = tuple(i for i, v in enumerate(case.data_sets[0][0]) if array(v).dtype.kind not in "iu")
        subsets += [floats, (0,), ()]
    for fed in dict.fromkeys(subsets):
        whole = len(fed) == count
        try:
            net = network_from_onnx(case.model if whole else with_weights(case, fed))
        except (UnsupportedError, FrontendError) as e:
            reason = reason or str(e)
            if "run time" not in str(e) and "depends on the data" not in str(e):
                break
            continue
        for given, wants in case.data_sets if whole else case.data_sets[:1]:
            said = wrong(case, net, [array(v) for i, v in enumerate(given) if i in fed], wants)
            if said:
                return "wrong", said
        return "passed", ""
    return "refused", reason


def outcomes():
    """{case: (outcome, reason)} of the node and simple models."""
    from onnx.backend.test.loader import load_model_tests

    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are computed on import, overflows and all
        computed = ((case.kind, case) for kind in ("node", "simple") for case in load_model_tests(kind=kind))
        for kind, case in (*computed, *cases_of_files()):
            if case.model is not None and case.data_sets and not case.name.startswith("test_mod_float"):
                found[f"{kind}/{case.name}"] = outcome(case)
    return found


def short(reason):
    """The reason without the names of nodes and values, which differ between cases."""
    return re.sub(r"node '[^']*' |'[^']*' ?", "", reason).split(". ")[0].strip(" .:")


@pytest.mark.slow
def test_each_case_passes_or_is_listed():
    found = outcomes()
    if not found:
        pytest.skip("this version of onnx does not ship its cases")
    listed = {line.split(": ", 1)[0] for line in LIST.read_text().splitlines() if line and not line.startswith("#")}
    assert not [f"{name}: {why}" for name, (kind, why) in found.items() if kind == "wrong"]
    assert not [name for name, (kind, _) in found.items() if kind == "refused" and name not in listed], "refused, but not listed"
    tensors = [kind for kind, why in found.values() if not OTHER.search(why)]
    assert tensors.count("passed") >= SHARE * len(tensors)


def main():
    found = outcomes()
    refused = {name: why for name, (kind, why) in found.items() if kind == "refused"}
    tensors = [kind for kind, why in found.values() if not OTHER.search(why)]
    lines = [
        "# Backend tests of the ONNX standard that whet refuses, with the reasons. Written by test_onnx_backend_suite.py.",
        f"# {len(found)} cases: {len(found) - len(refused)} pass, {len(refused)} are refused; of {len(tensors)} cases of tensors and control flow "
        f"{tensors.count('passed')} pass ({tensors.count('passed') / len(tensors):.1%}).",
    ]
    LIST.write_text("\n".join([*lines, *(f"{name}: {short(why)}" for name, why in sorted(refused.items()))]) + "\n")
    sys.stdout.write("\n".join(lines) + "\n" + "\n".join(f"{n}: {r}" for n, r in found.items() if r[0] == "wrong") + "\n")


if __name__ == "__main__":
    main()
