"""ingot targets: what engines can be built for."""

import argparse

from ingot.runtime.cli.output import print_json, table

from ..targets import list_targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    targets = list_targets()
    if arguments.json:
        print_json([target.to_json() for target in targets])
    else:
        rows = [(target.name, ", ".join(target.precisions), target.note) for target in targets]
        print(table(rows, ("target", "precisions", "")))
    return 0
