"""A digest of a model's modules: swapped or patched modules compute other KV from equal weights."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch.nn.modules import module as torch_module

SILENT = frozenset({"name_or_path", "training", "gradient_checkpointing"})
"""Settings of modules that do not change their results."""
PLAIN = (bool, int, float, str, torch.dtype)
LOOKS_ONLY = "transformers.utils.output_capturing"
"""The module whose hooks change nothing: transformers leaves them behind once hidden states were requested."""


def modules_digest(model: Any) -> str:
    """Returns a digest of each module's class, its plain settings, and the functions that were set on it."""
    digest = blake2b(digest_size=16)
    for name, module in model.named_modules():
        told = [name, _named(type(module))]
        for setting in _settings(module):
            told += setting
        digest.update(("\0".join(told) + "\0").encode(errors="surrogatepass"))
    return digest.hexdigest()


def has_hooks(model: Any) -> bool:
    """True if forward hooks see, and may change, the inputs and outputs of modules."""
    kinds = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    for module in model.modules():
        kinds += [module._forward_hooks, module._forward_pre_hooks]
    return any(getattr(hook, "__module__", "") != LOOKS_ONLY for hooks in kinds for hook in hooks.values())


def _settings(module: Any) -> Iterator[tuple[str, str]]:
    every = vars(module)
    for key in sorted(key for key in every if key[:1] != "_" and key not in SILENT):  # few of many: fast to sort
        value = every[key]
        if value is None or isinstance(value, PLAIN):
            yield key, repr(value)
        elif callable(value):
            yield key, _named(value)


def _named(code: Any) -> str:
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"
