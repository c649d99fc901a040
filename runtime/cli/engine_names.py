"""Giving a name of the store to an engine."""

from __future__ import annotations

import argparse

from ..store.lock_file import move_of
from ..store.store import Store


def name_engine(store: Store, name: str, hash: str, action: str, why: str) -> None:
    """By a move of this action; `add` of what the name means already is none. Raises LockError, NotInStore."""
    now = store.lock.now().get(name)
    if action != "add" or now is None or now.hash != hash:
        with store.blobs.adding():  # so that gc does not remove it between the look and the move
            store.lock.move(name, move_of(store.manifest(hash), hash, action, why))


def add_why(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--why", default="", metavar="MESSAGE", help="for the log")
