"""The engine store: engines as blobs by SHA-256, the names that a lock file gives them, and ways to other stores."""
