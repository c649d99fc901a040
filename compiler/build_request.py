"""What a build is asked for, and what that means: target, precision of each layer, limits."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.runtime.errors import RequestError
from ingot.runtime.lora import MAX_ADAPTERS, MAX_RANK

from .model_facts import ModelFacts
from .passes.add_lora import LoraRequest
from .precision import AUTO, GPU_PRECISIONS, PRECISIONS, Precision, find_precision, with_groups, with_layers
from .quality_gate import Gate
from .targets import Target, find_target
from .tune.records import Records
from .write_weights import Rounding

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_ADAPTERS = 4
"""LoRA adapters that an engine with room for some serves at once."""

RANKS = (1, 2, 4, 8)
"""Numbers of GPUs that an engine can be divided among."""

_LARGE_GPU_GIB = 64
"""From so much memory on a GPU serves many sequences at a time, and its arena may be large."""

@dataclass(frozen=True)
class BuildRequest:
    """What the user asks for; None where the default decides.

    model            checkpoint folder, hub name, or GGUF file
    name             what the engine calls its model; default: the folder's name, or the hub name's last part
    config           for a dry run without the checkpoint: what its config.json holds
    max_batch_size   sequences in a step, and rows of logits
    max_num_tokens   tokens in a step
    max_seq_len      tokens of a sequence, prompt and answer together; default: what the model was made for
    calibrate        run the model on a text, so that weights of 4 bits are rounded for the inputs they meet
    calibration      that text, or JSONL with a "text" in each line; default: the one that ships with the compiler
    quantization_method  key of calibration.record.METHODS; what "best" chooses from is smaller errors of each layer
    strip_weights    leave the weights out of the file; the engine's hash is what it is with them
    store            engine store that gets the engine too, and, of one without weights, those alone
    self_test        run the engine and keep in it what it answers, for servers to ask again before they serve it; needs
                     a machine that can run it
    measure_quality  run the engine over a held-out text and record how far it is from the model; needs a machine that
                     can run it
    max_perplexity_increase, min_top1_agreement, max_kl_divergence  measure, and fail if the engine is worse; see Gate
    layers           pattern of names of layers -> precision of those that match; see with_layers
    group_size, group_minimums  of four-bit integers on GPUs; see with_groups. If neither is said, weights that the
                     checkpoint holds in such groups keep theirs
    tensor_parallel  GPUs that one engine is divided among
    lora_max_rank    room for LoRA adapters of up to this rank, loaded while the engine serves
    lora_max_adapters  how many of them at once; default: DEFAULT_ADAPTERS
    lora_modules     names of the linear layers that they may change, such as "q_proj"; default: all
    tuning_records   what ingot tune has written, or its content: which kernels were measured to be the fastest
    """

    model: str
    target: str
    precision: str
    output: Path | None = None
    name: str | None = None
    config: Mapping[str, Any] | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_precision: str | None = None
    dump: Path | None = None
    dry_run: bool = False
    force: bool = False
    compiler: str = "zig"
    calibrate: bool = True
    calibration: Path | None = None
    quantization_method: str = "best"
    strip_weights: bool = False
    store: Path | None = None
    self_test: bool = False
    measure_quality: bool = False
    max_perplexity_increase: float | None = None
    min_top1_agreement: float | None = None
    max_kl_divergence: float | None = None
    layers: Mapping[str, str] | None = None
    group_size: int | None = None
    group_minimums: bool | None = None
    tuning_records: Path | Mapping[str, Any] | None = None
    tensor_parallel: int = 1
    lora_max_rank: int | None = None
    lora_max_adapters: int | None = None
    lora_modules: Sequence[str] | None = None

    @property
    def gate(self) -> Gate:
        """Raises RequestError for figures that mean nothing."""
        return Gate(self.max_perplexity_increase, self.min_top1_agreement, self.max_kl_divergence)

    @property
    def rounding(self) -> Rounding:
        """Raises RequestError for a method that is not known, or that needs no text if one is given, or needs one if
        there is to be none."""
        if not self.calibrate and self.quantization_method in ("awq", "gptq"):
            raise RequestError(f"{self.quantization_method} rounds weights for the inputs that they meet: leave out "
                               "either --no-calibration or --quantization-method")
        return Rounding(self.quantization_method if self.calibrate else "rtn", self.calibration)

    @property
    def asks_groups(self) -> bool:
        return self.group_size is not None or self.group_minimums is not None

    @property
    def measures(self) -> bool:
        return self.measure_quality or self.gate.is_set


@dataclass(frozen=True)
class Settings:
    """What a request asks for by names. kv: element type of the KV cache, a key of the target's. lora: room for
    adapters."""

    target: Target
    precision: Precision
    kv: str
    rounding: Rounding
    tuning: Records | None
    lora: LoraRequest | None = None


def settings_of(request: BuildRequest) -> Settings:
    """Not for precision auto, which is no precision. Raises RequestError for names that are not known, and for what
    does not go together."""
    target, rounding = find_target(request.target), request.rounding
    if request.precision in {**PRECISIONS, **GPU_PRECISIONS}:
        target.require_precision(request.precision)
    precision = find_precision(request.precision, target.gpu)
    for name in (precision.name, *(request.layers or {}).values()):
        target.require_precision(name)
    precision = with_layers(precision, request.layers or {}, target.gpu)
    precision = with_groups(precision, request.group_size, request.group_minimums)
    if request.measures and request.strip_weights:
        raise RequestError("the quality of an engine without weights cannot be measured; leave one of the two out")
    if request.measures and target.gpu is not None:
        raise RequestError(f"the quality of an engine for {target.name} is not measured while it is built; build it "
                           "without, and compare it with its checkpoint: ingot compare")
    _require_ranks(request, target)
    return Settings(target, precision, _kv_precision(request, target, precision), rounding, _tuning(request, target),
                    lora_of(request))


def lora_of(request: BuildRequest) -> LoraRequest | None:
    """The room for adapters. Raises RequestError for room that cannot be."""
    if request.lora_max_rank is None:
        for name in ("lora_max_adapters", "lora_modules"):
            if getattr(request, name) is not None:
                raise RequestError(f"{name} says more of the room for LoRA adapters, and none is asked for; say "
                                   "lora_max_rank too, the largest rank")
        return None
    adapters = DEFAULT_ADAPTERS if request.lora_max_adapters is None else request.lora_max_adapters
    for name, value, most in (("lora_max_rank", request.lora_max_rank, MAX_RANK),
                              ("lora_max_adapters", adapters, MAX_ADAPTERS)):
        if not 1 <= value <= most:
            raise RequestError(f"{name} is {value}; expected 1 to {most}")
    if request.tensor_parallel > 1:
        raise RequestError(f"an engine that is divided among {request.tensor_parallel} GPUs has no room for LoRA "
                           "adapters yet: their matrices would have to be divided with the layers.\n"
                           "  Leave out lora_max_rank or tensor_parallel")
    modules = tuple(dict.fromkeys(request.lora_modules or ()))
    if request.lora_modules is not None and not modules:
        raise RequestError("lora_modules is empty; name linear layers such as q_proj, or leave it out for all")
    return LoraRequest(request.lora_max_rank, adapters, modules)


def require_groups_asked_of(request: BuildRequest) -> None:
    """Raises RequestError where groups are asked for that nobody can choose."""
    if not request.asks_groups:
        return
    if request.precision == AUTO:
        raise RequestError("group_size and group_minimums say what precision auto finds for each layer; leave them out")
    target = find_target(request.target)
    if target.gpu is None:
        raise RequestError(f"group_size and group_minimums are for GPUs; four bits have groups of 32 channels with a "
                           f"minimum each on {target.name}")


def _require_ranks(request: BuildRequest, target: Target) -> None:
    ranks = request.tensor_parallel
    if ranks not in RANKS:
        raise RequestError(f"tensor_parallel is {ranks}; expected {', '.join(map(str, RANKS))}")
    if ranks > 1 and target.gpu is None:
        raise RequestError(f"tensor_parallel is {ranks}: only engines for GPUs are divided; {target.name} runs all of "
                           "a model on its cores")


def _tuning(request: BuildRequest, target: Target) -> Records | None:
    """Raises RequestError for records of another target or of other kernels, and for a file that holds none."""
    given = request.tuning_records
    if given is None:
        return None
    where = str(given) if isinstance(given, Path) else "tuning_records"
    if target.gpu is not None:
        raise RequestError(f"{where}: kernels for {target.name} are chosen by a model; records are for CPU targets")
    records = Records.read(given) if isinstance(given, Path) else Records.of(given, where)
    records.require(target.name, where)
    return records


def _kv_precision(request: BuildRequest, target: Target, precision: Precision) -> str:
    kv = request.kv_precision or precision.kv
    if kv not in target.kv_precisions:
        raise RequestError(f"{target.name} has no KV cache in {kv!r}; it has: {', '.join(target.kv_precisions)}")
    if target.gpu is not None and kv not in (precision.floats, "fp8", "int8"):
        raise RequestError(f"an engine in {precision.name} for {target.name} computes in {precision.floats}; its KV "
                           f"cache may be {precision.floats}, fp8 or int8, not {kv}")
    return kv


def limits_of(request: BuildRequest, target: Target, model: str, facts: ModelFacts) -> dict[str, int]:
    """max_batch_size, max_num_tokens, max_seq_len. Raises RequestError for those that cannot be."""
    longest = facts.max_positions or DEFAULT_MAX_SEQ_LEN
    batch, tokens = _default_step(target)
    asked = {"max_batch_size": request.max_batch_size, "max_num_tokens": request.max_num_tokens,
             "max_seq_len": request.max_seq_len}
    defaults = {"max_batch_size": batch, "max_num_tokens": tokens, "max_seq_len": longest}
    limits = {name: defaults[name] if value is None else value for name, value in asked.items()}
    for name, value in limits.items():
        if value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}")
    if limits["max_seq_len"] > longest:
        raise RequestError(f"max_seq_len {limits['max_seq_len']} is beyond the {longest} positions of {model}")
    if limits["max_num_tokens"] < limits["max_batch_size"]:
        raise RequestError(f"max_num_tokens {limits['max_num_tokens']} is below max_batch_size "
                           f"{limits['max_batch_size']}: a step holds at least one token of every sequence")
    return limits


def _default_step(target: Target) -> tuple[int, int]:
    """Sequences and tokens of a step, where the user does not say."""
    if target.gpu is None:
        return 16, 512
    return (128, 8192) if target.gpu.memory_gib >= _LARGE_GPU_GIB else (32, 2048)


def ranks_suffix(num_ranks: int) -> str:
    """Of a target in the name of an engine's file."""
    return f"-tp{num_ranks}" if num_ranks > 1 else ""
