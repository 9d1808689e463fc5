"""Tiny random models of real architectures, each with a batch maker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB = 61


@dataclass(frozen=True)
class Architecture:
    """How to build a model and its batches."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]]


def _tokens(generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _pixels(generator: torch.Generator) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def _speech(generator: torch.Generator) -> dict[str, Any]:
    return {
        "input_features": torch.randn(2, 8, 24, generator=generator),
        "labels": torch.randint(0, VOCAB, (2, 6), generator=generator),
    }


def _llama(**options: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "use_cache": False, **options}))


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    )


def _mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def _t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def _bert() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=32,
        )
    )


def _mamba() -> MambaForCausalLM:
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False
        )
    )


def _vit() -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    )


def _whisper() -> WhisperForConditionalGeneration:
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=12,
            max_target_positions=16,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(_gpt2, _tokens),
    "llama-tied": Architecture(lambda: _llama(tie_word_embeddings=True), _tokens),
    "llama-untied": Architecture(lambda: _llama(tie_word_embeddings=False), _tokens),
    "llama-grouped": Architecture(lambda: _llama(num_key_value_heads=2), _tokens),
    "mixtral": Architecture(_mixtral, _tokens),
    "t5": Architecture(_t5, _tokens),
    "bert": Architecture(_bert, _tokens),
    "mamba": Architecture(_mamba, _tokens),
    "vit": Architecture(_vit, _pixels),
    "whisper": Architecture(_whisper, _speech),
}
