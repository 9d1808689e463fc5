"""Model sources (GGUF file, folder, random), against transformers' own loaders."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from zinf_core.config import from_mapping
from zinf_core.errors import ConfigError
from zinf_torch.train.config import TrainConfig
from zinf_torch.train.folder_source import FolderSource
from zinf_torch.train.gguf_source import GgufSource
from zinf_torch.train.loader import Blueprint, check_vocabulary, draw_blueprint, load_weights
from zinf_torch.train.random_source import RandomSource
from zinf_torch.train.source import ModelSource, open_source
from zinf_torch.train.tokenizer import ByteTokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROPE_FACTORS = np.ones(8, dtype=np.float32)


def run_config(**data: object) -> TrainConfig:
    return from_mapping(
        TrainConfig,
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"paths": ["x"], "sequence_length": 16, **data},
            "train": {"steps": 1},
            "budget": {"device": "1GiB", "host": 0, "nvme": "x"},
        },
    )


def write_gguf(path: Path, architecture: str, *, tied: bool, extra: bool = False) -> None:
    """Write random tensors in several number formats, the way llama.cpp names and shapes them."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    q8, q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
    half = gguf.GGMLQuantizationType.F16

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType | None) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (96, 64), q8)
    add("output_norm.weight", (64,), None)
    if not tied:
        add("output.weight", (96, 64), half)
    if extra:
        add("mystery.weight", (64,), None)
    writer.add_tensor("rope_freqs.weight", ROPE_FACTORS)
    for block in range(2):
        for name, shape, kind in (
            ("attn_norm.weight", (64,), None),
            ("ffn_norm.weight", (64,), None),
            ("attn_q.weight", (64, 64), q4),
            ("attn_k.weight", (32, 64), q8),
            ("attn_v.weight", (32, 64), q4),
            ("attn_output.weight", (64, 64), half),
            ("ffn_gate.weight", (96, 64), q4),
            ("ffn_up.weight", (96, 64), None),
            ("ffn_down.weight", (64, 96), q4),
        ):
            add(f"blk.{block}.{name}", shape, kind)
        if architecture == "qwen2":
            for name, size in (("attn_q.bias", 64), ("attn_k.bias", 32), ("attn_v.bias", 32)):
                add(f"blk.{block}.{name}", (size,), None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(source: ModelSource, blueprint: Blueprint, dtype: torch.dtype) -> torch.nn.Module:
    """Return a plain model with the weights that `source` stores."""
    assert blueprint.weights is not None
    model: torch.nn.Module = AutoModelForCausalLM.from_config(blueprint.config, dtype=dtype)
    load_weights(model, blueprint.weights)
    return model


def assert_equals_transformers(path: Path, model: torch.nn.Module) -> None:
    """Compare every parameter with what transformers' own reader makes of the file."""
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    parameters = dict(model.named_parameters())
    assert set(parameters) <= set(expected)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_equals_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    """Catches a wrong name, row order of queries and keys, shape or quantisation, in any tensor."""
    path = tmp_path / "tiny model.gguf"
    write_gguf(path, architecture, tied=tied)
    source = GgufSource(path)
    blueprint = draw_blueprint(source, run_config())
    model = load(source, blueprint, torch.float32)
    assert_equals_transformers(path, model)
    assert blueprint.numel == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_gguf_chunks_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows lost or doubled where a tensor is dequantised in several pieces."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", tied=True)
    source = GgufSource(path)
    weights = draw_blueprint(source, run_config()).weights
    assert weights is not None
    whole = weights.read("blk.0.attn_q.weight", torch.bfloat16)
    for nbytes in (1, 4 * 64 * 5):
        monkeypatch.setattr("zinf_torch.train.gguf_source._CHUNK_NBYTES", nbytes)
        assert torch.equal(weights.read("blk.0.attn_q.weight", torch.bfloat16), whole)


@pytest.mark.slow
def test_gguf_refusals(tmp_path: Path) -> None:
    """Catches a file that trains with random or misplaced weights instead of being refused."""
    with pytest.raises(ConfigError, match="no such file"):
        GgufSource(tmp_path / "absent.gguf")
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model" * 100)
    with pytest.raises(ConfigError, match="configuration cannot be read"):
        draw_blueprint(GgufSource(junk), run_config())
    path = tmp_path / "extra.gguf"
    write_gguf(path, "llama", tied=True, extra=True)
    with pytest.raises(ConfigError, match=r"no place for mystery\.weight"):
        draw_blueprint(GgufSource(path), run_config())
    with pytest.raises(ConfigError, match="longer than the 64 positions"):
        draw_blueprint(GgufSource(path), run_config(sequence_length=65))
    path = tmp_path / "other.gguf"
    write_gguf(path, "stablelm", tied=True)
    with pytest.raises(ConfigError, match="'stablelm' is not among llama, qwen2, qwen3"):
        GgufSource(path).open_weights([])
    path = tmp_path / "cut.gguf"
    write_gguf(path, "llama", tied=True)
    weights = draw_blueprint(GgufSource(path), run_config()).weights
    assert weights is not None
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"ends within blk\.1\.ffn_down\.weight"):
        weights.read("blk.1.ffn_down.weight", torch.float32)


