"""The flags of `whet exec`: trtexec's names, meanings and defaults. A flag of trtexec that is not available has the reason.

The parser, `--help`, the messages on unavailable flags and the suggestions for misspelled names are generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from whet.errors import UsageError
from whet.registry import suggest_name


@dataclass(frozen=True)
class Flag:
    """`value` is the metavar of a flag with a value ("" for a switch); `missing` is the reason if the flag is not available."""

    group: str
    name: str
    value: str
    help: str
    missing: str = ""
    repeat: bool = False


def _make_flags() -> list[Flag]:
    out: list[Flag] = []

    def add(group: str, rows: list[tuple]) -> None:
        out.extend(Flag(group, *row) for row in rows)

    def add_missing(group: str, names: str, why: str, value: str = "") -> None:
        out.extend(Flag(group, n, value, "", why) for n in names.split())

    gpu = "has no meaning without an NVIDIA GPU backend"
    add("Model", [
        ("onnx", "FILE", "model to build from: ONNX, or TensorFlow's (a SavedModel's folder, .h5, .keras, .pb, .tflite)"),
        ("torch", "python:MODULE:FUNCTION", "build from a torch module: the function returns it, or it and example inputs (else --shapes gives them)"),
        ("deploy", "FILE", "Caffe prototxt to build from; dimensions that differ between --minShapes and --maxShapes are dynamic"),
        ("model", "FILE", "caffemodel with the weights of --deploy (without it: random weights, as in trtexec)"),
        ("output", "NAME,...", "Caffe blobs that are outputs (default: those that no layer reads)"),
        ("loadEngine", "FILE", "run a saved engine instead of building"),
        ("saveEngine", "FILE", "write the engine"),
        ("getPlanVersionOnly", "", "print the versions in the file given with --loadEngine, without loading it"),
    ])  # fmt: skip
    add_missing("Model", "uff uffInput", "UFF is obsolete; give the TensorFlow model itself to --onnx: SavedModel, .h5, .keras, frozen .pb or .tflite", "FILE")
    add_missing("Model", "uffNHWC asyncFileReader", "belongs to TensorRT's own loaders; engines here are memory-mapped")
    add("Build", [
        ("minShapes", "SPEC", "profile's smallest shapes: input0:1x3x224x224,input1:...", "", True),
        ("optShapes", "SPEC", "profile's shapes to tune for", "", True),
        ("maxShapes", "SPEC", "profile's largest shapes", "", True),
        ("profile", "N", "the shape flags that follow belong to profile N", "", True),
        ("memPoolSize", "SPEC", "memory caps: workspace:1G,arena:64M (no suffix: MiB)"),
        ("workspace", "N", "old name of --memPoolSize=workspace:N (MiB)"),
        ("explicitBatch", "", "of TensorRT 8: the batch is a dimension like others (always so)"),
        ("profilingVerbosity", "layer_names_only|detailed|none", "layer information kept in the engine for the inspector (layer_names_only)"),
        ("avgTiming", "M", "timed rounds averaged per tactic (8)"),
        ("builderOptimizationLevel", "0..5", "effort of the search (3)"),
        ("maxTactics", "N", "cap on tactics timed per layer (-1: by level)"),
        ("tacticSources", "SPEC", "+name,-name: switch tactics on or off (cpu/onednn_conv, ONEDNN, CUBLAS_LT, +CUDNN, +CUSPARSELT, +cublaslt_half, ...)"),
        ("allowFallback", "", "layers without a kernel on the GPU run on the host; each is reported with the bytes copied for it"),
        ("pure", "", "whet's kernels only: no library kernels on the GPU"),
        ("skipInference", "", "stop after the build"),
        ("buildOnly", "", "old name of --skipInference"),
        ("passes", "SPEC", "graph passes: none, all, -fuse_silu, +fold_bn (`whet passes` lists them)"),
        ("noFuse", "NODES", "source nodes that are not fused"),
        ("saveLock", "FILE", "write the tactic lock: the same lock gives the same engine"),
        ("lock", "FILE", "build exactly the locked engine, or fail and list the differences"),
        ("deterministic", "", "only tactics with reproducible results"),
        ("strictNumerics", "", "no Winograd, and no kernel that loses NaN or infinities"),
        ("noVerify", "", "do not compare the engine with the reference after the build"),
        ("verifyAgain", "", "compare it also if this very engine passed on this machine before"),
        ("markDebug", "NAMES", "values of the model that become outputs of the engine, for --saveDebugTensors (* matches any text; they are not fused)"),
        ("strict", "", "refuse, instead of reporting, permissions and flags that cannot be used"),
        ("monitorMemory", "", "report memory while building"),
        ("refit", "", "weights can be replaced later; every engine can do that, and loses no speed by it"),
        ("refitFromOnnx", "FILE", "with --loadEngine: put the weights of a model of the same structure into the engine; its outputs are compared with the model's"),
    ])  # fmt: skip
    add_missing("Build", "inputIOFormats outputIOFormats", "inputs and outputs are row-major in their own types so far", "SPEC")
    add_missing("Build", "stripWeights stripAllWeights", "an engine file contains its weights; --refitFromOnnx replaces them")
    add_missing("Build", "versionCompatible vc excludeLeanRuntime", "engines here are data: the loader checks versions itself and falls back to safe tactics")
    add_missing("Build", "useRuntime leanDLLPath runtimePlatform", "engines here are data: there is one runtime, in Python", "VALUE")
    add_missing("Build", "hardwareCompatibilityLevel", "an engine opens on other hardware with safe tactics and a warning; --requireSameHardware refuses", "LEVEL")
    add_missing("Build", "maxAuxStreams tilingOptimizationLevel l2LimitForTiling", gpu, "N")
    add_missing("Build", "preview remoteAutoTuningConfig decomposableAttentions tempdir tempfileControls", "features of TensorRT's builder without a counterpart here", "SPEC")
    add_missing("Build", "allowWeightStreaming markUnfusedTensorsAsDebugTensors safe consistency dumpKernelText restricted cpuOnly directIO pluginInstanceNorm pi enablePluginOverride", "a feature of TensorRT's builder without a counterpart here")
    add_missing("Build", "minTiming", "--avgTiming sets how often a tactic is timed; candidates within the noise of each other are re-timed", "M")
    add_missing("Build", "heuristic", "--builderOptimizationLevel sets how many candidates are timed")
    add_missing("Build", "layerDeviceTypes useDLACore", "no DLA backend", "VALUE")
    add_missing("Build", "allowGPUFallback buildDLAStandalone uint8AsymmetricQuantizationDLA reportCapabilityDLA adjustForDLA", "no DLA backend")
    add("Precision (permissions in addition to FP32, as in TensorRT 10)", [
        ("fp16", "", "allow FP16"),
        ("bf16", "", "allow BF16"),
        ("int8", "", "allow INT8"),
        ("fp8", "", "allow FP8"),
        ("best", "", "allow every precision"),
        ("objective", "latency|size", "latency: the fastest engine; size: the fastest of those with the smallest weights, with --int8 in 8 bits everywhere (latency)"),
        ("calib", "FILE", "INT8 calibration cache: read if it exists, else written; .json is whet's own, any other name TensorRT's text"),
        ("calibData", "SOURCE", "calibration data: DIR of images or arrays, FILE.npz, FILE.npy, python:MODULE:FUNCTION"),
        ("calibPreprocess", "SPEC|FILE", "images to numbers: scale:1/255,mean:0.485/0.456/0.406,std:...,order:rgb,resize:256"),
        ("calibMethod", "NAME", "auto|minmax|entropy|percentile|mse: how ranges are chosen (auto: by the error at the consumers)"),
        ("calibZeroPoints", "on|off", "zero points for skewed activations (on)"),
        ("calibSteps", "LIST", "equalize,smooth,bias, all or none: steps that may reduce the error of INT8, round: of FP8; kept if they do (none)"),
        ("insist", "", "calibrate although the model was pruned by whet and not recovered or fine-tuned since"),
        ("accuracy", "SPEC", "accuracy budget of low precision: python:MODULE:FUNCTION:MAX_DROP (a user metric), snr:DB or cosine:LEAST"),
        ("noTF32", "", "forbid TF32 (GPU)"),
        ("precisionConstraints", "none|prefer|obey", "ignore, prefer or enforce --layerPrecisions (none)"),
        ("layerPrecisions", "SPEC", "name:fp16,... (fp32, fp16, bf16, int8; * matches any text)"),
        ("layerOutputTypes", "SPEC", "name:fp16,... (type of a layer's outputs)"),
        ("stronglyTyped", "", "types exactly as in the model; excludes the precision flags"),
    ])  # fmt: skip
    add_missing("Precision (permissions in addition to FP32, as in TensorRT 10)", "int4", "no INT4 kernels yet")
    add_missing("Precision (permissions in addition to FP32, as in TensorRT 10)", "calibProfile minShapesCalib optShapesCalib maxShapesCalib", "calibration runs each sample in its own shape", "SPEC")
    text = "2:4 weights: consider where present (enable), or write them: the two largest of four (force), the first two (force:positional) (disable)"
    add("Sparsity", [("sparsity", "disable|enable|force|force:positional", text)])
    add("Timing cache", [
        ("timingCacheFile", "FILE", "timing cache to use (default: the user's cache folder)"),
        ("noBuilderCache", "", "ignore the timing cache: time everything, store nothing"),
        ("errorOnTimingCacheMiss", "", "fail if a measurement is missing in the timing cache"),
        ("retime", "", "time everything again and replace what the timing cache has"),
    ])  # fmt: skip
    add_missing("Timing cache", "noCompilationCache", "CPU kernels are not compiled at build time")
    add("Inference", [
        ("shapes", "SPEC", "shapes to run (default: the profile's opt shapes)"),
        ("iterations", "N", "at least N iterations (10)"),
        ("warmUp", "MS", "warm-up, not counted (200)"),
        ("duration", "S", "at least S seconds of iterations (3; -1: until stopped)"),
        ("sleepTime", "MS", "delay between enqueue and compute (0)"),
        ("idleTime", "MS", "delay between iterations (0)"),
        ("infStreams", "N", "contexts that run concurrently; one thread each on the CPU (1)"),
        ("streams", "N", "old name of --infStreams"),
        ("noDataTransfers", "", "do not copy inputs and outputs"),
        ("includeDataTransfers", "", "TensorRT 11's name for the default here: copies are included"),
        ("exposeDMA", "", "each query ends before the next one starts (always on the CPU)"),
        ("threads", "", "one host thread per stream (always with --infStreams)"),
        ("separateProfileRun", "", "profile in a separate run (always)"),
        ("useProfile", "N", "optimization profile to run (default: the one tuned for the nearest shapes)"),
        ("saveDebugTensors", "SPEC", "NAME:FILE,... outputs to write: .npy, else raw bytes"),
        ("saveAllDebugTensors", "summary|numpy|string|raw", "write all tensors of --markDebug in these formats (comma separated)"),
        ("loadInputs", "SPEC", "name:file,... raw binary, .npy or .npz; else random, seeded"),
        ("timeDeserialize", "", "time loading the engine and stop"),
        ("numThreads", "N", "CPU threads of the engine (0: all usable; auto: the fastest count, by timing whole engines)"),
        ("samples", "auto|together|parallel|sequential", "all threads run the batch (together), one sample each (parallel), or one sample after the other (sequential); auto: the fastest (auto)"),
        ("requireSameHardware", "", "refuse an engine tuned on other hardware"),
    ])  # fmt: skip
    add("Inference", [
        ("useSpinWait", "", "wait for the GPU by polling (GPU; the CPU always polls)"),
        ("noSpinWait", "", "sleep until the GPU is done (default)"),
        ("useCudaGraph", "", "replay the engine as one CUDA graph (default)"),
        ("noCudaGraph", "", "launch kernel by kernel (GPU)"),
        ("coldL2", "", "flush the L2 cache before each query's compute: times with a cold cache (GPU)"),
        ("timeRefit", "", "time the replacement of all weights by themselves, before the inference"),
    ])  # fmt: skip
    add_missing("Inference", "useManagedMemory", gpu)
    add_missing("Inference", "persistentCacheRatio", gpu, "R")
    add_missing("Inference", "weightStreamingBudget", "a feature of TensorRT without a counterpart here", "V")
    add_missing("Inference", "allocationStrategy", "the arena is planned per profile", "V")
    add_missing("Inference", "batch maxBatch", "TensorRT 10 removed implicit batch; give --shapes", "N")
    add_missing("Inference", "loadRefOutputs refPair accuracyAlgorithm atol rtol accuracyThreshold", "every build is verified against the reference instead (--noVerify turns it off)", "V")
    add_missing("Tuning", "tuneBuildRoutes tuneBuildRouteFile tuningSearch tuningCacheFile tuningTimeOut setBuildRoute", "the builder chooses passes, formats and tactics together; --passes switches single passes", "V")
    add_missing("Tuning", "saveAllEngines dryRun continue helpBuildRoute", "the builder chooses passes, formats and tactics together; --passes switches single passes")
    add("Reporting", [
        ("verbose", "", "trtexec's whole log, with every decision"),
        ("quiet", "", "the six-line summary, warnings and errors only"),
        ("json", "", "print the build, the performance and the warnings as JSON; the log goes to standard error"),
        ("avgRuns", "N", "runs per trace average (10)"),
        ("percentile", "P1,P2,...", "percentiles to report (90,95,99)"),
        ("dumpProfile", "", "print time per layer"),
        ("splitFusions", "", "also build and time the operations of each fused layer alone, and print the time that fusion saves"),
        ("dumpLayerInfo", "", "print the layers"),
        ("dumpOutput", "", "print the outputs"),
        ("dumpRawBindingsToFile", "", "write outputs as raw files"),
        ("dumpOptimizationProfile", "", "print the profiles"),
        ("dumpRefit", "", "print the weights that can be replaced, with their types"),
        ("exportTimes", "FILE", "times of each iteration, JSON"),
        ("exportOutput", "FILE", "outputs, JSON"),
        ("exportProfile", "FILE", "time per layer, JSON"),
        ("exportLayerInfo", "FILE", "layers, JSON (names only unless --profilingVerbosity=detailed)"),
    ])  # fmt: skip
    add("System", [
        ("backend", "NAME", "backend to build for: cpu, cuda, null or another that is installed (cpu)"),
        ("device", "N", "GPU number (cuda)"),
    ])  # fmt: skip
    add_missing("System", "plugins staticPlugins dynamicPlugins setPluginsToSerialize safetyPlugins", "tactics are Python files in whet/tactics; TensorRT plugins cannot be loaded", "LIB")
    add_missing("System", "ignoreParsedPluginLibs", "there are no plugin libraries")
    return out


FLAGS = {f.name: f for f in _make_flags()}

#: Flags with a numeric value: default, type, minimum (None: any; --duration=-1 runs until stopped).
NUMBERS: dict[str, tuple[float, type, float | None]] = {
    "avgTiming": (8, int, 1),
    "builderOptimizationLevel": (3, int, 0),
    "maxTactics": (-1, int, -1),
    "iterations": (10, int, 1),
    "warmUp": (200, float, 0),
    "duration": (3, float, None),
    "sleepTime": (0, float, 0),
    "idleTime": (0, float, 0),
    "infStreams": (1, int, 1),
    "streams": (1, int, 1),
    "useProfile": (0, int, 0),
    "numThreads": (0, int, 0),
    "avgRuns": (10, int, 1),
    "device": (0, int, 0),
}


def parse(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns (name, value) pairs in order, and the names of known flags that are not available.

    Raises UsageError for an unknown flag (with the nearest name), a missing or unexpected value, or a repeated flag.
    """
    options: list[tuple[str, str]] = []
    unavailable: list[str] = []
    i = 0
    while i < len(argv):
        word = argv[i]
        i += 1
        if not word.startswith("--"):
            raise UsageError(f"unexpected {word!r}: options are --name or --name=value; the model is given with --onnx=FILE")
        name, has_value, value = word[2:].partition("=")
        if name not in FLAGS:
            near = suggest_name(f"--{name}", (f"--{known}" for known in FLAGS))
            raise UsageError(f"Unknown option: --{name}.{near} `whet exec --help` lists all.")
        f = FLAGS[name]
        if f.value and not has_value and i < len(argv) and not argv[i].startswith("--"):
            value, i = argv[i], i + 1
        if f.value and not value:
            raise UsageError(f"--{name} needs a value: --{name}={f.value}")
        if not f.value and has_value:
            raise UsageError(f"--{name} is a switch and takes no value; {value!r} was given")
        if f.missing:
            unavailable.append(name)
        elif not f.repeat and any(n == name for n, _ in options):
            raise UsageError(f"--{name} is given twice")
        else:
            options.append((name, value))
    return options, unavailable


