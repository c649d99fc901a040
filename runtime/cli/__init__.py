"""The command line: one verb, one module, imported when it is used.

A verb's module has `add_arguments(parser)` and `run(arguments) -> exit status`. Exit status: 0 done, 1 the work failed,
2 the request was wrong, 130 interrupted.
"""

import argparse
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import IngotError, RequestError, WorkFailed
from .absent import compiler_absent


class Verb(NamedTuple):
    module: str
    summary: str

    @property
    def needs_compiler(self) -> bool:
        return self.module.startswith("ingot.compiler.")


VERBS = {
    "build": Verb("ingot.compiler.cli.build", "compile a checkpoint into an engine"),
    "generate": Verb("ingot.runtime.cli.generate", "answer one prompt, token by token"),
    "chat": Verb("ingot.runtime.cli.chat", "a conversation, in the terminal"),
    "serve": Verb("ingot.runtime.cli.serve", "gRPC and HTTP servers over an engine"),
    "inspect": Verb("ingot.runtime.cli.inspect", "what an engine holds and needs"),
    "bench": Verb("ingot.runtime.cli.bench", "load on an engine or a server, and how long each request took"),
    "tune": Verb("ingot.compiler.cli.tune", "the fastest kernels for this machine, or the best limits to serve with"),
    "verify": Verb("ingot.runtime.cli.verify", "check every byte of an engine"),
    "compare": Verb("ingot.compiler.cli.compare", "an engine against its checkpoint, layer by layer"),
    "diff": Verb("ingot.runtime.cli.diff", "what differs between two engines, and why"),
    "refit": Verb("ingot.compiler.cli.refit", "new weights in an engine, without compiling"),
    "cache": Verb("ingot.compiler.cli.cache", "what builds have kept for later builds"),
    "engines": Verb("ingot.runtime.cli.engines", "the engine store: names, their history, push and pull"),
    "targets": Verb("ingot.compiler.cli.targets", "what engines can be built for"),
    "doctor": Verb("ingot.runtime.cli.doctor", "what this machine can build and run"),
}
# Options that every verb has; they may also stand before the verb.
COMMON_FLAGS = {"--json": "print JSON for machines", "--debug": "show where in Ingot an error arose"}
INTERRUPTED = 130
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; the process's exit status. For the console script."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv or bool(os.environ.get("INGOT_DEBUG"))
    try:
        return _dispatch(argv)
    except IngotError as error:
        if debug:
            traceback.print_exc()
        print(f"ingot: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        # Whoever read the output has enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if debug or not _is_of_the_machine(error):
            raise
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        print(f"ingot: {where}{error.strerror}\n  --debug shows where this arose", file=sys.stderr)
        return WorkFailed.exit_status
    except KeyboardInterrupt:
        print("\ningot: interrupted", file=sys.stderr)
        return INTERRUPTED


def _is_of_the_machine(error: OSError) -> bool:
    """A file that cannot be had, a disk that takes no more: told without a traceback, as any command may meet it."""
    return error.strerror is not None and (error.filename is not None or error.errno in _DISK)


def _dispatch(argv: list[str]) -> int:
    flags: list[str] = []
    while argv and argv[0] in COMMON_FLAGS:
        flags, argv = [*flags, argv[0]], argv[1:]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"ingot {_version()}")
        return 0
    name, *rest = argv
    if name not in VERBS:
        from difflib import get_close_matches

        near = get_close_matches(name, VERBS, n=1)
        raise RequestError(f"unknown command {name!r}{f', did you mean {near[0]}?' if near else ''}; "
                           f"the commands are: {', '.join(VERBS)}")
    parser = argparse.ArgumentParser(f"ingot {name}", description=VERBS[name].summary, allow_abbrev=False)
    for flag, meaning in COMMON_FLAGS.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    with _explained_absence(name):
        module = importlib.import_module(VERBS[name].module)
    module.add_arguments(parser)
    try:
        arguments = parser.parse_args([*flags, *rest])
    except SystemExit as exit:  # argparse has printed its message, or the help
        return exit.code if isinstance(exit.code, int) else 2
    with _explained_absence(name):
        status: int = module.run(arguments)
    return status


@contextmanager
def _explained_absence(verb: str) -> Iterator[None]:
    """What the compiler needs may be missing where it is imported, or where it is first used."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ingot.runtime") or not VERBS[verb].needs_compiler:
            raise
        raise RequestError(f"`ingot {verb}` needs {compiler_absent(error.name)}") from None


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ingot-llm")
    except PackageNotFoundError:
        return "(not installed)"


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        ["usage: ingot COMMAND …", "", *lines, "", "`ingot COMMAND --help` tells the options of each; all take --json."]
    )
