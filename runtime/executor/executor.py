"""The thread that runs requests on a device, and the door to it from all other threads."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..adapters.loaded import LoadedAdapters
from ..adapters.slots import AdapterSlots
from ..errors import IngotError
from ..guides import Guides
from ..scheduler import Scheduler, SchedulerSettings
from .answer import Answer, Running, Sink, make_answers
from .recorder import Recorder
from .request import Draining, DuplicateRequest, EngineFailed, QueueFull, Request, check_prompt, check_room
from .stats import EngineStats, Health
from .step_loop import StepLoop

if TYPE_CHECKING:
    from ..kv import KvCache
    from ..kv.events import EventBuffer
    from ..kv.stats import KvStats
    from ..program import Program
    from ..sampling import SamplingParams
    from ..tokenizer import Tokenizer
    from .request_log import RequestLog

Result = TypeVar("Result")

# A step can be empty while requests wait only for an instant: look again so soon.
_RETRY_S = 0.005


@dataclass(frozen=True)
class ExecutorSettings:
    """scheduler       limits of a step, and the rules by which it is filled
    max_seq_len     tokens of a sequence, prompt and answer together
    max_queue_size  requests that may wait for their first step
    """

    scheduler: SchedulerSettings
    max_seq_len: int
    max_queue_size: int = 512


class Executor:
    """Every method may be called from any thread but not from a sink.

    adapters  those that requests may name

    A sink gets the outputs of a step for all requests that were submitted with it, in one list. It is called on the
    executor's thread: what it does holds back the step after the next.
    """

    def __init__(self, program: Program, kv: KvCache, settings: ExecutorSettings, *, tokenizer: Tokenizer | None = None,
                 stop_token_ids: frozenset[int] = frozenset(), log: RequestLog | None = None) -> None:
        """kv: over the program's blocks. stop_token_ids: what the model ends its answers with."""
        self.settings = settings
        self.kv = kv
        self.recorder = Recorder()
        self.adapters = LoadedAdapters(program.lora)
        self._slots = AdapterSlots.of(program, self.recorder)
        self._vocab_size = program.vocab_size
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._guides = Guides(tokenizer, program.vocab_size, stop_token_ids) if tokenizer is not None else None
        self._scheduler: Scheduler[Answer] = Scheduler(kv, settings.scheduler, slots=self._slots)
        self._loop = StepLoop(program, kv, self._scheduler, self.recorder, log)
        self._health: Health = "serving"
        self._error: EngineFailed | None = None
        self._listeners: list[Callable[[Health], None]] = []
        # Guards all that follows; told when there is work for the thread, and when the thread has none left.
        self._changed = threading.Condition()
        self._new: dict[str, Running] = {}
        self._commands: list[Callable[[], object]] = []
        self._is_idle = True
        self._must_stop = False
        self._thread = threading.Thread(target=self._run, name="ingot-executor", daemon=True)
        self._thread.start()

    @property
    def health(self) -> Health:
        return self._health

    @property
    def error(self) -> EngineFailed | None:
        """Why the health is "failed"."""
        return self._error

    @property
    def events(self) -> EventBuffer | None:
        """What the KV cache stores and removes; None if it does not record that."""
        return self.kv.events

    @property
    def kv_stats(self) -> KvStats:
        return self.kv.stats

    def prepare(self, params: SamplingParams) -> None:
        """Does what can take long about `submit` beforehand: compiles the guide. Raises SamplingError, WorkFailed."""
        if params.guide is not None and self._guides is not None:
            self._guides.prepare(params.guide)

    def submit(self, request: Request, sink: Sink) -> None:
        """Lets a request wait for its turn. Its outputs come to `sink`, the last of each answer with a finish_reason.

        Raises QueueFull, Draining, EngineFailed, DuplicateRequest, PromptError, SamplingError, NeverFits,
        InvalidPriority, UnknownAdapter: then it is none.
        """
        try:
            with self._changed:
                self._refuse(request)  # before any work: under overload most requests end here
            ids, longest = request.prompt_token_ids, self.settings.max_seq_len
            check_prompt(ids, self._vocab_size, longest)
            check_room(ids, longest)
            request.params.check_vocabulary(self._vocab_size)
            length = min(len(ids) + request.params.max_tokens, longest)
            self._scheduler.check(len(ids), length, request.priority)
            adapter = None if request.lora is None else self.adapters.get(request.lora)
            running = make_answers(request, sink, self._tokenizer, self._stop_token_ids, longest, self._guides, adapter)
            with self._changed:
                self._refuse(request)
                self._new[request.request_id] = running
                self._is_idle = False
                self._changed.notify_all()
                self.recorder.adapter_requests[request.lora or ""] += 1
        except IngotError as error:
            self.recorder.requests_refused[type(error).__name__] += 1
            raise

    def _refuse(self, request: Request) -> None:
        if self._error is not None:
            raise self._error
        if self._health != "serving":
            raise Draining("the engine shuts down: it finishes what it has and takes no new requests")
        request_id = request.request_id
        if request_id in self._new or request_id in self._loop.requests:
            raise DuplicateRequest(f"request_id {request_id!r} is that of a request that has not ended")
        waiting = self._loop.num_unstarted + len(self._new)
        if waiting >= self.settings.max_queue_size:
            raise QueueFull(
                f"{waiting} requests wait and {self._scheduler.num_running} sequences run; no more than "
                f"{self.settings.max_queue_size} may wait.\n  Try again later, or raise --max-queue-size.")

    def cancel(self, request_id: str) -> None:
        """Ends a request with finish_reason "cancelled", its KV blocks free within a step; nothing if it has ended."""
        self._command(lambda: self._cancel(request_id))

    def _cancel(self, request_id: str) -> None:
        running = self._loop.requests.get(request_id)
        if running is not None:
            self._loop.end(running, "cancelled")

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing happens, while sequences run."""
        return self._call(self._flush_cache)

    def _flush_cache(self) -> bool:
        if self._scheduler.num_running:
            return False
        self.kv.clear()
        return True

    def stats(self) -> EngineStats:
        scheduler, usage = self._scheduler, self.kv.usage()
        return EngineStats(
            health=self._health, num_running=scheduler.num_running, num_waiting=scheduler.num_waiting + len(self._new),
            num_paused=scheduler.num_paused, max_batch_size=scheduler.settings.max_batch_size,
            max_queue_size=self.settings.max_queue_size, num_blocks=usage.num_blocks, num_used_blocks=usage.num_used,
            num_cached_blocks=usage.num_cached, num_free_blocks=usage.num_free, block_size=self.kv.block_size,
            num_host_blocks=usage.num_host_blocks, num_used_host_blocks=usage.num_host_cached,
            guaranteed_requests=self.kv.num_blocks // self.kv.needed(self.settings.max_seq_len - 1))

    def on_health(self, listener: Callable[[Health], None]) -> None:
        """Calls `listener`, on any thread, whenever the health has changed."""
        self._listeners.append(listener)

    def _set_health(self, health: Health) -> None:
        if health != self._health:
            self._health = health
            for listener in self._listeners:
                listener(health)

    def refuse_new(self) -> None:
        """From now on submit raises Draining."""
        if self._health == "serving":
            self._set_health("draining")

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and waits until all others have ended: True. What has not after timeout_s seconds is
        cancelled: False."""
        self.refuse_new()
        with self._changed:
            if self._changed.wait_for(lambda: self._is_idle, timeout_s):
                return True
        self._command(self._cancel_all)
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle)
        return False

    def _cancel_all(self) -> None:
        for running in list(self._loop.requests.values()):
            self._loop.end(running, "cancelled")

    def close(self) -> None:
        """Cancels what has not ended and stops the thread. The program is the caller's to close, afterwards."""
        if self._health != "failed":
            self._set_health("stopped")
        with self._changed:
            self._must_stop = True
            self._changed.notify_all()
        self._thread.join()
        self._loop.release()  # whatever still holds the executor holds no memory of the device
        if self._slots is not None:
            self._slots.release()

    def _command(self, command: Callable[[], object]) -> None:
        """Something to be done by the executor's thread, between two steps."""
        with self._changed:
            if self._thread_has_ended():
                return
            self._commands.append(command)
            self._is_idle = False
            self._changed.notify_all()

    def _call(self, function: Callable[[], Result]) -> Result:
        """As _command, and waits for the result."""
        results: list[Result] = []
        done = threading.Event()

        def command() -> None:
            try:
                results.append(function())
            finally:
                done.set()

        self._command(command)
        while not done.wait(0.1):
            if self._thread_has_ended():
                raise self._error or Draining("the engine has stopped")
        return results[0]

    def _thread_has_ended(self) -> bool:
        return self._error is not None or self._must_stop

    # The executor's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            self._fail(error)
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()

    def _turn(self) -> bool:
        """One step; False when the thread shall end."""
        loop = self._loop
        loop.wait()
        if self._new or self._commands or self._must_stop:
            self._take_commands()
        launched = loop.launch()
        delivered = loop.deliver()
        loop.prepare()
        return launched or delivered or self._sleep()

    def _take_commands(self) -> None:
        loop = self._loop
        with self._changed:
            for running in self._new.values():
                loop.add(running)
            self._new.clear()
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        if self._must_stop:
            self._cancel_all()

    def _sleep(self) -> bool:
        """Nothing can run: until there is something to do. False when the thread shall end."""
        with self._changed:
            if self._loop.requests:
                self._changed.wait(_RETRY_S)
                return True
            while not (self._new or self._commands or self._must_stop):
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait()
            return bool(self._new or self._commands)

    def _fail(self, error: Exception) -> None:
        """The device, or Ingot itself, is broken: everybody is told, and nothing is taken any more."""
        if not isinstance(error, IngotError):
            print("ingot: the executor failed:", file=sys.stderr)
            traceback.print_exception(error)
        failure = EngineFailed(f"the engine failed and answers no more requests: {type(error).__name__}: {error}")
        with self._changed:
            self._error = failure
            new, self._commands = list(self._new.values()), []
            self._new.clear()
        self._loop.fail(failure, new)
        self._set_health("failed")
