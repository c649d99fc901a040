"""What a request asks of its answer: how each token is chosen, and when the answer ends."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import RequestError

MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_LENGTH = 1 << 15  # of all bad words, in characters
MAX_STOPS = 1024
MAX_CHOICES = 1999  # as many as llguidance follows side by side
MAX_TEXT_LENGTH = 1000  # of a stop string or a bad word, in characters
GUIDE_KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")

# Below it only the best token has a chance that float32 can tell from 0.
_LEAST_TEMPERATURE = 1e-6


class SamplingError(RequestError):
    """A sampling parameter is out of its range. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Guide:
    """What the text of an answer must look like. Raises SamplingError that names the field `guide`.

    kind  json_schema, regex, grammar (Lark or EBNF): `text` is it; choice: `choices` are the texts allowed;
          json_object: any JSON object
    """

    kind: str
    text: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require("guide", self.kind, self.kind in GUIDE_KINDS, f"a kind of {', '.join(GUIDE_KINDS)}")
        object.__setattr__(self, "choices", _tuple("guide", self.choices, "texts to choose from"))
        if self.kind == "choice":
            _require("guide", self.choices, bool(self.choices) and all(map(_is_text, self.choices)),
                     "one or more texts to choose from, none of them empty")
            if len(self.choices) > MAX_CHOICES:
                raise SamplingError("guide", f"guide has {len(self.choices)} choices; expected at most {MAX_CHOICES}")
        elif self.kind != "json_object":
            _require("guide", self.text, _is_text(self.text), f"the text of a {self.kind}")


