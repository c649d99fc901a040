"""Where requests go: an engine in this process, or a server by gRPC or HTTP."""
