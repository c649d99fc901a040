"""Targets: what an engine can be built for. A target is data; nothing here touches a device but `host()`."""
from .gpu import Architecture, BadTarget, Gpu, architectures
from .target import Target, UnknownTarget, find_target, list_targets, read_targets

__all__ = ["Architecture", "BadTarget", "Gpu", "Target", "UnknownTarget", "architectures", "find_target",
           "list_targets", "read_targets"]
