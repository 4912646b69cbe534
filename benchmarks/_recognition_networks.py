"""Small transformers and modern convolutional networks of transformers, timm and torchvision, with random weights, for benchmarks/recognition.py.

Every construct of the original is there, with few layers and few channels. Needs torch, torchvision, timm and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from _networks import Maker, own_network
from torch import nn

LENGTH = 24  # tokens
TEXT = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = TEXT | {"num_key_value_heads": 2}
DECODER = {"vocab_size": 120, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART = DECODER | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64}
T5 = {"vocab_size": 120, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 64, "patch_size": 16}
SPEECH = TEXT | {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


class _FirstOutput(nn.Module):
    """A model with inputs in a fixed order; its first output is the output."""

    def __init__(self, net: nn.Module, names: tuple[str, ...], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.net, self.names, self.fixed = net, names, dict(fixed)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        found = self.net(**dict(zip(self.names, values, strict=True)), **self.fixed)
        return found if isinstance(found, torch.Tensor) else next(t for t in found.values() if isinstance(t, torch.Tensor))


def _ids(batch: int) -> torch.Tensor:
    return torch.randint(3, 120, (batch, LENGTH))


def tokens(batch: int) -> dict[str, torch.Tensor]:
    """Token ids without a mask."""
    return {"input_ids": _ids(batch)}


def masked(batch: int) -> dict[str, torch.Tensor]:
    """Token ids, and a mask that excludes the last tokens of each sequence."""
    return tokens(batch) | {"attention_mask": (torch.arange(LENGTH)[None] < LENGTH - 3 * torch.arange(1, batch + 1)[:, None]).long()}


def pairs(batch: int) -> dict[str, torch.Tensor]:
    """Masked token ids for an encoder, others for a decoder."""
    return masked(batch) | {"decoder_input_ids": torch.randint(3, 120, (batch, 10))}


def sound(batch: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(batch, 800)}


def pixels(size: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def hugging_face(model: str, inputs: Callable[[int], dict[str, torch.Tensor]], fixed: Mapping[str, Any] | None = None, **options: Any) -> Maker:
    """A maker of a transformers model, or of a part of it ("WhisperModel.encoder"). `fixed` are further arguments of its forward."""

    def make(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        name, _, part = model.partition(".")
        kind = getattr(transformers, name)
        net = kind(kind.config_class(**options))
        if part:
            net = net.get_submodule(part)
        elif hasattr(net, "config"):
            net.config.use_cache = False
        named = inputs(batch)
        return _FirstOutput(_randomize(net), tuple(named), fixed or {}), named

    return make


def timm_network(name: str, size: int, **options: Any) -> Maker:
    """A maker of a timm network for images of `size`; batch norms are calibrated on random images, so that values keep their scale."""

    def make(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        import timm

        net = timm.create_model(name, pretrained=False, num_classes=10, **options)
        return _calibrated(_randomize(net), size), {"x": torch.randn(batch, 3, size, size)}

    return make


def torchvision_network(name: str, size: int, **options: Any) -> Maker:
    """The same for a class of torchvision.models."""

    def make(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        import torchvision

        net = getattr(torchvision.models, name)(num_classes=10, **options)
        return _calibrated(_randomize(net), size), {"x": torch.randn(batch, 3, size, size)}

    return make


def swin_transformer(size: int, **options: Any) -> Maker:
    """torchvision's SwinTransformer with other sizes than its named ones."""

    def make(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

        version_2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if options.pop("version_2", False) else {}
        net = SwinTransformer(patch_size=[4, 4], embed_dim=32, depths=[2, 2], num_heads=[2, 4], num_classes=10, **version_2, **options)
        return _randomize(net), {"x": torch.randn(batch, 3, size, size)}

    return make


def _randomize(net: nn.Module) -> nn.Module:
    """Parameters that begin with equal values (scales of normalizations, layer scales, biases, empty embeddings), or with very small ones, get
    random ones, which an error in their use would show."""
    with torch.no_grad():
        for p in net.parameters():
            if p.is_floating_point() and p.dim() > 1 and float(p.std()) < 0.002:
                p.copy_(0.05 * torch.randn_like(p))
            elif p.is_floating_point() and p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                value = float(p.flatten()[0])
                p.copy_(value + 0.05 * torch.randn_like(p) if value else 0.05 * torch.randn_like(p))
    return net


def _calibrated(net: nn.Module, size: int) -> nn.Module:
    net.train()
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.momentum = None
    with torch.no_grad():
        net(torch.randn(8, 3, size, size))
    return net.eval()


SWIN = {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 64}
NO_CACHE = {"use_cache": False}

NETWORKS: dict[str, Maker] = {
    # encoders of text
    "bert": hugging_face("BertModel", masked, **TEXT),
    "distilbert": hugging_face("DistilBertModel", masked, vocab_size=120, dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    "roberta": hugging_face("RobertaModel", masked, **TEXT),
    "deberta": hugging_face("DebertaModel", masked, **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta_v2": hugging_face("DebertaV2Model", masked, **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    "albert": hugging_face("AlbertModel", masked, **TEXT, embedding_size=32),
    "electra": hugging_face("ElectraModel", masked, **TEXT, embedding_size=32),
    "xlm_roberta": hugging_face("XLMRobertaModel", masked, **TEXT),
    "mpnet": hugging_face("MPNetModel", masked, **TEXT),
    "longformer": hugging_face("LongformerModel", masked, **TEXT, attention_window=8),
    "modernbert": hugging_face("ModernBertModel", masked, **TEXT, pad_token_id=0, local_attention=8),
    "esm": hugging_face("EsmModel", masked, **TEXT, pad_token_id=1, position_embedding_type="rotary", token_dropout=False),
    "roformer": hugging_face("RoFormerModel", masked, **TEXT),
    "fnet": hugging_face("FNetModel", tokens, vocab_size=120, hidden_size=64, num_hidden_layers=2, intermediate_size=128),
    "squeezebert": hugging_face("SqueezeBertModel", masked, **TEXT, embedding_size=64),
    "xlnet": hugging_face("XLNetModel", masked, NO_CACHE | {"use_mems": False}, vocab_size=120, d_model=64, n_layer=2, n_head=4, d_inner=128),
    # encoders and decoders
    "bart": hugging_face("BartModel", pairs, NO_CACHE, **BART),
    "mbart": hugging_face("MBartModel", pairs, NO_CACHE, **BART),
    "pegasus": hugging_face("PegasusModel", pairs, NO_CACHE, **BART),
    "m2m100": hugging_face("M2M100Model", pairs, NO_CACHE, **BART),
    "t5_encoder": hugging_face("T5EncoderModel", masked, **T5),
    "t5": hugging_face("T5Model", pairs, NO_CACHE, **T5),
    "mt5": hugging_face("MT5Model", pairs, NO_CACHE, **T5, feed_forward_proj="gated-gelu"),
    # decoders
    "gpt2": hugging_face("GPT2Model", masked, NO_CACHE, vocab_size=120, n_embd=64, n_layer=2, n_head=4),
    "opt": hugging_face("OPTModel", masked, NO_CACHE, vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128,
                        word_embed_proj_dim=64),
    "gpt_neox": hugging_face("GPTNeoXModel", masked, NO_CACHE, **TEXT),
    "gptj": hugging_face("GPTJModel", masked, NO_CACHE, vocab_size=120, n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    "codegen": hugging_face("CodeGenModel", masked, NO_CACHE, vocab_size=120, n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    "bloom": hugging_face("BloomModel", masked, NO_CACHE, vocab_size=120, hidden_size=64, n_layer=2, n_head=4),
    "mpt": hugging_face("MptModel", masked, NO_CACHE, vocab_size=120, d_model=64, n_layers=2, n_heads=4),
    "falcon": hugging_face("FalconModel", masked, NO_CACHE, **{k: v for k, v in TEXT.items() if k != "intermediate_size"}),
    "falcon_alibi": hugging_face("FalconModel", masked, NO_CACHE, **{k: v for k, v in TEXT.items() if k != "intermediate_size"}, alibi=True),
    "llama": hugging_face("LlamaModel", masked, NO_CACHE, **GROUPED),
    "mistral": hugging_face("MistralModel", masked, NO_CACHE, **GROUPED, sliding_window=8),
    "qwen2": hugging_face("Qwen2Model", masked, NO_CACHE, **GROUPED),
    "qwen3": hugging_face("Qwen3Model", masked, NO_CACHE, **GROUPED, head_dim=16),
    "gemma": hugging_face("GemmaModel", masked, NO_CACHE, **GROUPED, head_dim=16),
    "gemma2": hugging_face("Gemma2Model", masked, NO_CACHE, **GROUPED, head_dim=16, sliding_window=8),
    "gemma2_eager": hugging_face("Gemma2Model", masked, NO_CACHE, **GROUPED, head_dim=16, sliding_window=8, attn_implementation="eager"),
    "gemma3": hugging_face("Gemma3TextModel", masked, NO_CACHE, **GROUPED, head_dim=16, sliding_window=8),
    "phi": hugging_face("PhiModel", masked, NO_CACHE, **TEXT, partial_rotary_factor=0.5),
    "phi3": hugging_face("Phi3Model", masked, NO_CACHE, **GROUPED, pad_token_id=0),
    "stablelm": hugging_face("StableLmModel", masked, NO_CACHE, **GROUPED, partial_rotary_factor=0.25),
    "cohere": hugging_face("CohereModel", masked, NO_CACHE, **GROUPED),
    "olmo2": hugging_face("Olmo2Model", masked, NO_CACHE, **GROUPED, pad_token_id=0),
    "granite": hugging_face("GraniteModel", masked, NO_CACHE, **GROUPED),
    "starcoder2": hugging_face("Starcoder2Model", masked, NO_CACHE, **GROUPED),
    "mixtral": hugging_face("MixtralModel", masked, NO_CACHE, **GROUPED, num_local_experts=4),
    "mamba": hugging_face("MambaModel", tokens, NO_CACHE, vocab_size=120, hidden_size=64, num_hidden_layers=2, state_size=8),
    # speech
    "wav2vec2": hugging_face("Wav2Vec2Model", sound, **SPEECH),
    "hubert": hugging_face("HubertModel", sound, **SPEECH),
    "wavlm": hugging_face("WavLMModel", sound, **SPEECH),
    "whisper_encoder": hugging_face("WhisperModel.encoder", lambda n: {"input_features": torch.randn(n, 80, 100)}, **BART,
                                    max_source_positions=50, pad_token_id=0),
    "whisper_decoder": hugging_face("WhisperModel.decoder",
                                    lambda n: {"input_ids": _ids(n)[:, :10], "encoder_hidden_states": torch.randn(n, 50, 64)}, NO_CACHE, **BART,
                                    max_source_positions=50, pad_token_id=0),
    # images
    "clip_text": hugging_face("CLIPTextModel", masked, **TEXT, eos_token_id=2),
    "clip_image": hugging_face("CLIPVisionModel", pixels(64), **VISION),
    "siglip_image": hugging_face("SiglipVisionModel", pixels(64), **VISION, vision_use_head=False),
    "blip_image": hugging_face("BlipVisionModel.encoder", lambda n: {"inputs_embeds": torch.randn(n, 17, 64)}, **VISION),
    "dinov2": hugging_face("Dinov2Model", pixels(64), **{k: v for k, v in VISION.items() if k != "intermediate_size"}),
    "hf_vit": hugging_face("ViTModel", pixels(64), **VISION),
    "hf_beit": hugging_face("BeitModel", pixels(64), **VISION, use_relative_position_bias=True, use_mean_pooling=False),
    "hf_swin": hugging_face("SwinModel", pixels(64), image_size=64, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4),
    "hf_swinv2": hugging_face("Swinv2Model", pixels(64), image_size=64, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4),
    "cvt": hugging_face("CvtModel", pixels(64), embed_dim=[32, 64, 64], num_heads=[1, 2, 4], depth=[1, 2, 3], cls_token=[False, False, True]),
    "pvt": hugging_face("PvtModel", pixels(64), image_size=64, hidden_sizes=(16, 32, 32, 64), depths=(1, 1, 1, 1),
                        num_attention_heads=(1, 2, 2, 4)),
    "segformer": hugging_face("SegformerModel", pixels(64), hidden_sizes=(16, 32, 32, 64), depths=(1, 1, 1, 1)),
    "glpn": hugging_face("GLPNModel", pixels(64), hidden_sizes=(16, 32, 32, 64), depths=(1, 1, 1, 1), num_attention_heads=(1, 2, 2, 4)),
    "perceiver": hugging_face("PerceiverModel", lambda n: {"inputs": torch.randn(n, 30, 32)}, d_model=32, num_latents=16, d_latents=64,
                              num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4),
    "sam_encoder": hugging_face("SamVisionModel", pixels(64), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=64,
                                patch_size=8, window_size=4, global_attn_indexes=(1,), output_channels=32, mlp_dim=128),
    "detr_transformer": own_network("DetrLike", 3, 64, 64),
    "unetr": own_network("UnetrLike", 1, 32, 32, 32),
    "rope_interleaved": own_network("InterleavedRotaryBlock", 24, 64),
    # timm
    "timm_vit": timm_network("vit_tiny_patch16_224", 64, img_size=64, depth=2, embed_dim=64, num_heads=4),
    "timm_vit_rope": timm_network("vit_base_patch16_rope_224", 64, img_size=64, depth=2, embed_dim=64, num_heads=4),
    "eva02": timm_network("eva02_tiny_patch14_224", 56, img_size=56, depth=2, embed_dim=64, num_heads=4),
    "beit": timm_network("beit_base_patch16_224", 64, img_size=64, depth=2, embed_dim=64, num_heads=4),
    "cait": timm_network("cait_xxs24_224", 64, img_size=64, depth=2, embed_dim=64, num_heads=4),
    "deit3": timm_network("deit3_small_patch16_224", 64, img_size=64, depth=2, embed_dim=64, num_heads=4),
    "swin": timm_network("swin_tiny_patch4_window7_224", 64, **SWIN),
    "swinv2": timm_network("swinv2_tiny_window8_256", 64, **SWIN),
    "swinv2_cr": timm_network("swinv2_cr_tiny_224", 64, img_size=64, window_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4)),
    "twins_svt": timm_network("twins_svt_small", 64, img_size=64, embed_dims=(32, 32, 64, 64), num_heads=(1, 2, 2, 4), depths=(2, 2, 2, 2)),
    "twins_pcpvt": timm_network("twins_pcpvt_small", 64, img_size=64, embed_dims=(32, 32, 64, 64), num_heads=(1, 2, 2, 4), depths=(1, 1, 1, 1)),
    "pvt_v2": timm_network("pvt_v2_b0", 64),
    "coatnet": timm_network("coatnet_nano_rw_224", 64, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64), stem_width=(16, 32)),
    "maxvit": timm_network("maxvit_pico_rw_256", 64, img_size=64, depths=(1, 1), embed_dim=(32, 64)),
    "efficientformer": timm_network("efficientformer_l1", 224, depths=(1, 1, 1, 2), embed_dims=(32, 32, 64, 64), num_vit=1),
    "efficientformerv2": timm_network("efficientformerv2_s0", 224),
    "mobilevit": timm_network("mobilevit_xxs", 64),
    "mobilevitv2": timm_network("mobilevitv2_050", 64),
    "fastvit": timm_network("fastvit_t8", 64, layers=(1, 1, 1, 1)),
    "fastvit_attention": timm_network("fastvit_sa12", 64, layers=(1, 1, 1, 1), embed_dims=(32, 32, 64, 64)),
    "poolformer": timm_network("poolformer_s12", 64),
    "caformer": timm_network("caformer_s18", 64),
    "convnext": timm_network("convnext_atto", 64, depths=(1, 1, 1, 1), dims=(32, 32, 64, 64)),
    "convnextv2": timm_network("convnextv2_atto", 64, depths=(1, 1, 1, 1), dims=(32, 32, 64, 64)),
    "focalnet": timm_network("focalnet_tiny_srf", 64),
    "davit": timm_network("davit_tiny", 64, depths=(1, 1), embed_dims=(32, 64), num_heads=(2, 4), window_size=4),
    "gcvit": timm_network("gcvit_xxtiny", 224),
    "xcit": timm_network("xcit_nano_12_p16_224", 64, depth=2, embed_dim=64, num_heads=4),
    "levit": timm_network("levit_128s", 224),
    "tiny_vit": timm_network("tiny_vit_5m_224", 224),
    "hiera": timm_network("hiera_tiny_224", 64, img_size=(64, 64), embed_dim=32, stages=(1, 1, 1, 1)),
    "mvitv2": timm_network("mvitv2_tiny", 224),
    "edgenext": timm_network("edgenext_xx_small", 64, depths=(1, 1, 1, 2), dims=(16, 32, 32, 64)),
    "inception_next": timm_network("inception_next_atto", 64, depths=(1, 1, 1, 1)),
    "efficientvit": timm_network("efficientvit_b0", 64),
    "repvit": timm_network("repvit_m0_9", 64, embed_dim=(16, 32, 32, 64), depth=(1, 1, 1, 1)),
    "mixer": timm_network("mixer_s32_224", 64, img_size=64),
    "crossvit": timm_network("crossvit_9_240", 240),
    "mambaout": timm_network("mambaout_femto", 64, depths=(1, 1, 1, 1), dims=(32, 32, 64, 64)),
    # torchvision
    "tv_vit": torchvision_network("VisionTransformer", 64, image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64,
                                  mlp_dim=128),
    "tv_swin": swin_transformer(64, window_size=[4, 4]),
    "tv_swin_padded": swin_transformer(72, window_size=[7, 7]),
    "tv_swin_v2": swin_transformer(64, window_size=[4, 4], version_2=True),
    "tv_maxvit": torchvision_network("MaxVit", 64, input_size=(64, 64), stem_channels=16, partition_size=2, block_channels=[16, 32],
                                     block_layers=[1, 1],  head_dim=8, stochastic_depth_prob=0.0),
}  # fmt: skip
