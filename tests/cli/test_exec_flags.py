"""The flags of `whet exec`: parsed like trtexec's, refused with the nearest name."""

import pytest

from whet.cli._exec_checks import check_against, check_files, check_values, list_unused_values
from whet.cli._exec_config import Options
from whet.cli._exec_flags import FLAGS, NUMBERS, format_help, parse
from whet.cli._exec_values import parse_percentiles, parse_profiles, parse_shapes, parse_size, split_names
from whet.errors import ShapeError, UsageError
from whet.measure.queries import compute_percentile


def test_values_with_equals_or_space():
    assert parse(["--onnx=m.onnx", "--fp16", "--iterations", "20"]) == ([("onnx", "m.onnx"), ("fp16", ""), ("iterations", "20")], [])


def test_unsupported_trtexec_flags_are_named():
    got, missing = parse(["--onnx=m.onnx", "--useManagedMemory", "--calibProfile=x"])
    assert missing == ["useManagedMemory", "calibProfile"]
    assert got == [("onnx", "m.onnx")]
    assert all(FLAGS[m].missing for m in missing)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--onx=m"], "Did you mean '--onnx'"),
        (["model.onnx"], "--onnx=FILE"),
        (["--onnx"], "needs a value"),
        (["--onnx="], "needs a value"),
        (["--fp16=1"], "takes no value"),
        (["--onnx=a", "--onnx=b"], "given twice"),
    ],
)
def test_errors_explain_the_usage(argv, text):
    with pytest.raises(UsageError, match=text):
        parse(argv)


def test_names_split_at_the_last_colon():
    assert split_names("'Input:0':1x3,b:2") == [("Input:0", "1x3"), ("b", "2")]
    assert parse_shapes("a:1x3x224x224,s:scalar", "shapes") == {"a": (1, 3, 224, 224), "s": ()}
    with pytest.raises(UsageError, match="not a shape"):
        parse_shapes("a:1x-3", "shapes")
    with pytest.raises(UsageError, match="the largest is 2147483647"):
        parse_shapes("a:99999999999999999999x3", "shapes")


def test_sizes_are_base_two_and_mebibytes_by_default():
    assert [parse_size(t, "memPoolSize") for t in ("1", "64M", "1G", "512K", "7B")] == [2**20, 64 * 2**20, 2**30, 2**19, 7]
    with pytest.raises(UsageError):
        parse_size("big", "memPoolSize")


def test_missing_profile_shapes_are_broadcast():
    made, warnings = parse_profiles([("optShapes", "x:8x3"), ("maxShapes", "x:16x3")])
    assert made == [({"x": (8, 3)}, {"x": (8, 3)}, {"x": (16, 3)})]
    assert "optShapes is being broadcasted to minShapes for tensor x" in warnings
    made, _ = parse_profiles([("minShapes", "x:1x3"), ("maxShapes", "x:16x3")])
    assert made == [({"x": (1, 3)}, {"x": (16, 3)}, {"x": (16, 3)})]


def test_two_profiles_by_order():
    flags = [("profile", "0"), ("optShapes", "x:1x3"), ("profile", "1"), ("optShapes", "x:8x3")]
    assert [p[1]["x"] for p in parse_profiles(flags)[0]] == [(1, 3), (8, 3)]
    with pytest.raises(UsageError, match="without gaps"):
        parse_profiles([("profile", "2"), ("optShapes", "x:1x3")])
    with pytest.raises(UsageError, match="given twice"):
        parse_profiles([("optShapes", "x:1x3"), ("optShapes", "x:8x3")])
    with pytest.raises(UsageError, match="not in ascending order"):
        parse_profiles([("minShapes", "x:4x3"), ("maxShapes", "x:2x3")])


def test_percentile_is_trtexecs():
    values = [float(v) for v in range(1, 101)]
    assert compute_percentile(values, 99) == 99.0
    assert compute_percentile(values, 90) == 90.0
    assert compute_percentile([5.0], 99) == 5.0
    assert parse_percentiles("90,99.9") == [90.0, 99.9]


def test_help_names_every_flag():
    text = format_help()
    assert [f for f in FLAGS if f"--{f}" not in text] == []


def options(*argv: str) -> Options:
    return Options(*parse(list(argv)))


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--iterations=abc", "'abc' is not an integer"),
        ("--warmUp=-1", "the minimum is 0"),
        ("--shapes=1x3x32x32", "--shapes=NAME:1x3x32x32"),
        ("--percentile=101", "above 100"),
        ("--numThreads=many", "not an integer"),
    ],
)
def test_values_are_checked_before_the_build(flag, text):
    with pytest.raises(UsageError, match=text):
        check_values(options(flag))


def test_every_numeric_flag_has_its_default_in_the_help():
    assert options("--numThreads=auto").get("numThreads") == "auto"
    check_values(options("--numThreads=auto", "--duration=-1"))
    for name, (default, _, _) in NUMBERS.items():
        assert options().number(name) == default
        said = FLAGS[name].help
        assert default in (0, 1) or f"({default:g}" in said or f"({default:g})" in said, said


