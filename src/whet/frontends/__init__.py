"""Readers from ONNX, Caffe, TensorFlow and PyTorch to Network, and the ONNX writer. Only this package and the zoo import onnx."""

from whet.frontends._onnx_load import external_files
from whet.frontends.any_file import check_file, model_kind, network_from_file
from whet.frontends.caffe import check_caffe, network_from_caffe
from whet.frontends.onnx import network_from_onnx
from whet.frontends.onnx_check import Problem, Report, check_onnx
from whet.frontends.onnx_writer import onnx_from_network, save_onnx
from whet.frontends.tensorflow import network_from_tensorflow

__all__ = [
    "Problem", "Report", "check_caffe", "check_file", "check_onnx", "external_files", "model_kind", "network_from_caffe", "network_from_file",
    "network_from_onnx", "network_from_tensorflow", "onnx_from_network", "save_onnx",
]  # fmt: skip
