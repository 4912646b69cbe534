"""EngineInspector: an engine's layers as TensorRT's JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from whet.engine import EnginePlan
from whet.inspector import engine_information
from whet.trt.enums import LayerInformationFormat

if TYPE_CHECKING:
    from whet.trt.context import IExecutionContext


class EngineInspector:
    """Layer information of an engine with all keys, in TensorRT 10's form; for the shapes and profile of `execution_context`, if it is set."""

    def __init__(self, plan: EnginePlan):
        self._plan = plan
        self.execution_context: IExecutionContext | None = None
        self.error_recorder: Any = None

    def _information(self) -> dict[str, Any]:
        context = self.execution_context
        if context is None:
            return engine_information(self._plan)
        shapes = {name: context.get_tensor_shape(name) for name in context.engine.engine.inputs}
        return engine_information(self._plan, shapes=shapes, profile=context.active_optimization_profile)

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        """The JSON of all layers and bindings; one line per layer for ONELINE."""
        data = self._information()
        if format == LayerInformationFormat.JSON:
            return json.dumps(data, indent=2)
        return "\n".join(_format_layer(layer) for layer in data["Layers"]) + "\n"

    def get_layer_information(self, layer_index: int, format: LayerInformationFormat) -> str:
        """The JSON or the line of one layer."""
        layer = self._information()["Layers"][layer_index]
        return json.dumps(layer, indent=2) if format == LayerInformationFormat.JSON else _format_layer(layer)


def _format_layer(layer: dict[str, Any]) -> str:
    inputs, outputs = (", ".join(_format_tensor(t) for t in layer[side]) for side in ("Inputs", "Outputs"))
    return f"{layer['Name']}, LayerType: {layer['LayerType']}, Inputs: [{inputs}], Outputs: [{outputs}], TacticName: {layer.get('TacticName', '')}"


def _format_tensor(t: dict[str, Any]) -> str:
    return f"{t['Name']} {t['Dimensions']} {t['Format/Datatype']}"
