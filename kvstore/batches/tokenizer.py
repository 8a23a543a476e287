"""Tokenizers of the transformers package, which is imported only where a batch has text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from kvstore.errors import InvalidRequest

Message = dict[str, Any]
SAID_CHARS_MAX = 200
"""Characters of a tokenizer's error that are shown."""


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
        with _translated("the tokenizer refuses the prompt"):
            found: Sequence[int] = self._tokenizer.encode(text)
            return found

    def chat(self, messages: Sequence[Message]) -> Sequence[int]:
        # The template gives text: versions of transformers differ in how they return tokens.
        with _translated("the tokenizer refuses the messages"):
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            found: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return found


def load_tokenizer(name: str) -> Tokenizer:
    """Loads a tokenizer by its model's name or folder. Raises InvalidRequest if it, or transformers, is missing."""
    with _translated(f"cannot load the tokenizer {name!r}"):
        try:
            transformers = import_module("transformers")
        except ModuleNotFoundError as cause:
            raise InvalidRequest(
                "a tokenizer needs the transformers package: pip install transformers, or give token ids as prompts"
            ) from cause
        return _OfTransformers(transformers.AutoTokenizer.from_pretrained(name))


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raises InvalidRequest for any error of a tokenizer: its models bring code, and chat templates, of their own."""
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as cause:
        # A panic in Rust is a BaseException of a class that cannot be imported. Ctrl-C is one too, and goes on.
        if not isinstance(cause, Exception) and type(cause).__name__ != "PanicException":
            raise
        lines = str(cause).strip().splitlines()
        said = lines[0][:SAID_CHARS_MAX] if lines else type(cause).__name__
        raise InvalidRequest(f"{what}: {said}") from cause
