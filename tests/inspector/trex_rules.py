"""Requirements of readers of TensorRT's layer JSON (trt-engine-explorer 0.2 and the 11.1 analyser), as a validator."""

TYPES_OF_WEIGHTS = {"Int8", "Half", "Float", "Int32", "FP16", "FP32"}
FORMATS = {  # the table of trt-engine-explorer (for images; other texts count as unknown, with 0 bytes)
    "Row major linear FP32", "Row major linear FP16 format", "Row major Int8 format", "Row major linear Int32", "Row major linear BOOL",
    "Row major linear BFloat16 format", "Row major linear FP8 format", "Row major linear Int64 format", "Row major linear UInt8 format",
    "Channel major FP32 format", "Channel major FP16 format", "Channel major Int8 format", "Channel major UInt8 format",
    "Channel major FP32 format where channel % 4 == 0", "Channel major Int8 format where channel % 4 == 0",
    "Channel major INT8 format where channel % 16 == 0", "Two wide channel vectorized row major FP16 format",
    "Four wide channel vectorized row major Int8 format", "Thirty-two wide channel vectorized row major Int8 format",
    "Sixteen wide channel vectorized row major FP16 format",
    *(f"Channel major FP16 format where channel % {n} == 0" for n in (2, 4, 8, 16)),
    *(f"Channel major BFloat16 format where channel % {n} == 0" for n in (2, 4, 8)),
    *"Half Float Double BFloat16 Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 FP8 Bool".split(),
}  # fmt: skip
NEEDED = {
    "Convolution": {
        "Kernel", "PaddingMode", "PrePadding", "PostPadding", "Stride", "Dilation", "OutMaps", "Groups", "Weights", "Bias", "HasBias",
        "HasReLU", "HasSparseWeights", "HasDynamicFilter", "HasDynamicBias", "HasResidual", "ConvXAsActInputIdx", "BiasAsActInputIdx",
        "ResAsActInputIdx", "Activation",
    },
    "Reformat": {"Origin"},
    "PointWise": {"ParameterSubType", "NbInputArgs", "InputArgs", "NbOutputVars", "OutputVars", "NbOperations", "Operations"},
    "Pooling": {
        "PoolingType", "WindowSize", "AverageCountExcludesPadding", "PaddingMode", "PrePadding", "PostPadding", "Stride", "BlendFactor",
    },
    "Shuffle": {"FirstTranspose", "SecondTranspose", "Reshape", "ZeroIsPlaceholder"},
}  # fmt: skip
ALWAYS = {"Name", "LayerType", "Inputs", "Outputs", "TacticName", "TacticValue", "StreamId", "Metadata"}


def check_layers(info: dict) -> None:
    """Asserts every rule for detailed layer information."""
    assert isinstance(info["Layers"], list)
    assert info["Layers"]
    assert info["Bindings"]
    assert all(isinstance(b, str) for b in info["Bindings"])
    names = [layer["Name"] for layer in info["Layers"]]
    assert len(set(names)) == len(names)
    made = set()
    for layer in info["Layers"]:
        assert set(layer) >= ALWAYS, layer["Name"]
        assert isinstance(layer["TacticValue"], str)
        assert layer["TacticValue"].startswith("0x")
        for t in (*layer["Inputs"], *layer["Outputs"]):
            assert isinstance(t["Name"], str)
            assert all(type(d) is int and d >= 0 for d in t["Dimensions"]), t
            assert t["Format/Datatype"].rstrip(".") in FORMATS, t
            assert t["Location"] in ("Device", "Host")
        if layer["LayerType"] in ("NoOp", "Constant"):  # dropped by LayerType, but kept by ParameterType: one or the other
            assert "ParameterType" not in layer
        if layer["LayerType"] == "NoOp":
            assert len(layer["Inputs"]) == len(layer["Outputs"]) == 1
        for key in NEEDED.get(layer.get("ParameterType", ""), ()):
            assert key in layer, (layer["Name"], key)
        if layer.get("ParameterType") == "Convolution":
            assert len(layer["Kernel"]) == 2
            assert type(layer["Groups"]) is int
            assert all(len(t["Dimensions"]) == 4 for t in (layer["Inputs"][0], layer["Outputs"][0]))
            assert layer["Weights"]["Type"] in TYPES_OF_WEIGHTS
            assert layer["Weights"]["Count"] > 0
        made |= {t["Name"] for t in layer["Outputs"]}
        for t in layer["Inputs"]:  # layers in execution order
            assert t["Name"] in made or t["Name"] in info["Bindings"] or layer["LayerType"] == "Constant", t["Name"]


def check_profile(records: list, info: dict) -> None:
    """Asserts every rule for profile records, joined with the layers by name."""
    assert set(records[0]) == {"count"}
    for r in records[1:]:
        assert set(r) == {"name", "timeMs", "averageMs", "medianMs", "percentage"}
    assert [r["name"] for r in records[1:]] == [layer["Name"] for layer in info["Layers"]]
    assert abs(sum(r["percentage"] for r in records[1:]) - 100) < 1e-6
