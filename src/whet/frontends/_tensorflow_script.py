"""Converts a TensorFlow model to ONNX with tf2onnx, as a program without whet: `python _tensorflow_script.py KIND SOURCE TARGET OPSET`.

KIND is saved_model (a folder), keras (.h5, .keras), graph_def (a frozen graph, .pb) or tflite. The environment of this program needs tensorflow and
tf2onnx (tflite: no tensorflow), which often require other versions than the packages of whet's environment, and tf_keras for models of Keras 2.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # converting needs no GPU


def main(kind: str, source: str, target: str, opset: int) -> None:
    """Writes the ONNX model of `source` to `target`."""
    from tf2onnx import convert

    if kind == "saved_model":
        with contextlib.suppress(ImportError):
            import tf_keras  # noqa: F401  it registers Keras 2's optimizers, without which old SavedModels do not load
        sys.argv = ["tf2onnx", "--saved-model", source, "--output", target, "--opset", str(opset)]
        convert.main()
    elif kind == "tflite":
        sys.argv = ["tf2onnx", "--tflite", source, "--output", target, "--opset", str(opset)]
        convert.main()
    elif kind == "keras":
        _convert_keras(convert, source, target, opset)
    else:
        _convert_graph_def(convert, source, target, opset)


def _convert_keras(convert: Any, source: str, target: str, opset: int) -> None:
    """A Keras model as a function of its inputs: tf2onnx's own reader of Keras models needs names that Keras 3 no longer has."""
    import tensorflow as tf

    try:
        model = tf.keras.models.load_model(source, compile=False)
    except (TypeError, ValueError) as e:  # written by Keras 2 with layers whose configuration changed
        try:
            import tf_keras
        except ImportError:
            raise e from None
        model = tf_keras.models.load_model(source, compile=False)
    signature = [tf.TensorSpec(t.shape, t.dtype, name=t.name.partition(":")[0]) for t in model.inputs]

    names = list(getattr(model, "output_names", []))

    @tf.function(input_signature=signature)
    def run(*inputs: Any) -> Any:
        outputs = model(inputs[0] if len(inputs) == 1 else list(inputs), training=False)
        values = tf.nest.flatten(outputs)
        return dict(zip(names, values, strict=True)) if len(set(names)) == len(values) else outputs

    convert.from_function(run, input_signature=signature, opset=opset, output_path=target)


def _convert_graph_def(convert: Any, source: str, target: str, opset: int) -> None:
    """A frozen graph: its inputs are the placeholders, its outputs the values that no node reads."""
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef()
    with open(source, "rb") as file:
        graph.ParseFromString(file.read())
    read = {name.lstrip("^").partition(":")[0] for node in graph.node for name in node.input}
    inputs = [f"{n.name}:0" for n in graph.node if n.op in ("Placeholder", "PlaceholderWithDefault")]
    nothing = ("Const", "NoOp", "Assert", "Placeholder", "PlaceholderWithDefault", "VariableV2", "VarHandleOp")
    outputs = [f"{n.name}:0" for n in graph.node if n.name not in read and n.op not in nothing]
    if any(n.op in ("VariableV2", "VarHandleOp", "ReadVariableOp") for n in graph.node):
        sys.exit("the graph has variables: it is not frozen. Give the SavedModel, or freeze it.")
    convert.from_graph_def(graph, input_names=inputs, output_names=outputs, opset=opset, output_path=target)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where onnx.py would hide the package
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
