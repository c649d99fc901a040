"""From an engine file to an executor that takes requests."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Self

from ..devices import device_of, load_program
from ..engine_file import EngineFile
from ..errors import RequestError
from ..host import return_free_memory
from ..kv import KvCache
from ..kv.events import EventBuffer
from ..kv_memory import kv_cache_tokens
from ..program import Limits, Program
from ..scheduler import ChunkingPolicy, SchedulerPolicy, SchedulerSettings, SettingsError
from ..self_test import SelfTest
from ..store.locate import locate
from ..store.policy import ANY_ENGINE, LoadPolicy
from ..tokenizer import Tokenizer, read_config
from .executor import Executor, ExecutorSettings
from .request_log import RequestLog
from .trial import Extent, Trial, try_out


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is run. None: what the engine was built for, or what the machine has.

    kv_cache_tokens, kv_cache_fraction  room of the KV cache; tokens come first. Host tier: the same
    log_requests                        file for a line about each request; "-": standard error
    store                               folder of the engine store; default $INGOT_STORE, else engines/
    policy                              which engines may be loaded
    device                              "cpu", "cuda", "cuda:1" or "emulator"
    """

    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_queue_size: int = 512
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float | None = None
    host_kv_tokens: int = 0
    host_cache_fraction: float | None = None
    prefix_reuse: bool = True
    speculative_tokens: int = 0
    num_workers: int | None = None
    log_requests: str | None = None
    store: str | None = None
    policy: LoadPolicy = ANY_ENGINE
    device: str | None = None


