"""Failing commands print one line and return an exit code, also for memory and disks; models that need fixed shapes."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from whet.cli import main
from whet.cli._failures import describe_failure
from whet.cli._output_files import check_writable, write_page
from whet.cli.exec import command as exec_command
from whet.cli.retune import command as retune_command
from whet.cli.run import command as run_command
from whet.errors import EngineError, UsageError
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (UsageError("no such flag"), "UsageError: no such flag", 2),
        (EngineError("cut off"), "EngineError: cut off", 1),
        (MemoryError(), "Lower the shapes or the batch", 1),
        (OSError(errno.ENOSPC, "No space left on device", "x.json"), "x.json: No space left on device", 1),
    ],
)
def test_one_line_and_an_exit_code(error, text, code):
    said, got = describe_failure(error)
    assert text in said
    assert "\n" not in said
    assert got == code


def test_an_internal_error_keeps_its_traceback():
    with pytest.raises(OSError, match="no file's"):
        describe_failure(OSError("no file's"))


def test_too_little_memory_fails_as_trtexec_does(monkeypatch):
    def nothing_left(*_):
        raise MemoryError("Unable to allocate 44.7 TiB")

    monkeypatch.setattr("whet.cli._model.read_network", nothing_left)
    done = CliRunner().invoke(exec_command, ["--onnx=x.onnx"])
    assert done.exit_code == 1
    assert "44.7 TiB" in done.output
    assert "&&&& FAILED" in done.output


def test_an_interruption_that_python_wraps_is_one(monkeypatch, capsys):
    """Python 3.11 raises RuntimeError for an exception in __set_name__: SIGTERM during an import ended in a traceback and exit code 1."""

    class Field:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    def interrupted(*_):
        try:
            type("Data", (), {"field": Field()})
        except KeyboardInterrupt as e:  # Python 3.12 does not wrap it
            raise RuntimeError("Error calling __set_name__") from e

    monkeypatch.setattr("whet.cli._model.read_network", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["exec", "--onnx=x.onnx"])
    assert ended.value.code == 130
    assert "Interrupted. Finished timings are kept" in capsys.readouterr().err

    def broken(*_):
        raise RuntimeError("another")

    monkeypatch.setattr("whet.cli._model.read_network", broken)
    with pytest.raises(RuntimeError, match="another"):
        main(["exec", "--onnx=x.onnx"])


@pytest.mark.parametrize(
    "sigint", ["signal.default_int_handler", "signal.SIG_IGN", "raise_interrupt"], ids=["usual", "as a shell's background job", "own handler"]
)
def test_sigterm_inside_of_exec_ends_with_143(tmp_path, sigint):
    """Python kills its own process by SIGINT if KeyboardInterrupt itself left an exec(), even if it was caught: dataclasses use exec."""
    code = """
import signal
import whet.cli._model
from whet.cli import main
def raise_interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, SIGINT_HANDLER)
def load(*_):
    exec("import os, signal; os.kill(os.getpid(), signal.SIGTERM)\\nwhile True: pass")
