"""Answers of a given form: JSON schemas, regular expressions, grammars and choices, by llguidance.

    guides = Guides(tokenizer, vocab_size, end_token_ids)
    matcher = guides.start(Guide("regex", r"[a-z]+@[a-z]+\\.com"))
    write_masks([(matcher, row)], masks)      # the tokens that may come next
    matcher.advance(token)

The tokens that end an answer are allowed once its text is complete, and are then the only ones that can be.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import WorkFailed
from .sampling import Guide, SamplingError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from .tokenizer import Tokenizer

_NUM_KEPT = 16
_SILENT = 0
# What llguidance says of a guide that has become too complex, as opposed to a token that is not allowed.
_BEYOND_LIMITS = "max is"


class Matcher:
    """How far the text of one answer has come. Copies of a compiled guide share what compiling it took.

    is_done: the text is complete, and nothing but its end can follow
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_tokens = 0

    def advance(self, token: int) -> None:
        """A token of the answer. Raises SamplingError if the guide has become too complex, WorkFailed if it does not
        allow the token, though its mask did."""
        if not self.matcher.consume_token(token):
            problem = _first_line(self.matcher.get_error())  # the guide itself stands in the others
            message = f"the guide cannot follow the answer beyond {self.num_tokens} tokens: {problem}"
            raise SamplingError("guide", message) if _BEYOND_LIMITS in problem else WorkFailed(message)
        self.num_tokens += 1

    def allows_but(self, banned: Collection[int]) -> bool:
        """Whether a token may come next that is not banned."""
        allowed = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed[list(banned)] = 0
        return bool(allowed.any()) and not self.matcher.is_error()

    def allowed(self, draft: Sequence[int]) -> int:
        """How many first tokens of a draft may follow; nothing changes."""
        return int(self.matcher.validate_tokens(list(draft)))

    def ahead(self, tokens: Sequence[int]) -> Matcher:
        """Where it would be behind `tokens`, of which all are allowed; a copy."""
        matcher = Matcher(self.matcher.deep_copy())
        matcher.matcher.consume_tokens(list(tokens))
        matcher.num_tokens = self.num_tokens + len(tokens)
        return matcher

    @property
    def is_done(self) -> bool:
        return bool(self.matcher.is_stopped())


class Guides:
    """Compiles guides for one tokenizer; keeps the last few, since the requests of an application share theirs."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int]) -> None:
        """vocab_size: of the logits. Nothing is loaded before the first guide comes."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._kept = lru_cache(_NUM_KEPT)(self._compile)

    def prepare(self, guide: Guide) -> None:
        """Compiles a guide. Raises SamplingError that names the field `guide`, WorkFailed. From any thread.

        Takes milliseconds when the guide is new, and the first time a second: the vocabulary becomes a tree.
        """
        self._kept(guide)

    def start(self, guide: Guide) -> Matcher:
        """At the beginning of an answer; at once, if the guide is prepared. Raises as `prepare`."""
        return Matcher(self._kept(guide).deep_copy())

    def _compile(self, guide: Guide) -> LLMatcher:
        library = _library()
        grammar = _grammar(library, guide)
        error = library.LLMatcher.validate_grammar(grammar, self._vocabulary)
        if error and not error.startswith("WARNING"):
            raise SamplingError("guide", f"guide is no {guide.kind} that can be followed: {_first_line(error)}")
        return library.LLMatcher(self._vocabulary, grammar, log_level=_SILENT)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        if not self._end_token_ids:
            raise SamplingError("guide", "guide: this engine's model has no token that ends an answer, so that no form "
                                         "could ever be complete")
        return _library().LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size,
                                      eos_token=self._end_token_ids)


def write_masks(entries: Sequence[tuple[Matcher, int]], masks: np.ndarray) -> None:
    """Sets in row i of masks u32 [rows, words] the bits of the tokens that may come next, for each (matcher, i).

    Many are computed side by side. None is allowed where a guide has become too complex: no token can be chosen then.
    """
    row_bytes = masks.shape[1] * masks.itemsize
    if len(entries) == 1:
        (matcher, row), = entries
        matcher.matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, row_bytes)
    else:
        pairs = [(matcher.matcher, row) for matcher, row in entries]
        _executor().unsafe_compute_mask_ptr(pairs, masks.ctypes.data, row_bytes, len(masks))
    for matcher, row in entries:
        if matcher.matcher.is_error():
            masks[row] = 0


def _grammar(library: Any, guide: Guide) -> str:
    """In the language of llguidance."""
    if guide.kind in ("json_schema", "json_object"):
        schema = guide.text if guide.kind == "json_schema" else '{"type": "object"}'
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise SamplingError("guide", f"guide is a JSON schema, but no JSON: {_first_line(str(error))}") from None
        if not isinstance(parsed, (dict, bool)):
            raise SamplingError("guide", f"guide is a JSON schema of type {type(parsed).__name__}; expected an object")
        return str(library.LLMatcher.grammar_from_json_schema(json.dumps(parsed)))
    text = json.dumps(guide.choices) if guide.kind == "choice" else guide.text
    try:
        return str(library.grammar_from(guide.kind, text))
    except ValueError as error:
        raise SamplingError("guide", f"guide is no {guide.kind}: {_first_line(str(error))}") from None


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:200]


def _library() -> Any:
    """Loaded for the first guide: it takes a moment, and an engine serves without it."""
    try:
        import llguidance
    except ImportError:
        raise WorkFailed("guides (JSON schemas, regular expressions, grammars, choices) need the package llguidance, "
                         "which is not installed.\n  pip install 'ingot-llm[serve]'") from None
    return llguidance


@lru_cache(1)
def _executor() -> LLExecutor:
    return _library().LLExecutor()
