"""EngineInspector: an engine's layers as TensorRT's JSON."""

from __future__ import annotations

import json

from whet.engine import EnginePlan
from whet.inspector import engine_information
from whet.trt.enums import LayerInformationFormat


class EngineInspector:
    """Layer information of an engine, with all keys."""

    def __init__(self, plan: EnginePlan):
        self._plan = plan
        self.execution_context: object = None

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        """The JSON of all layers and bindings; as lines for ONELINE."""
        data = engine_information(self._plan)
        if format == LayerInformationFormat.JSON:
            return json.dumps(data, indent=2)
        return "\n".join(json.dumps(layer) for layer in data["Layers"])

    def get_layer_information(self, layer_index: int, format: LayerInformationFormat) -> str:
        """The JSON of one layer."""
        return json.dumps(engine_information(self._plan)["Layers"][layer_index])
