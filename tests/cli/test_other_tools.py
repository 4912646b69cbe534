"""Commands as users of trtexec and Polygraphy type them: the answer names what to type here."""

import pytest
from click.testing import CliRunner

from whet.cli import group

POLYGRAPHY = "run m.onnx --onnxrt --trt --fp16 --atol 1e-3 --trt-min-shapes x:[1,3] --input-shapes=x:[1,3] --pool-limit workspace:1G --validate"


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        (POLYGRAPHY, ["--onnxrt: --against onnxruntime", "--trt: not needed", "--atol: --tolerance", "--input-shapes: --shapes", "--minShapes=",
                      "--memPoolSize=workspace", "--validate: not needed"]),
        ("run m.onnx --data-loader-script load.py", ["--inputs python:MODULE:FUNCTION"]),
        ("--onnx=m.onnx --fp16", ["whet exec --onnx=m.onnx --fp16"]),
        ("--loadEngine=m.engine", ["whet exec --loadEngine=m.engine"]),
        ("inspect model m.onnx", ["whet check MODEL", "whet explain ENGINE"]),
        ("surgeon sanitize m.onnx", ["whet passes MODEL"]),
        ("convert m.onnx", ["whet exec --onnx=MODEL --saveEngine=FILE"]),
    ],
)  # fmt: skip
def test_the_answer_names_the_option_or_subcommand_here(command, answers):
    done = CliRunner().invoke(group, command.split())
    assert done.exit_code == 2
    for text in answers:
        assert text in done.output
    assert "--fp16:" not in done.output


def test_own_options_are_not_taken_for_others():
    done = CliRunner().invoke(group, ["run", "absent.onnx", "--fp16", "--shapes", "x:1x3"])
    assert "Polygraphy" not in done.output
    assert "absent.onnx cannot be read" in str(done.exception)