def test_files_are_checked_before_the_build(tmp_path):
    with pytest.raises(UsageError, match=r"there is no file .*x\.bin for 'input'"):
        check_files(options(f"--loadInputs=input:{tmp_path}/x.bin"))
    with pytest.raises(UsageError, match="not a regular file"):  # root could replace the device by an engine
        check_files(options("--saveEngine=/dev/null"))
    check_files(options(f"--saveEngine={tmp_path}/new.engine"))
    (tmp_path / "m.onnx").write_bytes(b"model")
    (tmp_path / "x.npy").write_bytes(b"input")
    for read in (f"--onnx={tmp_path}/m.onnx", f"--deploy={tmp_path}/m.onnx", f"--lock={tmp_path}/m.onnx", f"--refitFromOnnx={tmp_path}/m.onnx"):
        with pytest.raises(UsageError, match=r"--saveEngine=.*m\.onnx would overwrite a file that this command reads"):
            check_files(options(read, f"--saveEngine={tmp_path}/sub/../m.onnx"))
    with pytest.raises(UsageError, match=r"--exportTimes=.*x\.npy would overwrite a file that this command reads"):
        check_files(options(f"--loadInputs=x:{tmp_path}/x.npy", f"--exportTimes={tmp_path}/x.npy"))


@pytest.mark.parametrize(
    ("flag", "error", "text"),
    [
        ("--shapes=inputs:1x3x32x32", UsageError, "no input 'inputs'. Did you mean 'input'. It has input:Nx3x32x32"),
        ("--loadInputs=x:a.npy", UsageError, "--loadInputs: the model has no input 'x'"),
        ("--shapes=input:1x3x32", ShapeError, "has 3 dimensions, input 'input' has 4: Nx3x32x32"),
        ("--shapes=input:1x4x32x32", ShapeError, "axis 1 is 4, and the model fixes it to 3"),
    ],
)
def test_shapes_are_checked_against_the_model_before_the_build(flag, error, text):
    with pytest.raises(error, match=text.replace("input'. It", r"input'\? It")):
        check_against(options(flag), {"input": ("N", 3, 32, 32)})
    check_against(options("--shapes=input:7x3x32x32"), {"input": ("N", 3, 32, 32)})


def test_deprecated_flags_are_accepted():
    from whet.cli._exec_config import build_config
    from whet.cli._summary import Log
    from whet.network import parse_network

    net = parse_network("in %x: f32[2,3]\n%y = Relu(%x)\nout %y")
    config = build_config(options("--workspace=4096", "--explicitBatch"), Log(), net)
    assert config.memory_limit == {"workspace": 4096 * 2**20}


@pytest.mark.parametrize(("flag", "text"), [("y:2x3", "the model has no input 'y'; its inputs: x f32"), ("x:4x3", "the model has static shapes")])
def test_profiles_of_a_static_model_are_its_shapes(flag, text):
    from whet.cli._exec_config import build_config
    from whet.cli._summary import Log
    from whet.network import parse_network

    net = parse_network("in %x: f32[2,3]\n%y = Relu(%x)\nout %y")
    assert build_config(options("--optShapes=x:2x3"), Log(), net).profiles == ()
    with pytest.raises(UsageError, match=text):
        build_config(options(f"--optShapes={flag}"), Log(), net)


def test_the_list_of_commands_holds_whole_sentences():
    from click.testing import CliRunner

    from whet.cli import group

    said = CliRunner().invoke(group, ["--help"], terminal_width=80).output
    assert "with the reason and the nearest workaround." in " ".join(said.split())
    assert "..." not in said.split("Commands:")[1]


def test_a_full_disk_is_one_line_and_no_traceback(monkeypatch, capsys):
    from whet import cli

    def full(**_):
        raise OSError(28, "No space left on device", "x.onnx")

    monkeypatch.setattr(cli.group, "main", full)
    with pytest.raises(SystemExit) as done:
        cli.main([])
    assert done.value.code == 1
    assert capsys.readouterr().err.startswith("OSError: x.onnx: No space left on device. Free disk space")


def test_a_model_in_place_of_an_engine_is_refused_with_the_build_command(tmp_path):
    from click.testing import CliRunner

    from whet.cli.explain import command

    done = CliRunner().invoke(command, [str(tmp_path / "m.onnx")])
    assert isinstance(done.exception, UsageError)
    assert "--saveEngine=m.engine" in str(done.exception)


def test_values_with_another_meaning_are_reported():
    assert list_unused_values(Options([("numThreads", "auto"), ("builderOptimizationLevel", "5")], [])) == []
    said = list_unused_values(Options([("builderOptimizationLevel", "9"), ("device", "3"), ("numThreads", "99999")], []))
    assert [next(word for word in ("treated as 5", "ignored", "CPUs") if word in text) for text in said] == ["treated as 5", "ignored", "CPUs"]
    assert list_unused_values(Options([("device", "1"), ("backend", "cuda")], [])) == []
