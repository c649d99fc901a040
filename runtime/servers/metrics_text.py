"""The page /metrics: an engine's counters in Prometheus' text format (docs/metrics.md explains each).

Written by hand: the counters live in the executor, which must not depend on a client library, and the format is a line
a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..executor.recorder import Histogram, Recorder
from .swap_outcome import RESULTS

if TYPE_CHECKING:
    from ..executor.stats import EngineStats
    from ..kv.stats import KvStats
    from .context import ServerContext

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


class Family(NamedTuple):
    """A metric: its type ("counter", "gauge", "histogram"), and a value for each set of labels."""

    name: str
    kind: str
    meaning: str
    values: Iterable[tuple[Labels, float | Histogram]]


def render(context: ServerContext) -> str:
    """The page. Counters that belong together may differ by a step: nothing is locked to read them."""
    return "".join(f"{line}\n" for family in families(context) for line in _lines(family))


def families(context: ServerContext) -> Iterator[Family]:
    """Every metric there is, in the order of the page."""
    stats, totals = context.stats(), context.totals()
    yield from _engine(context)
    yield from _requests(stats, totals.recorder)
    yield from _latencies(totals.recorder)
    yield from _tokens(totals.recorder)
    yield from _adapters(context, totals.recorder)
    yield from _kv_cache(stats, totals.kv)
    yield from _steps(totals.recorder)


def _engine(context: ServerContext) -> Iterator[Family]:
    manifest, health = context.current.file.manifest, context.health
    identity = {"hash": context.current.hash, "model": context.model_name, "target": manifest["target"]["name"],
                "precision": manifest["precision"]}
    yield Family("ingot_engine_info", "gauge", "Which engine is served; always 1", [(identity, 1)])
    yield Family("ingot_engine_healthy", "gauge", "1 while the engine computes, 0 once it failed or stopped",
                 _one(int(health in ("serving", "draining"))))
    yield Family("ingot_engine_draining", "gauge", "1 while new requests are refused and old ones end",
                 _one(int(health == "draining")))
    yield Family("ingot_engines_finishing", "gauge", "Engines that were replaced and still answer old requests",
                 _one(len(context.finishing)))
    yield Family("ingot_engine_swaps_total", "counter", "Engines that were asked to take over, by what came of it",
                 _labelled("result", context.swaps, RESULTS))
    yield Family("ingot_kernel_fallbacks", "gauge", "Operators that run on a slower kernel than the precision asks for",
                 _one(len(manifest.get("fallbacks", ()))))


def _requests(stats: EngineStats, recorder: Recorder) -> Iterator[Family]:
    yield Family("ingot_requests_running", "gauge", "Requests in the batch", _one(stats.num_running))
    yield Family("ingot_requests_waiting", "gauge", "Requests that were never admitted", _one(stats.num_waiting))
    yield Family("ingot_requests_paused", "gauge", "Requests that lost their KV blocks and wait to go on",
                 _one(stats.num_paused))
    yield Family("ingot_requests_received_total", "counter", "Requests that were taken; refused ones are counted apart",
                 _one(recorder.requests_received))
    yield Family("ingot_requests_finished_total", "counter", "Answers that ended, by reason",
                 _labelled("reason", recorder.requests_finished, ("stop", "length", "cancelled", "timeout", "error")))
    yield Family("ingot_requests_refused_total", "counter", "Requests that were refused, by error",
                 _labelled("error", recorder.requests_refused, ("QueueFull", "NeverFits", "Draining")))
    yield Family("ingot_requests_paused_total", "counter", "How often a request was paused",
                 _one(recorder.requests_paused))


def _latencies(recorder: Recorder) -> Iterator[Family]:
    yield Family("ingot_time_to_first_token_seconds", "histogram",
                 "From arrival to the first token, by how much of the prompt was cached",
                 [({"cache": cache}, histogram) for cache, histogram in recorder.time_to_first_token.items()])
    yield Family("ingot_inter_token_latency_seconds", "histogram", "Between two tokens of an answer",
                 _one(recorder.inter_token_latency))
    yield Family("ingot_request_queue_time_seconds", "histogram", "From arrival to the first admission",
                 _one(recorder.queue_time))
    yield Family("ingot_request_seconds", "histogram", "From arrival to the end of all answers",
                 _one(recorder.request_time))


def _tokens(recorder: Recorder) -> Iterator[Family]:
    yield Family("ingot_prompt_tokens_total", "counter", "Tokens of prompts, once for each of their answers",
                 _one(recorder.prompt_tokens))
    yield Family("ingot_prompt_tokens_cached_total", "counter", "Those of them whose KV was in the cache",
                 _one(recorder.cached_prompt_tokens))
    yield Family("ingot_generated_tokens_total", "counter", "Tokens of answers", _one(recorder.generated_tokens))
    yield Family("ingot_computed_tokens_total", "counter", "Tokens that went through the model",
                 _one(recorder.computed_tokens))
    yield Family("ingot_draft_tokens_total", "counter", "Drafted tokens that were verified",
                 _one(recorder.draft_tokens))
    yield Family("ingot_draft_tokens_accepted_total", "counter", "Those of them that became part of an answer",
                 _one(recorder.accepted_draft_tokens))


def _adapters(context: ServerContext, recorder: Recorder) -> Iterator[Family]:
    loaded, room = context.adapters.all(), context.adapters.room
    yield Family("ingot_adapters_loaded", "gauge", "LoRA adapters that requests may name", _one(len(loaded)))
    yield Family("ingot_adapter_slots", "gauge", "So many of them are served in one step",
                 _one(room.max_adapters if room is not None else 0))
    yield Family("ingot_adapter_writes_total", "counter", "How often an adapter was written to a slot of the device",
                 _one(recorder.adapter_writes))
    yield Family("ingot_adapter_requests_total", "counter", "Requests by the adapter that they named; empty: none",
                 _labelled("adapter", recorder.adapter_requests, ("", *(each.name for each in loaded))))


def _kv_cache(stats: EngineStats, kv: KvStats) -> Iterator[Family]:
    yield Family("ingot_prefix_cache_queries_total", "counter", "Prompt tokens looked up, once, at admission",
                 _one(kv.queried_tokens))
    yield Family("ingot_prefix_cache_hits_total", "counter", "Those of them that were found", _one(kv.hit_tokens))
    yield Family("ingot_prefix_cache_host_hits_total", "counter", "Those of the found ones that the host tier had",
                 _one(kv.host_hit_tokens))
    yield Family("ingot_prefix_cache_resumed_hits_total", "counter",
                 "Tokens found again after a pause, in no other count", _one(kv.resumed_hit_tokens))
    yield Family("ingot_prefix_cache_miss_total", "counter", "Those that were not, by reason",
                 [({"reason": reason}, number) for reason, number in kv.miss_tokens.items()])
    yield Family("ingot_kv_cache_usage_ratio", "gauge", "Share of the device's KV blocks that requests hold",
                 _one(stats.kv_cache_usage))
    blocks = {"used": stats.num_used_blocks, "cached": stats.num_cached_blocks, "free": stats.num_free_blocks}
    yield Family("ingot_kv_cache_blocks", "gauge", "KV blocks of the device: held by requests, reusable, empty",
                 _labelled("state", blocks, ()))
    yield Family("ingot_kv_cache_host_blocks", "gauge", "KV blocks of the host tier that hold something",
                 _one(stats.num_used_host_blocks))
    yield Family("ingot_kv_cache_copies_total", "counter", "Copies of KV blocks that matched a prompt partly",
                 _one(kv.copied_blocks))
    yield Family("ingot_kv_cache_evictions_total", "counter", "KV blocks that lost their content, by tier",
                 _labelled("tier", {"device": kv.evicted_blocks, "host": kv.host_evicted_blocks}, ()))
    yield Family("ingot_kv_cache_offloads_total", "counter", "KV blocks copied to the host tier",
                 _one(kv.offloaded_blocks))
    yield Family("ingot_kv_cache_onboards_total", "counter", "KV blocks copied back from it",
                 _one(kv.onboarded_blocks))


def _steps(recorder: Recorder) -> Iterator[Family]:
    yield Family("ingot_steps_total", "counter", "Steps of the model", _one(recorder.steps))
    yield Family("ingot_step_seconds", "histogram", "Where the time of a step goes, on the host's clock",
                 [({"phase": phase}, histogram) for phase, histogram in recorder.step_phases.items()])
    yield Family("ingot_guided_mask_wait_seconds", "histogram", "Time that a step was held back by grammar masks",
                 _one(recorder.guided_mask_wait))


def _one(value: float | Histogram) -> list[tuple[Labels, float | Histogram]]:
    return [({}, value)]


def _labelled(label: str, values: Mapping[Any, float], expected: tuple[str, ...]) -> list[tuple[Labels, float]]:
    """The expected ones are there from the start: a counter that appears with its first event has no rate then."""
    return [({label: name}, number) for name, number in {**dict.fromkeys(expected, 0), **values}.items()]


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.meaning)}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.values:
        if isinstance(value, Histogram):
            yield from _histogram(family.name, labels, value)
        else:
            yield f"{family.name}{_shown(labels)} {_number(value)}"


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    counts, below = list(histogram.counts), 0
    bounds = [*map(_number, histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, counts, strict=True):
        below += count
        yield f"{name}_bucket{_shown({**labels, 'le': bound})} {below}"
    yield f"{name}_sum{_shown(labels)} {_number(histogram.sum)}"
    yield f"{name}_count{_shown(labels)} {below}"  # not histogram.total, which may be a step ahead of the counts


def _shown(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
