"""docs/questions.md: each question is two links from the front page, and its command runs."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import whet
from whet.cli import group

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "questions.md"
QUESTIONS = re.findall(r"^## (.+\?)\n\n```sh\n(.+)\n```\n", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the files that the page names."""
    folder = tmp_path_factory.mktemp("questions")
    whet.zoo.save("lenet5", folder / "model.onnx", num_classes=10, batch=1)
    whet.zoo.save("lenet5", folder / "small.onnx", num_classes=10, batch=1, seed=1)
    np.savez(folder / "samples.npz", input=np.random.default_rng(0).standard_normal((4, 1, 32, 32)).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        flags = ["--onnx=model.onnx", "--builderOptimizationLevel=1", "--skipInference", "--saveEngine=model.engine", "--saveLock=model.lock"]
        built = CliRunner().invoke(group, ["exec", *flags], standalone_mode=False)
        assert built.exception is None, built.output
        yield folder


def test_there_are_ten_questions_with_one_command_each():
    assert len(QUESTIONS) == 10
    assert PAGE.read_text().count("```sh") == 10


@pytest.mark.parametrize(("page", "link"), [("README.md", "(docs/questions.md)"), ("docs/index.md", "(questions.md)")])
def test_the_front_pages_link_to_the_questions(page, link):
    assert link in (ROOT / page).read_text()


@pytest.mark.parametrize(("question", "command"), QUESTIONS, ids=lambda text: text[:40])
def test_the_command_runs(project, question, command):
    words = [word.replace("NODE", "/conv1/Conv") for word in shlex.split(command)]
    if "onnxruntime" in words:
        pytest.importorskip("onnxruntime")
    builds = words[1] == "exec" and not any(word.startswith("--loadEngine") for word in words)
    short = ["--duration=0.05", "--iterations=2", *(["--builderOptimizationLevel=1"] if builds else [])] if words[1] == "exec" else []
    if words[1] == "sparsity":
        short = ["--noEngines"]  # tests/cli/test_sparsity.py times engines
    done = CliRunner().invoke(group, [*words[1:], *short], standalone_mode=False)
    assert done.exception is None, f"{command}\n{done.output[-2000:]}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_headings_exist(page):
    def anchors(text: str) -> set[str]:
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}

    for target, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", page.read_text()):
        other = page.parent / target if target else page
        assert anchor in anchors(other.read_text()), f"{page.name} links to {target}#{anchor}"
