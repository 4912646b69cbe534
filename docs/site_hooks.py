"""Hooks of MkDocs: reference pages from docstrings and `--help`, and pages that are in the repository but outside docs/."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "whet", "whet.builder", "whet.engine", "whet.frontends", "whet.inspector", "whet.ort", "whet.precision", "whet.pruning", "whet.report",
    "whet.runtime", "whet.sparsity", "whet.training", "whet.zoo",
)  # fmt: skip
FENCE = re.compile(r"^```(\w+) \w+$", re.MULTILINE)  # "```python torch": the second word is for the tests, and Markdown extensions read one word
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!CHANGELOG\.md)((?:benchmarks|examples|src|tests)/[^)]*)\)")  # files that the site does not have


def on_files(files: Any, config: Any) -> Any:
    """Adds generated pages."""
    from mkdocs.structure.files import File

    pages = {
        "reference/commands.md": command_reference(),
        "reference/python.md": python_reference(),
        "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links that leave docs/ (the changelog is a page of the site; other files are named without a link), and fences, which keep their
    language alone."""
    markdown = FENCE.sub(r"```\1", markdown)
    markdown = OUTSIDE.sub(r"\1 (`\2`)", markdown)
    if page.file.src_uri == "index.md":
        markdown = markdown.replace("](../CHANGELOG.md)", "](CHANGELOG.md)")
    if page.file.src_uri == "CHANGELOG.md":  # its links start at the repository's root
        markdown = markdown.replace("](docs/", "](")
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Refuses a page in which a fence was not read as a code block. Raises PluginError, which ends the build."""
    from mkdocs.exceptions import PluginError

    if found := re.search(r"```.{0,40}", html):
        raise PluginError(f"{page.file.src_uri}: {found[0]!r} is text in the page, not a code block")
    return html


def command_reference() -> str:
    """The help of every command, as a page."""
    from whet.cli import group

    lines = ["# Command line", ""]

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
        lines.extend([f"## {context.command_path}", "", "```text", command.get_help(context), "```", ""])
        if isinstance(command, click.Group):
            for sub in command.list_commands(context):
                child = command.get_command(context, sub)
                if child is not None:
                    add(child, sub, context)

    add(group, "whet", None)
    return "\n".join(lines)


def python_reference() -> str:
    """Signature and docstring of every public name, as a page."""
    lines = ["# Python", ""]
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## {package}", "", *_docstring(module)]
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                lines += [f"### {package}.{name}", "", "```text", f"{name}{_signature(value)}", "```", "", *_docstring(value)]
                if inspect.isclass(value):
                    for method, function in vars(value).items():
                        if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                            lines += ["```text", f"{name}.{method}{_signature(function)}", "```", "", *_docstring(function)]
    return "\n".join(lines)


def _signature(value: Any) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except ValueError:
        return "(...)"


def _docstring(value: Any) -> list[str]:
    text = inspect.getdoc(value) or ""
    return ["```text", text, "```", ""] if text else []
