"""A plugin in the form of TensorRT's Python sample for IPluginV3: circular padding of the last two axes."""

import numpy as np

import whet.trt as trt
from whet.runtime.memory import make_array_at

NAME = "CircPadPlugin"


class CircPad(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
    """Pads (top, bottom, left, right) with the opposite side's values; two tactics compute the same."""

    def __init__(self, fc=None):
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuild.__init__(self)
        trt.IPluginV3OneRuntime.__init__(self)
        self.pads = []
        self.tactic = 1
        self.num_outputs = 1
        self.plugin_namespace = ""
        self.plugin_name = NAME
        self.plugin_version = "1"
        if fc is not None:
            assert fc[0].name == "pads"
            self.pads = fc[0].data

    def get_capability_interface(self, type):
        return self

    def get_output_data_types(self, input_types):
        return [input_types[0]]

    def get_output_shapes(self, inputs, shape_inputs, exprBuilder):
        output_dims = trt.DimsExprs(inputs[0])
        for i in range(len(self.pads) // 2):
            axis = len(output_dims) - 2 + i
            both = exprBuilder.constant(int(self.pads[2 * i] + self.pads[2 * i + 1]))
            output_dims[axis] = exprBuilder.operation(trt.DimensionOperation.SUM, inputs[0][axis], both)
        return [output_dims]

    def get_fields_to_serialize(self):
        return trt.PluginFieldCollection([trt.PluginField("pads", self.pads, trt.PluginFieldType.INT32)])

    def configure_plugin(self, inp, out):
        assert len(inp[0].desc.dims) == len(out[0].desc.dims)

    def on_shape_change(self, inp, out):
        self.shape = tuple(inp[0].dims)

    def supports_format_combination(self, pos, in_out, num_inputs):
        desc = in_out[pos].desc
        return desc.format == trt.TensorFormat.LINEAR and desc.type in (trt.DataType.FLOAT, trt.DataType.HALF) and desc.type == in_out[0].desc.type

    def get_valid_tactics(self):
        return [1, 2]

    def set_tactic(self, tactic):
        self.tactic = tactic

    def enqueue(self, input_desc, output_desc, inputs, outputs, workspace, stream):
        dtype = np.dtype(trt.nptype(input_desc[0].type))
        x = make_array_at(inputs[0], tuple(input_desc[0].dims), dtype)
        y = make_array_at(outputs[0], tuple(output_desc[0].dims), dtype)
        assert x.shape == self.shape
        top, bottom, left, right = map(int, self.pads)
        if self.tactic == 1:
            y[:] = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), mode="wrap")
        else:
            rows = np.arange(-top, x.shape[2] + bottom) % x.shape[2]
            columns = np.arange(-left, x.shape[3] + right) % x.shape[3]
            y[:] = x[:, :, rows][..., columns]

    def attach_to_context(self, context):
        return self.clone()

    def clone(self):
        cloned = CircPad()
        cloned.__dict__.update(self.__dict__)
        return cloned


class CircPadCreator(trt.IPluginCreatorV3One):
    """Makes CircPad plugins."""

    def __init__(self):
        trt.IPluginCreatorV3One.__init__(self)
        self.name = NAME
        self.plugin_namespace = ""
        self.plugin_version = "1"
        self.field_names = trt.PluginFieldCollection([trt.PluginField("pads", np.array([]), trt.PluginFieldType.INT32)])

    def create_plugin(self, name, fc, phase):
        return CircPad(fc)