whet.cli._model.read_network = load
main(["exec", "--onnx=x.onnx"])
"""
    (tmp_path / "ended.py").write_text(code.replace("SIGINT_HANDLER", sigint))
    done = subprocess.run([sys.executable, "-m", "ended"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143, done.stderr
    assert "Terminated. Finished timings are kept" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["exec", "--onnx=x.onnx"], "Finished timings are kept"),
        (["prune", "x.onnx", "--latency=0.5x"], "Finished timings are kept"),
        (["prune", "x.onnx", "--ratio=0.5"], ""),
        (["finetune", "x.onnx", "--data=d.npz"], "A training with --checkpoint continues from its last checkpoint."),
        (["auto", "r.yaml"], "The same command continues the search."),
        (["check", "x.onnx"], ""),
    ],
)
def test_an_interrupted_command_says_what_it_has_kept(arguments, kept, monkeypatch, capsys):
    """`whet finetune` promised that the next run goes on from the timing cache."""

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("whet.cli.group.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 130
    said = capsys.readouterr().err
    assert said.strip() == "Interrupted." if not kept else f"Interrupted. {kept}" in said


def test_python_m_whet():
    done = subprocess.run([sys.executable, "-m", "whet", "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("whet, version")


def test_warnings_of_python_are_one_line(monkeypatch, capsys):
    import warnings

    before = warnings.formatwarning
    try:
        with pytest.raises(SystemExit):
            main(["--no-such-flag"])
        assert warnings.formatwarning(UserWarning("the cache is full"), UserWarning, "f.py", 1) == "warning: the cache is full\n"
    finally:
        warnings.formatwarning = before


def test_retune_checks_its_file_before_any_work(tmp_path):
    done = CliRunner().invoke(retune_command, [str(tmp_path / "e.engine"), "-o", str(tmp_path / "no" / "r.engine")])
    assert isinstance(done.exception, UsageError)
    assert "there is no folder" in str(done.exception)


def test_fixed_shapes_resolve_branches_over_sizes(tmp_path):
    """An If over a size: its branches have different types, and --shapes decides between them."""
    pytest.importorskip("onnxruntime")
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    branches = {
        key: helper.make_graph([node], key, [], [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)])
        for key, node in (
            ("then_branch", helper.make_node("Squeeze", ["x", "one"], ["a"])),
            ("else_branch", helper.make_node("Relu", ["x"], ["b"])),
        )
    }
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=1, end=2),
        helper.make_node("Equal", ["s", "one"], ["e"]),
        helper.make_node("Squeeze", ["e"], ["c"]),
        helper.make_node("If", ["c"], ["y"], **branches),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [one])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    done = CliRunner().invoke(run_command, [str(tmp_path / "m.onnx"), "--shapes=x:4x1"])
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "MATCH" in done.output


def test_names_that_the_terminal_cannot_encode(tmp_path):
    """In a plain ASCII locale names are printed with escapes, and files are UTF-8 as usual."""
    net = Network("names")
    x = net.add_input("größe", parse_type("f32[1,8]"))
    net.mark_output(net.add("Gemm", x, net.constant(np.ones((8, 4), np.float32), "w"), name="层"), "y")
    save_onnx(net, tmp_path / "m.onnx")
    np.save(tmp_path / "d.npy", np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32))
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "XDG_CACHE_HOME": str(tmp_path)}

    def whet(*words):
        done = subprocess.run([sys.executable, "-m", "whet", *words], cwd=tmp_path, env=env, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for _ in range(2):  # the second run reads the calibration cache
        flags = ("--builderOptimizationLevel=0", "--skipInference", "--dumpLayerInfo")
        whet("exec", "--onnx=m.onnx", "--int8", "--calibData=d.npy", "--calib=c.cache", *flags)
    assert rb"\u5c42" in whet("debug", "precision", "m.onnx", "--fp16", "--noTimes", "--samples=1", "--plot=p.html")
    assert "层" in (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "größe: " in (tmp_path / "c.cache").read_text(encoding="utf-8")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_caller_that_closed_standard_streams(closed, tmp_path):
    """Files must not get descriptors 1 and 2, into which libraries and children write; sys.stderr is None then."""
    net = Network("small")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[4]"))), "y")
    save_onnx(net, tmp_path / "m.onnx")
    flags = "--onnx=m.onnx --builderOptimizationLevel=0 --skipInference --saveEngine=m.engine"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} -m whet exec {flags} {closed}"], cwd=tmp_path, env=env, timeout=120, check=False)
    assert done.returncode == 0
    assert (tmp_path / "m.engine").read_bytes().startswith(b"whet-eng")


def test_a_folder_that_may_not_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match=r"--saveEngine=.*e.engine cannot be written: no write permission in .*Name a file in a folder that you may"):
        check_writable(saveEngine=str(tmp_path / "e.engine"))
    with pytest.raises(UsageError, match=r"there is no folder .*gone\. Create it, or name another file\."):
        check_writable(saveEngine=str(tmp_path / "gone" / "e.engine"))


def test_output_files_behind_a_loop_of_links(tmp_path):
    """`Path.resolve` raises RuntimeError for one up to Python 3.12."""
    (tmp_path / "loop").symlink_to("loop")
    check_writable(str(tmp_path / "loop"), saveEngine=str(tmp_path / "loop"))
    with pytest.raises(UsageError, match="there is no folder"):
        check_writable(saveEngine=str(tmp_path / "loop" / "x.engine"))


def test_pages_may_be_about_files_whose_names_are_no_utf_8(tmp_path):
    name = os.fsdecode(b"net\xff.engine")
    write_page(tmp_path / "page.html", f"<p>{name}</p>")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "<p>net\\udcff.engine</p>"
