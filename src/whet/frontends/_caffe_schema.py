"""The protobuf messages of Caffe's files, as far as inference needs them; declared here, so that Caffe is not needed.

A prototxt is text: fields are found by name, so TEXT needs no field numbers. A caffemodel is binary: BINARY has the numbers of Caffe's
caffe.proto for a layer's name and its blobs, and every other field is skipped. A packed array of floats has the wire format of bytes, and
is declared so, which reads the weights of a large network without a Python object per number.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# message: "type name" per field, repeated fields with "*"; a default follows "=". Names of enums and messages are used as types.
_ENUMS = {
    "Phase": "TRAIN TEST",
    "PoolMethod": "MAX AVE STOCHASTIC",
    "RoundMode": "CEIL FLOOR",
    "EltwiseOp": "PROD SUM MAX",
    "NormRegion": "ACROSS_CHANNELS WITHIN_CHANNEL",
    "ReductionOp": "UNUSED SUM ASUM SUMSQ MEAN",
    "CodeType": "NONE CORNER CENTER_SIZE CORNER_SIZE",
    "V1Type": "NONE ABSVAL ACCURACY ARGMAX BNLL CONCAT CONTRASTIVE_LOSS CONVOLUTION DATA DECONVOLUTION DROPOUT DUMMY_DATA EUCLIDEAN_LOSS ELTWISE "
    "EXP FLATTEN HDF5_DATA HDF5_OUTPUT HINGE_LOSS IM2COL IMAGE_DATA INFOGAIN_LOSS INNER_PRODUCT LRN MEMORY_DATA MULTINOMIAL_LOGISTIC_LOSS MVN "
    "POOLING POWER RELU SIGMOID SIGMOID_CROSS_ENTROPY_LOSS SILENCE SOFTMAX SOFTMAX_LOSS SPLIT SLICE TANH WINDOW_DATA THRESHOLD",
}
V1_TYPES = {
    "ABSVAL": "AbsVal", "ARGMAX": "ArgMax", "BNLL": "BNLL", "ELTWISE": "Eltwise", "INNER_PRODUCT": "InnerProduct", "LRN": "LRN", "MVN": "MVN",
    "RELU": "ReLU", "TANH": "TanH", "SOFTMAX_LOSS": "SoftmaxWithLoss", "IMAGE_DATA": "ImageData", "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
}  # fmt: skip
"""Types of the old `layers { type: RELU }`, where the new name is not the old one in CamelCase."""

_WINDOW = "uint32* pad, uint32* kernel_size, uint32* stride, uint32* dilation, uint32 pad_h, uint32 pad_w, uint32 kernel_h, uint32 kernel_w, "
_LAYER = (
    "string name, string* bottom, string* top, Phase phase, StateRule* include, StateRule* exclude, "
    "ArgMax argmax_param, BatchNorm batch_norm_param, Bias bias_param, Clip clip_param, Concat concat_param, Convolution convolution_param, "
    "Crop crop_param, DetectionOutput detection_output_param, Eltwise eltwise_param, ELU elu_param, Embed embed_param, Exp exp_param, "
    "Flatten flatten_param, InnerProduct inner_product_param, Input input_param, Interp interp_param, Log log_param, LRN lrn_param, "
    "MVN mvn_param, Normalize norm_param, Permute permute_param, Pooling pooling_param, Power power_param, PReLU prelu_param, "
    "PriorBox prior_box_param, Reduction reduction_param, ReLU relu_param, ReLU6 relu6_param, Reshape reshape_param, Scale scale_param, "
    "ShuffleChannel shuffle_channel_param, Slice slice_param, Softmax softmax_param, Swish swish_param, Threshold threshold_param, "
    "Tile tile_param, Parameter parameter_param, Python python_param"
)
_TEXT = {
    "Net": "string name, string* input, Shape* input_shape, int64* input_dim, Layer* layer, V1Layer* layers",
    "Layer": f"string type, {_LAYER}",
    "V1Layer": f"V1Type type, V0Layer layer, {_LAYER}",
    "V0Layer": "string name",
    "Shape": "int64* dim",
    "StateRule": "Phase phase, int32 min_level, int32 max_level, string* stage, string* not_stage",
    "ArgMax": "bool out_max_val, uint32 top_k = 1, int32 axis",
    "BatchNorm": "bool use_global_stats, float eps = 1e-5",
    "Bias": "int32 axis = 1, int32 num_axes = 1",
    "Clip": "float min, float max",
    "Concat": "int32 axis = 1, uint32 concat_dim = 1",
    "Convolution": "uint32 num_output, bool bias_term = true, uint32 group = 1, int32 axis = 1, uint32 stride_h, uint32 stride_w, "
    + _WINDOW.removesuffix(", "),
    "Crop": "int32 axis = 2, uint32* offset",
    "NMS": "float nms_threshold = 0.3, int32 top_k, float eta = 1.0",
    "DetectionOutput": "uint32 num_classes, bool share_location = true, int32 background_label_id, NMS nms_param, "
    "CodeType code_type = CORNER, bool variance_encoded_in_target, int32 keep_top_k = -1, float confidence_threshold",
    "Eltwise": "EltwiseOp operation = SUM, float* coeff",
    "ELU": "float alpha = 1",
    "Embed": "uint32 num_output, uint32 input_dim, bool bias_term = true",
    "Exp": "float base = -1, float scale = 1, float shift",
    "Flatten": "int32 axis = 1, int32 end_axis = -1",
    "InnerProduct": "uint32 num_output, bool bias_term = true, int32 axis = 1, bool transpose",
    "Input": "Shape* shape",
    "Interp": "int32 height, int32 width, int32 zoom_factor = 1, int32 shrink_factor = 1, int32 pad_beg, int32 pad_end",
    "Log": "float base = -1, float scale = 1, float shift",
    "LRN": "uint32 local_size = 5, float alpha = 1, float beta = 0.75, NormRegion norm_region, float k = 1",
    "MVN": "bool normalize_variance = true, bool across_channels, float eps = 1e-9",
    "Normalize": "bool across_spatial = true, bool channel_shared = true, float eps = 1e-10",
    "Permute": "uint32* order",
    "Pooling": "PoolMethod pool, uint32 pad, uint32 pad_h, uint32 pad_w, uint32 kernel_size, uint32 kernel_h, uint32 kernel_w, uint32 stride = 1, "
    "uint32 stride_h, uint32 stride_w, bool global_pooling, RoundMode round_mode, bool ceil_mode = true",
    "Power": "float power = 1, float scale = 1, float shift",
    "PReLU": "bool channel_shared",
    "PriorBox": "float* min_size, float* max_size, float* aspect_ratio, bool flip = true, bool clip, float* variance, uint32 img_size, "
    "uint32 img_h, uint32 img_w, float step, float step_h, float step_w, float offset = 0.5",
    "Reduction": "ReductionOp operation = SUM, int32 axis, float coeff = 1",
    "ReLU": "float negative_slope",
    "ReLU6": "float threshold = 6",
    "Reshape": "Shape shape, int32 axis, int32 num_axes = -1",
    "Scale": "int32 axis = 1, int32 num_axes = 1, bool bias_term",
    "ShuffleChannel": "uint32 group = 1",
    "Slice": "int32 axis = 1, uint32* slice_point, uint32 slice_dim = 1",
    "Softmax": "int32 axis = 1",
    "Swish": "float beta = 1",
    "Threshold": "float threshold",
    "Tile": "int32 axis = 1, int32 tiles",
    "Parameter": "Shape shape",
    "Python": "string module, string layer",
}
_BINARY = {
    "Shape": "int64* dim 1",
    "Blob": "Shape shape 7, bytes data 5, bytes double_data 8, int32 num 1, int32 channels 2, int32 height 3, int32 width 4",
    "Layer": "string name 1, string type 2, Blob* blobs 7",
    "V1Layer": "string name 4, Blob* blobs 6",
    "Net": "string name 1, Layer* layer 100, V1Layer* layers 2",
}


@cache
def get_text_net() -> Any:
    """The class of a prototxt's message."""
    return _make_classes("whet.caffe_text", _TEXT, _ENUMS)["Net"]


@cache
def get_binary_net() -> Any:
    """The class of a caffemodel's message: layers with names and blobs."""
    return _make_classes("whet.caffe_binary", _BINARY, {})["Net"]


def _make_classes(package: str, messages: dict[str, str], enums: dict[str, str]) -> dict[str, Any]:
    proto = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, values in enums.items():
        enum = proto.message_type.add(name=f"{name}Scope").enum_type.add(name=name)  # a scope each, as SUM is a value of two
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in messages.items():
        message = proto.message_type.add(name=name)
        for number, text in enumerate(fields.split(", "), 1):
            declaration, _, default = text.partition(" = ")
            kind, field_name, *fixed = declaration.split()
            field = message.field.add(name=field_name, number=int(fixed[0]) if fixed else number)
            field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in enums or kind in messages:
                field.type = field.TYPE_ENUM if kind in enums else field.TYPE_MESSAGE
                field.type_name = f".{package}.{kind}Scope.{kind}" if kind in enums else f".{package}.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
            if default:
                field.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}
