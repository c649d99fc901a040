"""ingot targets: what engines can be built for."""

import argparse
from pathlib import Path

from ingot.runtime.cli.output import print_json, table

from ..targets import Target, list_targets, read_targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("own", nargs="?", type=Path, metavar="FILE|FOLDER",
                        help="list the targets of your own YAML file or folder instead")


def run(arguments: argparse.Namespace) -> int:
    targets = list_targets() if arguments.own is None else list(read_targets(arguments.own).values())
    if arguments.json:
        print_json([target.to_json() for target in targets])
        return 0
    cpus = [(target.name, ", ".join(target.precisions), target.note) for target in targets if target.gpu is None]
    parts = [table(cpus, ("target", "precisions", ""))] if cpus else []
    if gpus := [target for target in targets if target.gpu is not None]:
        header = ("target", "arch", "SMs", "memory", "bandwidth", "TFLOP/s bf16", "8 bits", "4 bits", "precisions", "")
        parts.append(table([_gpu_row(target) for target in gpus], header))
    print("\n\n".join(parts))
    return 0


def _gpu_row(target: Target) -> tuple[str, ...]:
    gpu = target.gpu
    assert gpu is not None
    rate = gpu.tflops
    return (target.name, target.isa, str(gpu.num_sms), f"{gpu.memory_gib:g} GiB", f"{gpu.bandwidth_gb_s:g} GB/s",
            f"{rate['bf16']:g}", f"{rate.get('fp8', rate.get('int8', 0)):g}",
            f"{rate['nvfp4']:g}" if "nvfp4" in rate else "", ", ".join(target.precisions), target.note)
