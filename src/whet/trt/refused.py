"""Names of TensorRT's Python API that whet.trt does not serve, with the reasons. `Class.name` is a member of a class."""

from __future__ import annotations

_V2 = "TensorRT removes IPluginV2; IPluginV3 is served"
_PLUGIN = "IPluginV3 with IPluginCreatorV3One is served, and whet.register takes ops with kernels (docs/plugins.md)"
_ALLOCATOR = "the backend allocates memory itself"
_DEBUG = "a fusion depends on the tensors that are read: name them with mark_debug"
_ALGORITHM = "TensorRT 11 removed it; `whet build --lock` repeats a selection"
_DATA_DEPENDENT = "its output shape depends on data, which engines of whet do not have"
_RUN_TIME_SCALES = "scales that are computed at run time have no kernels"
_MEMORY = "give the weights in the model, or in files next to it"
_ROLES = "weights are named by their tensors: set_named_weights, get_all_weights, get_missing_weights"
_ONE_DEVICE = "engines run on one device"
_DATA_ONLY = "engine files contain data only; there is no lean runtime"
_ROUTES = "`whet build --lock` repeats a selection, and `whet retune` times one again"

REFUSED: dict[str, str] = {
    "IPluginV2": _V2, "IPluginV2Ext": _V2, "IPluginV2DynamicExt": _V2, "IPluginCreator": _V2,
    "IPluginCreatorV3Quick": _PLUGIN, "plugin": _PLUGIN,
    "IGpuAllocator": _ALLOCATOR, "IGpuAsyncAllocator": _ALLOCATOR,
    "IAlgorithm": _ALGORITHM, "IAlgorithmContext": _ALGORITHM, "IAlgorithmIOInfo": _ALGORITHM, "IAlgorithmSelector": _ALGORITHM,
    "IAlgorithmVariant": _ALGORITHM,
    "IAttentionInputLayer": "add_attention returns the attention", "IAttentionOutputLayer": "add_attention returns the attention",
    "BuilderFlag.STRIP_PLAN": "an engine file contains its weights",
    "BuilderFlag.WEIGHT_STREAMING": "weights stay in memory while an engine is open",
    "BuilderFlag.VERSION_COMPATIBLE": "engine files have a version of their own; see `whet retune`",
    "BuilderFlag.EXCLUDE_LEAN_RUNTIME": "engine files contain data only, no runtime",
    "BuilderFlag.INT4": "INT4 weights are read from Q/DQ nodes and need no flag",
    "BuilderFlag.FP4": "whet has no FP4",
    "BuilderFlag.EDITABLE_TIMING_CACHE": "`whet build --lock` fixes a selection",
    "Builder.gpu_allocator": _ALLOCATOR,
    "IBuilderConfig.algorithm_selector": _ALGORITHM,
    "IBuilderConfig.build_route": _ROUTES, "IBuilderConfig.all_build_routes": _ROUTES,
    "IBuilderConfig.remote_auto_tuning_config": "candidates are timed on the machine of the build; `whet auto` runs trials on a cluster",
    "INetworkDefinition.add_nms": _DATA_DEPENDENT,
    "INetworkDefinition.add_non_zero": _DATA_DEPENDENT,
    "INetworkDefinition.add_loop": "loops are read from ONNX; give the network as ONNX to OnnxParser",
    "INetworkDefinition.add_dynamic_quantize": _RUN_TIME_SCALES, "INetworkDefinition.add_dynamic_quantize_v2": _RUN_TIME_SCALES,
    "INetworkDefinition.add_plugin": _PLUGIN, "INetworkDefinition.add_plugin_v2": _V2,
    "INetworkDefinition.add_rotary_embedding": "give the network as ONNX: RotaryEmbedding is read as sines, cosines and products",
    "INetworkDefinition.add_kv_cache_update": "give the network as ONNX: TensorScatter has an op",
    "INetworkDefinition.add_moe": "whet has no op for mixtures of experts",
    "INetworkDefinition.add_dist_collective": _ONE_DEVICE,
    "INetworkDefinition.add_attention_v2": "add_attention is served",
    "INetworkDefinition.add_normalization_v2": "add_normalization is served",
    "INetworkDefinition.mark_unfused_tensors_as_debug_tensors": _DEBUG,
    "INetworkDefinition.mark_weights_refittable": "every weight that constants are computed from can be refitted",
    "INetworkDefinition.set_weights_name": "weights have the names of their constants",
    "OnnxParser.load_model_proto": _MEMORY, "OnnxParser.load_initializer": _MEMORY, "OnnxParser.parse_model_proto": _MEMORY,
    "OnnxParser.parse_with_weight_descriptors": _MEMORY,
    "OnnxParser.get_layer_output_tensor": "tensors of the parsed network have the ONNX file's names",
    "OnnxParser.get_used_vc_plugin_libraries": "engine files contain no code",
    "Runtime.load_runtime": _DATA_ONLY,
    "Runtime.gpu_allocator": _ALLOCATOR,
    "IExecutionContext.unfused_tensors_debug_state": _DEBUG,
    "IExecutionContext.set_communicator": _ONE_DEVICE,
    "ITimingCache.query": "its entries cannot be edited; `whet build --lock` repeats a selection",
    "ITimingCache.update": "its entries cannot be edited; `whet build --lock` repeats a selection",
    "Refitter.set_weights": _ROLES, "Refitter.get_all": _ROLES, "Refitter.get_missing": _ROLES,
    "Refitter.set_dynamic_range": "ranges belong to the build", "Refitter.get_dynamic_range": "ranges belong to the build",
    "Refitter.get_tensors_with_dynamic_range": "ranges belong to the build",
}  # fmt: skip