MODELS = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", ["100KB", "1GB"])
def test_folder_equals_transformers(name: str, shards: str, tmp_path: Path) -> None:
    """Catches a tensor read from the wrong shard, or left at its random value."""
    torch.manual_seed(1)
    saved = AutoModelForCausalLM.from_config(MODELS[name])
    saved.save_pretrained(tmp_path, max_shard_size=shards)
    source = FolderSource(tmp_path)
    torch.manual_seed(2)
    model = load(source, draw_blueprint(source, run_config()), torch.float32)
    expected = dict(saved.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[parameter_name]), parameter_name


@pytest.mark.slow
def test_folder_of_a_bare_base_model(tmp_path: Path) -> None:
    """Catches checkpoints such as GPT-2's own, whose names lack the base model's."""
    saved = AutoModelForCausalLM.from_config(MODELS["gpt2"])
    saved.base_model.save_pretrained(tmp_path)
    source = FolderSource(tmp_path)
    model = load(source, draw_blueprint(source, run_config()), torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(saved.named_parameters())[name]), name


@pytest.mark.slow
def test_folder_refusals(tmp_path: Path) -> None:
    """Catches a checkpoint with holes, foreign tensors or wrong shapes."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        FolderSource(tmp_path)
    saved = AutoModelForCausalLM.from_config(MODELS["llama"])
    saved.config.save_pretrained(tmp_path)
    source = FolderSource(tmp_path)
    with pytest.raises(ConfigError, match=r"no model\.safetensors there"):
        draw_blueprint(source, run_config())
    with pytest.raises(ConfigError, match="tokenizer cannot be read"):
        source.open_tokenizer()
    saved.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    norm = "model.norm.weight"
    for change, told in (
        ({norm: None}, r"lacks model\.norm\.weight"),
        ({"a.b": torch.ones(1)}, r"no place for a\.b"),
        ({norm: torch.ones(3)}, r"model\.norm\.weight has shape \(3,\), the model needs \(64,\)"),
    ):
        changed = {key: value for key, value in {**whole, **change}.items() if value is not None}
        save_file(changed, file)
        with pytest.raises(ConfigError, match=told):
            draw_blueprint(source, run_config())
    file.write_bytes(b"junk")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        draw_blueprint(source, run_config())


@pytest.mark.slow
def test_random_source() -> None:
    """Catches settings that transformers would swallow, and a vocabulary too small for bytes."""
    source = RandomSource({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1})
    blueprint = draw_blueprint(source, run_config())
    assert blueprint.weights is None
    assert blueprint.config.vocab_size == 256
    check_vocabulary(blueprint, source.open_tokenizer())
    with pytest.raises(ConfigError, match="'no-such' is unknown to transformers"):
        RandomSource({"model_type": "no-such"}).read_config()
    with pytest.raises(ConfigError, match=r"model\.config\.hidden is no setting of LlamaConfig"):
        RandomSource({"model_type": "llama", "hidden": 64}).read_config()
    small = RandomSource({"model_type": "gpt2", "vocab_size": 100, "n_layer": 1})
    with pytest.raises(ConfigError, match="vocab_size = 100 is smaller than the tokenizer's 256"):
        check_vocabulary(draw_blueprint(small, run_config()), ByteTokenizer())
    with pytest.raises(ConfigError, match="causal language model cannot be read"):
        draw_blueprint(RandomSource({"model_type": "vit"}), run_config())


def test_one_source_and_no_more() -> None:
    """Catches a second source that is silently ignored."""
    model = {"gguf": "a.gguf", "path": "b"}
    with pytest.raises(ConfigError, match="exactly one of path, gguf and config, found path and"):
        from_mapping(
            TrainConfig,
            {
                "model": model,
                "data": {"paths": ["x"]},
                "train": {"steps": 1},
                "budget": {"device": 0, "host": 0},
            },
        )
    assert isinstance(open_source(run_config().model), RandomSource)
