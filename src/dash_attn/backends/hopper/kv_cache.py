"""Attention to a cache of keys and values on Hopper GPUs."""

from .calls.decode import attention_with_cache, prepared
from .calls.explain import explain_cache

__all__ = ["attention_with_cache", "explain_cache", "prepared"]
