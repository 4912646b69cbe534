"""Constants of cuDNN's graph API, from cudnn_graph.h of cuDNN 9; their meaning never changes within a major version."""

from __future__ import annotations

# Kinds of descriptors
POINTWISE, CONVOLUTION, ENGINE, CONFIG, HEURISTIC, PLAN, KNOB_CHOICE, KNOB_INFO = 0, 1, 2, 3, 4, 5, 7, 8
FORWARD, BACKWARD_DATA, OPERATION_POINTWISE, GRAPH, PACK, TENSOR, DEVICE = 10, 12, 13, 15, 16, 17, 38

# Types of attributes
T_HANDLE, T_DATA_TYPE, T_BOOL, T_INT64, T_FLOAT, T_DOUBLE, T_POINTER, T_CONVOLUTION_MODE, T_HEURISTIC, T_KNOB = range(10)
T_NUMERICAL_NOTE, T_POINTWISE_MODE, T_DESCRIPTOR, T_BEHAVIOR_NOTE, T_CHAR = 11, 14, 15, 19, 24

# Attributes
POINTWISE_MODE, POINTWISE_PRECISION, RELU_LOW, RELU_HIGH, RELU_SLOPE, ELU_ALPHA = 0, 1, 3, 4, 5, 6
COMPUTE_TYPE, CONVOLUTION_MODE, DILATIONS, STRIDES, POST_PADDINGS, PRE_PADDINGS, SPATIAL_DIMS = range(100, 107)
HEURISTIC_MODE, HEURISTIC_GRAPH, HEURISTIC_RESULTS, HEURISTIC_DEVICE = 200, 201, 202, 204
CONFIG_ENGINE, CONFIG_KNOBS, CONFIG_WORKSPACE = 300, 302, 303
PLAN_HANDLE, PLAN_CONFIG, PLAN_WORKSPACE, PLAN_DEVICE = 400, 401, 402, 407
KNOB_TYPE, KNOB_VALUE = 600, 601
FORWARD_ALPHA, FORWARD_BETA, FORWARD_CONVOLUTION, FORWARD_W, FORWARD_X, FORWARD_Y = range(700, 706)
BACKWARD_ALPHA, BACKWARD_BETA, BACKWARD_CONVOLUTION, BACKWARD_W, BACKWARD_DX, BACKWARD_DY = range(706, 712)
OPERATION_STEP, OPERATION_X, OPERATION_B, OPERATION_Y = range(750, 754)
GRAPH_HANDLE, GRAPH_OPERATIONS, GRAPH_ENGINES = 800, 801, 802
TENSOR_ALIGNMENT, TENSOR_TYPE, TENSOR_DIMS, TENSOR_STRIDES, TENSOR_ID, TENSOR_VIRTUAL = 900, 901, 902, 903, 906, 907
PACK_IDS, PACK_POINTERS, PACK_WORKSPACE = 1000, 1001, 1003
INFO_TYPE, INFO_MAXIMUM, INFO_MINIMUM, INFO_STRIDE = 1200, 1201, 1202, 1203
ENGINE_GRAPH, ENGINE_INDEX, ENGINE_KNOBS, ENGINE_NUMERICAL, ENGINE_BEHAVIOR, ENGINE_DEVICE = 1300, 1301, 1302, 1303, 1305, 1307

DATA_TYPES = {"f32": 0, "f16": 2, "bf16": 9}
CROSS_CORRELATION = 1
HEURISTICS = {"a": 3, "b": 1, "fallback": 2}  # in the order in which their proposals are tried

# Pointwise operations
ADD, RELU, TANH, SIGMOID, ELU, GELU, SWISH, GELU_TANH = 0, 100, 101, 102, 103, 104, 106, 107

NUMERICAL_NOTES = (
    "tensor core", "down-convert", "reduced-precision sums", "FFT", "nondeterministic", "Winograd", "Winograd 4x4", "Winograd 6x6",
    "Winograd 13x13", "strict NaN",
)  # fmt: skip
BEHAVIOR_NOTES = ("compiled at run time", "int8x32 filters", "int8x32 bias", "graph API", "uses cuBLASLt")

STATUS = {
    1001: "not initialized", 1002: "two versions of its sublibraries are mixed", 1008: "a sublibrary cannot be loaded", 2000: "bad parameter",
    2002: "null pointer", 2003: "misaligned pointer", 2008: "shapes do not match", 3000: "not supported", 3001: "this graph is not supported",
    3002: "this shape is not supported", 3003: "this type is not supported", 3004: "this layout is not supported",
    3005: "the driver is too old", 3007: "not for this GPU", 3008: "its run-time compiler is missing", 3009: "a sublibrary is missing",
    3010: "too little shared memory", 3011: "this padding is not supported", 4000: "internal error", 4001: "its compilation failed",
    4003: "host memory ran out", 4004: "device memory ran out", 5000: "execution failed", 5001: "a driver call failed",
}  # fmt: skip
