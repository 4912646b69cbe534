"""The networks of benchmarks/gpu_networks.py as PyTorch modules with random weights, and their export to ONNX by PyTorch itself.

Needs torch, torchvision, timm and transformers; each is imported by the networks that use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

#: makes (module with one output, named inputs) for a batch
Maker = Callable[[int], tuple[Any, dict[str, Any]]]
Inputs = Callable[[Any, int], dict[str, Any]]
EXPORTERS = ("torchscript", "dynamo")
#: the attention that transformers computes: "sdpa" (its default), "eager"
ATTENTION = {"implementation": "sdpa"}
CALL: dict[str, dict[str, Any]] = {f"{name}Model": {"use_cache": False} for name in ("GPT2", "Llama", "Qwen2", "Gemma")}


def hugging_face(config: str, model: str, inputs: Inputs, **options: Any) -> Maker:
    """A maker of a transformers model, or of a part of it ("WhisperModel.encoder"); its first output is the output."""

    def make(batch: int) -> tuple[Any, dict[str, Any]]:
        import torch
        import transformers

        settings = getattr(transformers, config)(**{"attn_implementation": ATTENTION["implementation"], **options})
        name, _, part = model.partition(".")
        net = getattr(transformers, name)(settings)
        net = getattr(net, part) if part else net
        named = inputs(settings, batch)

        class First(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, *values: Any) -> Any:
                return self.net(**dict(zip(named, values, strict=True)), **CALL.get(model, {}))[0]

        return First(), named

    return make


def ids(length: int, mask: bool = False) -> Inputs:
    """Token ids int64[batch,length]; with `mask` also an attention mask that excludes the last tokens of each sequence."""

    def inputs(settings: Any, batch: int) -> dict[str, Any]:
        import torch

        named = {"input_ids": torch.randint(3, settings.vocab_size, (batch, length))}
        if mask:
            named["attention_mask"] = (torch.arange(length)[None] < length - 5 * torch.arange(1, batch + 1)[:, None] % 40).long()
        return named

    return inputs


def pixels(size: int) -> Inputs:
    def inputs(settings: Any, batch: int) -> dict[str, Any]:
        import torch

        return {"pixel_values": torch.randn(batch, 3, size, size)}

    return inputs


def sound(settings: Any, batch: int) -> dict[str, Any]:
    import torch

    return {"input_features": torch.randn(batch, settings.num_mel_bins, 2 * settings.max_source_positions)}


def speech(settings: Any, batch: int) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(batch, 16000)}


def images(make_net: Callable[[], Any], *shape: int) -> Maker:
    """A maker of a network of images x[batch,*shape]; batch norms are calibrated on random images so that values keep their scale."""

    def make(batch: int) -> tuple[Any, dict[str, Any]]:
        import torch

        net = make_net()
        net.train()
        for part in net.modules():
            if isinstance(part, torch.nn.Linear) and not part.weight.any():
                torch.nn.init.normal_(part.weight, std=0.02)  # some heads begin with zeros, which would hide every error
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                part.momentum = None
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        with torch.no_grad():
            net(torch.randn(4, *shape))
        return net, {"x": torch.randn(batch, *shape)}

    return make


def torchvision_network(name: str, size: int = 224) -> Maker:
    def make_net() -> Any:
        import torchvision

        options = {"init_weights": False, "aux_logits": True} if name == "inception_v3" else {}
        return getattr(torchvision.models, name)(weights=None, **options)

    return images(make_net, 3, size, size)


def timm_network(name: str, size: int = 224, **options: Any) -> Maker:
    def make_net() -> Any:
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return images(make_net, 3, size, size)


def own_network(name: str, *shape: int) -> Maker:
    """A network of _small_networks.py or _torch_models.py."""

    def make_net() -> Any:
        import _small_networks
        import _torch_models

        return getattr(_small_networks, name, None) or getattr(_torch_models, name)

    return images(lambda: make_net()(), *shape)


def _llama() -> dict[str, Any]:
    heads = {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}
    return {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8000, **heads}


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_WHISPER = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
NETWORKS: dict[str, Maker] = {
    "bert_base_128": hugging_face("BertConfig", "BertModel", ids(128)),
    "bert_base_128_mask": hugging_face("BertConfig", "BertModel", ids(128, mask=True)),
    "bert_base_384": hugging_face("BertConfig", "BertModel", ids(384)),
    "bert_large_384": hugging_face("BertConfig", "BertModel", ids(384), **_LARGE),
    "distilbert_128": hugging_face("DistilBertConfig", "DistilBertModel", ids(128)),
    "roberta_128_mask": hugging_face("RobertaConfig", "RobertaModel", ids(128, mask=True)),
    "gpt2_512": hugging_face("GPT2Config", "GPT2Model", ids(512)),
    "t5_small_encoder_128": hugging_face("T5Config", "T5EncoderModel", ids(128)),
    "llama_block_512": hugging_face("LlamaConfig", "LlamaModel", ids(512), **_llama()),
    "clip_image": hugging_face("CLIPVisionConfig", "CLIPVisionModel", pixels(224)),
    "clip_text": hugging_face("CLIPTextConfig", "CLIPTextModel", ids(77)),
    "whisper_tiny_encoder": hugging_face("WhisperConfig", "WhisperModel.encoder", sound, **_WHISPER),
    "segformer_b0": hugging_face("SegformerConfig", "SegformerModel", pixels(512)),
    "vit_b_16": torchvision_network("vit_b_16"),
    "deit_s_distilled": timm_network("deit_small_distilled_patch16_224"),
    "swin_t": torchvision_network("swin_t"),
    "convnext_tiny": torchvision_network("convnext_tiny"),
    "mobilevit_s": timm_network("mobilevit_s", 256),
    "efficientnet_b0": torchvision_network("efficientnet_b0"),
    "efficientnet_b4": torchvision_network("efficientnet_b4", 380),
    "regnet_y_800mf": torchvision_network("regnet_y_800mf"),
    "densenet121": torchvision_network("densenet121"),
    "ghostnet": timm_network("ghostnet_100"),
    "shufflenet_v2_x1_0": torchvision_network("shufflenet_v2_x1_0"),
    "mobilenet_v3_large": torchvision_network("mobilenet_v3_large"),
    "inception_v3": torchvision_network("inception_v3", 299),
    "resnext50_32x4d": torchvision_network("resnext50_32x4d"),
    "resnet50": torchvision_network("resnet50"),
    "unet_256": own_network("UNet2d", 3, 256, 256),
    "unet3d_64": own_network("UNet3d", 1, 64, 64, 64),
    "yolov5s": own_network("Yolov5s", 3, 640, 640),
    "ssdlite": own_network("SsdLite", 3, 320, 320),
    "espcn": own_network("Espcn", 1, 224, 224),
    "crnn": own_network("Crnn", 1, 32, 128),
}

_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_SAM = {"image_size": 512, "hidden_size": 384, "num_attention_heads": 6, "mlp_dim": 1536, "global_attn_indexes": [2, 5, 8, 11]}

#: networks of the same families that nothing was tuned for; rows by name only
FRESH: dict[str, Maker] = {
    "albert_base_128": hugging_face("AlbertConfig", "AlbertModel", ids(128, mask=True), **_BASE),
    "deberta_base_128": hugging_face("DebertaV2Config", "DebertaV2Model", ids(128, mask=True), attn_implementation="eager", relative_attention=True,
                                     pos_att_type=["c2p", "p2c"], position_buckets=256, vocab_size=30000, **_BASE),
    "xlm_roberta_128": hugging_face("XLMRobertaConfig", "XLMRobertaModel", ids(128, mask=True), vocab_size=30000, **_BASE),
    "modernbert_base_512": hugging_face("ModernBertConfig", "ModernBertModel", ids(512, mask=True)),
    "qwen2_block_512": hugging_face("Qwen2Config", "Qwen2Model", ids(512), **_llama()),
    "gemma_block_512": hugging_face("GemmaConfig", "GemmaModel", ids(512), **_llama(), head_dim=64),
    "wav2vec2_base": hugging_face("Wav2Vec2Config", "Wav2Vec2Model", speech),
    "sam_encoder_512": hugging_face("SamVisionConfig", "SamVisionModel", pixels(512), **_SAM),
    "dinov2_small": timm_network("vit_small_patch14_dinov2", 224, img_size=224),
    "beit_base": timm_network("beit_base_patch16_224"),
    "efficientformer_l1": timm_network("efficientformer_l1"),
    "poolformer_s12": timm_network("poolformer_s12"),
    "caformer_s18": timm_network("caformer_s18"),
    "maxvit_tiny": timm_network("maxvit_tiny_rw_224"),
    "coatnet_0": timm_network("coatnet_0_rw_224"),
    "convnextv2_tiny": timm_network("convnextv2_tiny"),
    "mixer_b16": timm_network("mixer_b16_224"),
    "resmlp_12": timm_network("resmlp_12_224"),
    "edgenext_small": timm_network("edgenext_small", 256),
    "fastvit_sa12": timm_network("fastvit_sa12", 256),
}  # fmt: skip


def export(net: Any, named: dict[str, Any], path: str, exporters: tuple[str, ...] = EXPORTERS, opset: int = 18) -> str:
    """Writes the ONNX file by the first exporter that can; its name. Raises the last exporter's error if none can."""
    import torch

    torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder layer of inference has no ONNX form
    failed: Exception | None = None
    for name in exporters:
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                options = {"input_names": list(named), "output_names": ["output"], "opset_version": opset}
                torch.onnx.export(net, tuple(named.values()), path, dynamo=name == "dynamo", **options)
            return name
        except Exception as e:  # noqa: BLE001 - torch.onnx raises exceptions of many classes, those of the traced network included
            failed = e
    assert failed is not None, "no exporter was asked for"
    raise failed
