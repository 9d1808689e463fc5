"""Random source: a model of any Hugging Face configuration, with drawn weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import CONFIG_MAPPING, PretrainedConfig

from zinf_core.errors import ConfigError
from zinf_torch.train.source import Weights, refuse_unreadable
from zinf_torch.train.tokenizer import ByteTokenizer, Tokenizer


class RandomSource:
    """`settings` of a configuration class; the vocabulary is bytes unless they say otherwise."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Hold the settings, ``model_type`` among them."""
        self._model_type = str(settings["model_type"])
        self._settings = {key: value for key, value in settings.items() if key != "model_type"}

    @property
    def name(self) -> str:
        """Name for people."""
        return f"random {self._model_type}"

    def read_config(self) -> PretrainedConfig:
        """Return the configuration.

        Raises ConfigError if the model type or a setting is unknown to transformers.
        """
        if self._model_type not in CONFIG_MAPPING:
            raise ConfigError(
                f"model.config.model_type = {self._model_type!r} is unknown to transformers"
            )
        config_class = CONFIG_MAPPING[self._model_type]
        default = config_class()
        unknown = sorted(key for key in self._settings if not hasattr(default, key))
        if unknown:
            raise ConfigError(f"model.config.{unknown[0]} is no setting of {config_class.__name__}")
        settings = {"vocab_size": ByteTokenizer.num_tokens, **self._settings}
        try:
            return config_class(**settings)
        except Exception as exc:
            raise refuse_unreadable("model.config", exc) from exc

    def open_tokenizer(self) -> Tokenizer:
        """Return the byte tokenizer."""
        return ByteTokenizer()

    def open_weights(self, names: Sequence[str]) -> Weights | None:
        """Return None: weights are drawn."""
        del names
        return None
