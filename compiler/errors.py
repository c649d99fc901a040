"""What the compiler refuses after import, in the user's words."""
from __future__ import annotations

from ingot.runtime.errors import RequestError


class CannotCompile(RequestError):
    """An operation that the target has no kernel for: names operator and types, module path and source line."""