def format_help() -> str:
    """The text of `whet exec --help`."""
    lines = [
        "Usage: whet exec --onnx=FILE [options]      build an engine, time it, print a summary",
        "       whet exec --loadEngine=FILE [options] run a saved engine",
        "",
        "The options are trtexec's, with its defaults. Examples:",
        "  whet exec --onnx=resnet18.onnx --saveEngine=r.engine",
        "  whet exec --onnx=model.onnx --bf16 --minShapes=x:1x3x224x224 --optShapes=x:8x3x224x224 --maxShapes=x:16x3x224x224",
        "  whet exec --loadEngine=r.engine --dumpProfile --exportProfile=p.json",
        "",
    ]
    for group in dict.fromkeys(f.group for f in FLAGS.values()):
        here = [f for f in FLAGS.values() if f.group == group]
        served = [f for f in here if not f.missing]
        if served:
            lines.append(f"{group}:")
        for f in served:
            left = f"--{f.name}" + (f"={f.value}" if f.value else "")
            lines.append(f"  {left:<34} {f.help}" if len(left) <= 34 else f"  {left}\n  {'':<34} {f.help}")
    lines.append("Known from trtexec, not available here:")
    reasons: dict[str, list[str]] = {}
    for f in FLAGS.values():
        if f.missing:
            reasons.setdefault(f.missing, []).append(f"--{f.name}")
    for why, names in reasons.items():
        lines.append(f"  {' '.join(names)}\n      {why}")
    lines += [
        "",
        "Sizes take B, K, M or G (powers of two). Names with ':' go in single quotes: 'Input:0':1x3.",
        "Exit codes: 0 done, 1 failed (the reason is printed), 2 wrong usage, 130 interrupted (finished timings are kept).",
    ]
    return "\n".join(lines)
