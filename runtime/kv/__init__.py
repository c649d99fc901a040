"""The KV cache's bookkeeping: which blocks hold whose tokens. No tensors; the memory itself is the device's."""

from .cache import KvCache
from .sequence import DEFAULT_PRIORITY, CacheKey, KvSequence, Probe, RetentionRange

__all__ = ["DEFAULT_PRIORITY", "CacheKey", "KvCache", "KvSequence", "Probe", "RetentionRange"]
