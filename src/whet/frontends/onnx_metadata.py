"""The metadata of an ONNX model: producer, version, description, custom properties."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whet.frontends._onnx_load import load_model

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class ModelMetadata:
    """The fields of ONNX Runtime's ModelMetadata."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


def read_model_metadata(source: str | os.PathLike | bytes | onnx.ModelProto) -> ModelMetadata:
    """The metadata of a model. Raises FrontendError for an unreadable one."""
    model, _ = load_model(source)
    return ModelMetadata(
        producer_name=model.producer_name, graph_name=model.graph.name, domain=model.domain, description=model.doc_string,
        graph_description=model.graph.doc_string, version=model.model_version, custom_metadata_map={p.key: p.value for p in model.metadata_props},
    )  # fmt: skip
