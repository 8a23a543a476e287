"""Tokenizers of the transformers package, which is imported only where a batch has text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from kvstore.errors import InvalidRequest

Message = dict[str, Any]


class Tokenizer(Protocol):
    """Makes token ids of text, as the engine that runs the batch does."""

    def text(self, text: str) -> Sequence[int]:
        """Returns the tokens of a prompt."""
        ...

    def chat(self, messages: Sequence[Message]) -> Sequence[int]:
        """Returns the tokens of a conversation, by the model's chat template, up to where the answer begins."""
        ...


class _OfTransformers:
    """Implements ``Tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str) -> Sequence[int]:
        found: Sequence[int] = self._tokenizer.encode(text)
        return found

    def chat(self, messages: Sequence[Message]) -> Sequence[int]:
        # The template gives text: versions of transformers differ in how they return tokens.
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        found: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found


def load_tokenizer(name: str) -> Tokenizer:
    """Loads a tokenizer by its model's name or folder. Raises InvalidRequest if it, or transformers, is missing."""
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as cause:
        raise InvalidRequest(
            "a tokenizer needs the transformers package: pip install transformers, or give token ids as prompts"
        ) from cause
    try:
        return _OfTransformers(transformers.AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError, KeyError, ImportError) as cause:
        raise InvalidRequest(
            f"cannot load the tokenizer {name!r}: {str(cause).splitlines()[0] if str(cause) else type(cause).__name__}"
        ) from cause
