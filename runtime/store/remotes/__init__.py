"""Places that engines are pushed to and pulled from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .remote import Remote


@contextlib.contextmanager
def open_remote(url: str) -> Iterator[Remote]:
    """oci://REGISTRY/REPOSITORY, a folder, or a URL that fsspec knows.

    Raises RequestError for what is none of them.
    """
    if url.startswith(("oci://", "oci+http://", "oci+https://")):
        from .oci import OciRemote

        with contextlib.closing(OciRemote(url)) as remote:
            yield remote
        return
    from .folder import FolderRemote, files_of

    yield FolderRemote(url, files_of(url))
