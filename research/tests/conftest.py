"""The fixtures of ``tests`` for these tests, too."""

from conftest import models, tiny_model_dir, tiny_policy, tiny_tokenizer

__all__ = ["models", "tiny_model_dir", "tiny_policy", "tiny_tokenizer"]
