"""How answers are chosen: the options of `ingot generate` and `ingot chat`."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sampling import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """max_tokens: unless the user says something else."""
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N",
                        help=f"length of the answer (default {max_tokens})")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="choose among the N most probable tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="choose among tokens that make up X")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="X",
                        help="choose among tokens at least X times as probable as the most probable one")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X",
                        help="above 1: what has been said becomes less probable")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a sampled answer repeatable")
    parser.add_argument("--stop-token-id", type=int, action="append", default=[], metavar="N",
                        help="a token that ends the answer; may be repeated")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT",
                        help="a text that ends the answer; may be repeated")


def sampling_params(arguments: argparse.Namespace, ignore_eos: bool = False) -> "SamplingParams":
    """Raises SamplingError."""
    from ..sampling import SamplingParams

    return SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, top_k=arguments.top_k,
        top_p=arguments.top_p, min_p=arguments.min_p, repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed, stop_token_ids=tuple(arguments.stop_token_id), stop=tuple(arguments.stop),
        ignore_eos=ignore_eos,
    )
