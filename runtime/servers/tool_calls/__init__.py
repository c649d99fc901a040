"""Calls of functions in the text of an answer: one file for each way in which models write them.

    form = choose(chat_template, None)          # by what the model was taught, or by name
    parser = form.parser(tools)
    for piece in answer:
        events = parser.feed(piece)             # what of it is text, what is a call
    events = parser.finish()
    form.calls(grammar, tools, several=True)    # the rule that binds an answer to be calls

A parser says the same whatever the pieces are that a text comes in.
"""

from .choose import NAMES, UnknownFormat, choose
from .events import ArgumentsPiece, CallBegin, CallBroken, Content, Event
from .form import Form
from .grammar import Grammar
from .parser import Parser
from .tool import Tool

__all__ = ["NAMES", "ArgumentsPiece", "CallBegin", "CallBroken", "Content", "Event", "Form", "Grammar", "Parser",
           "Tool", "UnknownFormat", "choose"]
