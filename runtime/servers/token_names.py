"""How single tokens are written, for logprobs."""

from functools import lru_cache

from ..tokenizer import Tokenizer


class TokenNames:
    """Texts and bytes of tokens as they stand within an answer; those asked for last are kept."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.bytes = lru_cache(1 << 16)(self._bytes)

    def text(self, token_id: int) -> str:
        """With U+FFFD for bytes that are no whole character; "token_id:N" if the engine has no tokenizer."""
        return self.bytes(token_id).decode("utf-8", "replace")

    def whole(self, token_id: int) -> str:
        r"""As `text`, but bytes that are no whole character are told as OpenAI's completions do, bytes:\xf0\x9f:
        tokens of different bytes have different names."""
        data = self.bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token_id: int) -> bytes:
        """What the token stands for: not always whole characters."""
        return f"token_id:{token_id}".encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