@dataclass(frozen=True)
class SamplingParams:
    """Checked when made: raises SamplingError. Sequences may be given as lists; they become tuples.

    The logits of a step go through, in this order: logit_bias and banned tokens, penalties, temperature, top_k, top_p,
    min_p. Log probabilities are the model's own, before any of it.

    max_tokens            length of the answer; it ends earlier when the engine's max_seq_len is reached
    temperature           0: the most probable token, always; else logits are divided by it
    top_k                 choose among the k most probable tokens; 0: among all
    top_p                 then among the fewest tokens whose probabilities add up to top_p at least
    seed                  equal seeds give equal answers to equal prompts, whatever else runs; None: a new one each time
    stop_token_ids        tokens that end the answer, beside those that the model ends with
    ignore_eos            do not end where the model ends
    min_p                 then among tokens at least min_p times as probable as the most probable one
    repetition_penalty    above 1: tokens of the prompt and of the answer become less probable, whatever their number
    presence_penalty      taken from the logit of each token that the answer holds (OpenAI's meaning)
    frequency_penalty     taken from it as often as the answer holds the token
    prompt_ignore_length  presence and frequency count the prompt too, but for so many of its first tokens
                          (TensorRT-LLM's meaning); None: they count the answer alone
    stop                  texts that end the answer where they begin
    include_stop          they, or the token that ended the answer, stay part of its text
    min_tokens            before so many tokens, none that ends the answer is chosen
    bad_words             texts that the answer must not hold, as tokens spell them
    bad_token_ids         sequences of tokens that it must not hold
    logit_bias            token id -> added to its logit; -inf bans the token
    n                     answers to the prompt, each with random numbers of its own
    logprobs              log probabilities of each token chosen and of so many of the most probable; None: none
    prompt_logprobs       the same for each token of the prompt
    skip_special_tokens   leave tokens such as the end of a turn out of the text
    guide                 the form that the text must have
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    guide: Guide | None = None

    def __post_init__(self) -> None:
        self._int("max_tokens", 1)
        self._number("temperature", 0, 1000)
        self._int("top_k", 0)
        self._number("top_p", 0, 1, above=True)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 1e-3, 1e3)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        self._int("seed", 0, (1 << 64) - 1, optional=True)
        self._int("prompt_ignore_length", 0, optional=True)
        self._int("min_tokens", 0, self.max_tokens)
        self._int("n", 1, MAX_ANSWERS)
        self._int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            _require(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        self._sequence("stop_token_ids", MAX_STOPS, _is_token, "token ids")
        self._texts("stop", MAX_STOPS)
        self._texts("bad_words", MAX_BAD_WORDS)
        if (length := sum(map(len, self.bad_words))) > MAX_BAD_LENGTH:  # they are all encoded, while others wait
            raise SamplingError("bad_words", f"bad_words has {length} characters together; expected at most "
                                             f"{MAX_BAD_LENGTH}")
        sequences = _tuple("bad_token_ids", self.bad_token_ids, "sequences of token ids")
        object.__setattr__(self, "bad_token_ids", tuple(
            _tuple("bad_token_ids", tokens, "sequences of token ids") for tokens in sequences))
        self._sequence("bad_token_ids", MAX_BAD_WORDS, lambda tokens: tokens and all(map(_is_token, tokens)),
                       "sequences of token ids that are not empty")
        self._check_logit_bias()
        _require("guide", self.guide, self.guide is None or isinstance(self.guide, Guide), "a Guide")

    def _int(self, name: str, least: int, most: float = math.inf, optional: bool = False) -> None:
        value = getattr(self, name)
        expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
        is_right = (optional and value is None) or (_is_int(value) and least <= value <= most)
        _require(name, value, is_right, f"an integer, {expected}")

    def _number(self, name: str, least: float, most: float, above: bool = False) -> None:
        value = getattr(self, name)
        is_right = _is_number(value) and least <= value <= most and not (above and value == least)
        _require(name, value, is_right, f"above {least} and at most {most}" if above else f"{least} to {most}")

    def _sequence(self, name: str, most: int, is_right: Any, expected: str) -> None:
        values = _tuple(name, getattr(self, name), expected)
        if len(values) > most:
            raise SamplingError(name, f"{name} has {len(values)} entries; expected at most {most}")
        for value in values:
            _require(name, value, is_right(value), expected)
        object.__setattr__(self, name, values)

    def _texts(self, name: str, most: int) -> None:
        self._sequence(name, most, _is_text, "texts that are not empty")
        if (length := max(map(len, getattr(self, name)), default=0)) > MAX_TEXT_LENGTH:
            raise SamplingError(name, f"{name} holds a text of {length} characters; expected at most "
                                      f"{MAX_TEXT_LENGTH}")

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        _require("logit_bias", bias, isinstance(bias, Mapping), "a mapping of token ids to numbers")
        if len(bias) > MAX_LOGIT_BIASES:
            raise SamplingError("logit_bias",
                                f"logit_bias has {len(bias)} entries; expected at most {MAX_LOGIT_BIASES}")
        for token, value in bias.items():
            _require("logit_bias", token, _is_token(token), "token ids")
            _require("logit_bias", value, _is_number(value) or value == -math.inf, "finite numbers, or -inf")
        object.__setattr__(self, "logit_bias", dict(bias))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises SamplingError if a token id is outside the vocabulary."""
        named = {"stop_token_ids": self.stop_token_ids, "logit_bias": self.logit_bias,
                 "bad_token_ids": [token for tokens in self.bad_token_ids for token in tokens]}
        for name, tokens in named.items():
            for token in tokens:
                if token >= vocab_size:
                    raise SamplingError(name, f"{name} holds token {token}; expected ids of 0 to {vocab_size - 1}, the "
                                              "vocabulary of this engine")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE

    def seeded(self) -> SamplingParams:
        """Itself, with a seed of its own if it has none and needs one."""
        if self.seed is not None or self.is_greedy:
            return self
        return dataclasses.replace(self, seed=int.from_bytes(os.urandom(8), "little"))


def _require(name: str, value: object, is_right: object, expected: str) -> None:
    if not is_right:
        try:
            shown = repr(value)
        except ValueError:  # Python writes no integers of thousands of digits
            shown = "a number of thousands of digits"
        raise SamplingError(name, f"{name} is {shown if len(shown) <= 80 else shown[:77] + '...'}; expected {expected}")


def _tuple(name: str, values: Any, expected: str) -> tuple[Any, ...]:
    """A text is a sequence of texts too, but never meant as one here."""
    is_right = hasattr(values, "__iter__") and not isinstance(values, (str, bytes, Mapping))
    _require(name, values, is_right, f"a sequence of {expected}")
    return tuple(values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
