"""What a parser finds in an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call, the index-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """More of the arguments of a call that has begun: all of them together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallBroken:
    """A call that has begun is none after all; its text follows as content."""

    index: int


Event = Content | CallBegin | ArgumentsPiece | CallBroken
