"""Targets: what an engine can be built for. A target is data; nothing here touches a device but `host()`."""
from .target import Target, UnknownTarget, find_target, list_targets

__all__ = ["Target", "UnknownTarget", "find_target", "list_targets"]
