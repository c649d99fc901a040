"""`ingot bench`: load on an engine in this process or on a server, and a report of the life of each request."""
