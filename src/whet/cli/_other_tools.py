"""Options and commands of trtexec and Polygraphy, with their names here."""

from __future__ import annotations

import click

#: subcommands of Polygraphy and words for `whet exec`
SUBCOMMANDS = {
    **dict.fromkeys(
        ("bench", "benchmark", "build", "compile", "convert", "optimize", "profile", "time", "trtexec"),
        "whet exec --onnx=MODEL --saveEngine=FILE builds, runs and times an engine",
    ),
    "inspect": "whet check MODEL lists a model's nodes, whet explain ENGINE an engine's layers",
    "surgeon": "whet passes MODEL --dump=FOLDER shows how the build simplifies a graph; simplified models are not needed for it",
    "template": "models are ONNX files, see whet exec --help",
    "data": "whet run --saveValues=FILE.npz saves values, whet run --inputs=FILE.npz reads inputs",
}

_EXEC = "build the engine first: whet exec --onnx=MODEL {} --saveEngine=FILE, then whet run FILE MODEL"
#: options of `polygraphy run`
_POLYGRAPHY = {
    "--onnxrt": "--against onnxruntime, the default",
    "--trt": "not needed: MODEL is run by whet",
    "--atol": "--tolerance, relative to the largest value",
    "--rtol": "--tolerance, relative to the largest value",
    "--input-shapes": "--shapes x:1x3x224x224,...",
    "--inputs-shapes": "--shapes x:1x3x224x224,...",
    "--trt-min-shapes": _EXEC.format("--minShapes=..."),
    "--trt-opt-shapes": _EXEC.format("--optShapes=..."),
    "--trt-max-shapes": _EXEC.format("--maxShapes=..."),
    "--save-engine": _EXEC.format(""),
    "--int8": _EXEC.format("--int8"),
    "--workspace": _EXEC.format("--memPoolSize=workspace:256M"),
    "--pool-limit": _EXEC.format("--memPoolSize=workspace:256M"),
    "--onnx-outputs": "not needed: every value is compared",
    "--trt-outputs": "not needed: every value is compared",
    "--load-inputs": "--inputs FILE.npz",
    "--data-loader-script": "--inputs python:MODULE:FUNCTION",
    "--save-outputs": "--saveValues FILE.npz",
    "--save-inputs": "--saveValues FILE.npz",
    "--iterations": "--samples",
    "--validate": "not needed: NaN and infinities are compared too",
    "--verbose": "--all prints every value",
}

_TRTEXEC = ("--onnx", "--loadEngine", "--deploy", "--model", "--saveEngine")


class ComparesLikePolygraphy(click.Command):
    """A command that names its own option for each of Polygraphy's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for p in self.params for name in p.opts}
        given = dict.fromkeys(a.partition("=")[0] for a in args)
        others = [f"  {a}: {_POLYGRAPHY[a]}" for a in given if a in _POLYGRAPHY and a not in own]
        if others:
            raise click.UsageError("\n".join(["these are options of Polygraphy; here they are:", *others]), ctx)
        return super().parse_args(ctx, args)


def refuse_options_of_exec(ctx: click.Context, args: list[str]) -> None:
    """Raises UsageError for trtexec's options without the subcommand."""
    name = args[0].partition("=")[0] if args else ""
    if name in _TRTEXEC:
        raise click.UsageError(f"{name} belongs to a subcommand, exec, which takes trtexec's options: whet exec {' '.join(args)}", ctx)