class LoadedEngine:
    """An engine with the executor that runs it.

    limits  those that it is run with, at most those that it was built for
    trial   how it was tried out; None if it was not
    """

    def __init__(self, engine: str | os.PathLike[str], options: EngineOptions = EngineOptions(),
                 extent: Extent = "none") -> None:
        """engine: a file, a name in the store, or the start of a hash. extent: how far it is tried out before it takes
        requests (trial.py).

        Raises RequestError (EngineFormatError, EngineRefused, EngineMismatch, SettingsError, KvCacheSizeError) or
        WorkFailed (SelfTestFailed).
        """
        self.options = options
        self.trial: Trial | None = None
        located = locate(engine, options.store)
        self.file = located.open()
        self._log: RequestLog | None = None
        self._program: Program | None = None
        try:
            options.policy.check(self.file, located.attestations)
            self._load(extent)
        except BaseException:
            self._release()
            raise

    def _load(self, extent: Extent) -> None:
        options, manifest = self.options, self.file.manifest
        built = Limits.of(manifest)
        settings = SchedulerSettings.within(built, options.max_batch_size, options.max_num_tokens,
                                            policy=options.scheduler_policy, chunking=options.context_chunking,
                                            speculative_tokens=options.speculative_tokens)
        self.limits = Limits(settings.max_batch_size, settings.max_num_tokens, _max_seq_len(built, options.max_seq_len))
        if options.max_queue_size < 1:
            raise RequestError(f"--max-queue-size is {options.max_queue_size}; expected at least 1")
        self._log = RequestLog(options.log_requests) if options.log_requests is not None else None
        host_tokens = _host_kv_tokens(self.file, options)
        program = self._program = load_program(self.file, options.kv_cache_tokens, options.num_workers, host_tokens,
                                               device=options.device, kv_cache_fraction=options.kv_cache_fraction)
        self.vocab_size = program.vocab_size
        self.tokenizer = Tokenizer.of(self.file)
        self.stop_token_ids = frozenset(read_config(self.file).get("eos_token_ids", ()))
        if extent != "none":
            self.trial = self._try_out(program, settings, extent)
        self.kv = self._empty_cache(program, settings)
        self.executor = Executor(
            program, self.kv, ExecutorSettings(settings, self.limits.max_seq_len, options.max_queue_size),
            tokenizer=self.tokenizer, stop_token_ids=self.stop_token_ids, log=self._log)
        return_free_memory()  # loading parses much JSON: what it leaves would stay for as long as the engine serves

    def _empty_cache(self, program: Program, settings: SchedulerSettings) -> KvCache:
        return KvCache(program.num_blocks, program.block_size, program.kv_windows,
                       num_host_blocks=program.num_host_blocks, max_chunk=settings.max_num_tokens,
                       max_draft=settings.speculative_tokens,
                       enable_reuse=self.options.prefix_reuse, events=EventBuffer())

    def _try_out(self, program: Program, settings: SchedulerSettings, extent: Extent) -> Trial:
        """With a cache and an executor of its own, so that neither counters nor cached prefixes tell of it, and without
        drafts: what the engine says is compared with what it said where it was built, a token a step."""
        settings = replace(settings, speculative_tokens=0)
        kv, longest = self._empty_cache(program, settings), self.limits.max_seq_len
        executor = Executor(program, kv, ExecutorSettings(settings, longest, 2 * settings.max_batch_size))
        try:
            return try_out(executor, SelfTest.read(self.file), self.limits, kv.longest(longest), program.vocab_size,
                           self.file.manifest["target"].get("kind", "cpu"), self.file.path, extent)
        finally:
            executor.close()

    def close(self) -> None:
        """Ends what runs, stops the executor and frees the device."""
        self.executor.close()
        self._release()

    def _release(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None
        if self._log is not None:
            self._log.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def facts(self) -> dict[str, Any]:
        """The settings as they were resolved, and what they come to, by name."""
        options, stats, memory = self.options, self.executor.stats(), self.file.manifest["memory"]
        tables, room = len(self.kv.windows), self.executor.adapters.room
        return {
            "scheduler_policy": options.scheduler_policy.name,
            "context_chunking": options.context_chunking.name,
            "max_batch_size": self.limits.max_batch_size,
            "max_num_tokens": self.limits.max_num_tokens,
            "max_seq_len": self.limits.max_seq_len,
            "max_queue_size": options.max_queue_size,
            "prefix_reuse": options.prefix_reuse,
            "speculative_tokens": options.speculative_tokens,
            "kv_cache_tokens": stats.num_blocks // tables * stats.block_size,
            "kv_cache_bytes": stats.num_blocks // tables * stats.block_size * memory.get("kv_bytes_per_token", 0),
            "host_kv_tokens": stats.num_host_blocks // tables * stats.block_size,
            "host_kv_bytes": stats.num_host_blocks // tables * stats.block_size * memory.get("kv_bytes_per_token", 0),
            "guaranteed_requests": stats.guaranteed_requests,
            **({} if room is None else {"lora_max_rank": room.max_rank, "lora_slots": room.max_adapters}),
        }


def _host_kv_tokens(engine: EngineFile, options: EngineOptions) -> int:
    """Tokens in the host tier; checks those of the device too."""
    for name in ("kv_cache_tokens", "host_kv_tokens"):
        value = getattr(options, name)
        if value is not None and value < (0 if name == "host_kv_tokens" else 1):
            raise RequestError(f"--{name.replace('_', '-')} is {value}; expected a number of tokens")
    if options.host_cache_fraction is not None:
        manifest = engine.manifest
        if device_of(engine, options.device)[0] == "cuda":  # the rest is not in the host's memory
            manifest = {**manifest, "memory": {**manifest["memory"], "fixed_bytes": 0}}
        return kv_cache_tokens(manifest, options.host_cache_fraction, "--host-cache-fraction")
    return options.host_kv_tokens


def _max_seq_len(built: Limits, asked: int | None) -> int:
    if asked is None:
        return built.max_seq_len
    if asked > built.max_seq_len:
        raise SettingsError(f"max_seq_len {asked} is above {built.max_seq_len}, what the engine was built for.\n"
                            f"  Lower it, or build the engine with --max-seq-len {asked}.")
    if asked < 2:
        raise SettingsError(f"max_seq_len must be at least 2, a prompt and its answer, not {asked}")
    return asked
