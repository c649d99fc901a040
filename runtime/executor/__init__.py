"""Runs requests on a device: one thread that schedules, launches and hands out what comes (docs/serving.md)."""
