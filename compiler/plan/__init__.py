"""The plan: launches per token bucket with every pointer bound to a place in memory."""
