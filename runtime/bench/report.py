"""From records and the server's metrics to a report: a dictionary for machines, tables for people."""

import math
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..cli.output import table
from .recorder import RequestRecord
from .samples import Samples

PERCENTILES = (50, 90, 95, 99)
_NOT_TOLD = "not told by the server"


def make_report(records: list[RequestRecord], begin_s: float, server: Samples | None,
                kv_usage: list[float]) -> dict[str, Any]:
    """records: those of the measured part. server: what its metrics counted meanwhile; None if unreachable.

    Times in seconds. Throughput counts from the first scheduled moment to the last token.
    """
    finished = [record for record in records if record.status == "finished"]
    duration = max((record.end_s for record in records), default=begin_s) - begin_s
    input_tokens = [record.prompt_tokens for record in finished if record.prompt_tokens is not None]
    output_tokens = sum(record.num_output_tokens for record in finished)
    rate = 1 / duration if duration > 0 else 0.0
    return {
        "requests": {
            **{status: sum(record.status == status for record in records)
               for status in ("finished", "refused", "failed")},
            "shorter_than_asked": sum(record.num_output_tokens < record.asked_tokens for record in finished),
            "errors": _errors(records),
        },
        "duration_s": round(duration, 4),
        "throughput": {
            "requests_per_s": round(len(finished) * rate, 4),
            "input_tokens_per_s": round(sum(input_tokens) * rate, 2) if input_tokens else None,
            "output_tokens_per_s": round(output_tokens * rate, 2),
        },
        "tokens": {"input": sum(input_tokens) if input_tokens else None, "output": output_tokens},
        "prefix_cache": _prefix_cache(finished),
        "kv_usage": {"mean": float(np.mean(kv_usage)), "max": max(kv_usage)} if kv_usage else None,
        "times": _times(records, finished, server),
        "server": _server(server),
    }


def _errors(records: Iterable[RequestRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts


def _prefix_cache(finished: list[RequestRecord]) -> dict[str, Any] | None:
    """As the answers' usage tells it, request by request."""
    told = [record for record in finished if record.cache is not None]
    if not told:
        return None
    cached = sum(record.cached_tokens or 0 for record in told)
    prompts = sum(record.prompt_tokens or 0 for record in told)
    counts = {name: sum(record.cache == name for record in told) for name in ("hit", "partial", "miss")}
    return {"cached_tokens": cached, "prompt_tokens": prompts, "hit_rate": round(cached / prompts, 4), **counts}


def _times(records: list[RequestRecord], finished: list[RequestRecord], server: Samples | None) -> dict[str, Any]:
    gaps = [np.diff(np.asarray(record.times_s)) for record in finished if len(record.times_s) > 1]
    by_cache = {
        f"time to first token, {name}": [record.ttft_s for record in finished if record.cache == name]
        for name in ("hit", "partial", "miss")
    }
    per_token = [(record.times_s[-1] - record.times_s[0]) / (record.num_output_tokens - record.counts[0])
                 for record in finished if record.num_output_tokens > record.counts[0]]
    times: dict[str, Any] = {
        **{name: summary(values) for name, values in by_cache.items() if values},
        "time to first token": summary([record.ttft_s for record in finished]),
        "inter-token latency": summary(np.concatenate(gaps) if gaps else []),
        "time per output token": summary(per_token),
        "end-to-end latency": summary([record.latency_s for record in finished]),
        "queue wait": _queue_wait(server),
        "time to refusal": summary([record.end_s - record.sent_s for record in records if record.status == "refused"]),
        "sent after schedule": summary([record.sent_s - record.scheduled_s for record in records]),
    }
    return {name: value for name, value in times.items() if value is not None}


def summary(values: Any) -> dict[str, float] | None:
    """count, mean, min, percentiles, max; spread: max - min; None of nothing."""
    values = np.asarray(values, np.float64)
    if not values.size:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    low, high = float(values.min()), float(values.max())
    return {"count": int(values.size), "mean": float(values.mean()), "min": low,
            **{f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)},
            "max": high, "spread": high - low}


def _queue_wait(server: Samples | None) -> dict[str, float] | None:
    """From the server's histogram: percentiles lie within its buckets, least and most are unknown."""
    name = "ingot_request_queue_time_seconds"
    quantiles = server.quantiles(name, [p / 100 for p in PERCENTILES]) if server else None
    if server is None or quantiles is None:
        return None
    count, total = server.total(f"{name}_count") or 0.0, server.total(f"{name}_sum") or 0.0
    return {"count": int(count), "mean": total / count,
            **{f"p{p}": value for p, value in zip(PERCENTILES, quantiles, strict=True)}}


def _server(server: Samples | None) -> dict[str, Any] | None:
    """What the server counted in the meantime."""
    if server is None:
        return None
    queries = server.total("ingot_prefix_cache_queries_total")
    hits = server.total("ingot_prefix_cache_hits_total")
    drafted, accepted = (server.total(f"ingot_draft_tokens{part}_total") for part in ("", "_accepted"))
    return {
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "hit_rate": round(hits / queries, 4) if queries and hits is not None else None,
        "misses": {reason: number for reason, number in
                   server.by_label("ingot_prefix_cache_miss_total", "reason").items() if number},
        "paused": server.total("ingot_requests_paused_total"),
        "draft_tokens": drafted,
        "accepted_draft_tokens": accepted,
        "draft_acceptance": round(accepted / drafted, 4) if drafted and accepted is not None else None,
    }


def report_text(report: dict[str, Any]) -> str:
    """Three tables: what was run, what came out, and how long it took in milliseconds."""
    parts = [table(_run_rows(report["run"])), table(_result_rows(report)), _times_table(report["times"])]
    return "\n\n".join(parts)


def _run_rows(run: dict[str, Any]) -> list[tuple[str, str]]:
    """A fact a row; long ones go on in the next."""
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key.replace('_', ' ')} {shown(item)}" for key, item in value.items())
        return _NOT_TOLD if value is None else str(value)

    rows = []
    for name, value in run.items():
        if value not in ({}, ""):
            first, *rest = textwrap.wrap(shown(value), 100, break_long_words=False)
            rows += [(name.replace("_", " "), first), *(("", line) for line in rest)]
    return rows


def _result_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    requests, rates, tokens = report["requests"], report["throughput"], report["tokens"]
    cache, kv, server = report["prefix_cache"], report["kv_usage"], report["server"]
    rows = [
        ("requests", f"{requests['finished']} finished, {requests['refused']} refused, {requests['failed']} failed"),
        ("duration", f"{report['duration_s']:.2f} s"),
        ("throughput", f"{rates['requests_per_s']:.2f} requests/s, {_rate(rates['input_tokens_per_s'])} input and "
                       f"{_rate(rates['output_tokens_per_s'])} output tokens/s"),
        ("tokens", f"{_NOT_TOLD if tokens['input'] is None else tokens['input']} input, {tokens['output']} output"),
        ("prefix cache", _NOT_TOLD if cache is None else
         f"{cache['hit_rate']:.1%} of prompt tokens reused ({cache['cached_tokens']} of {cache['prompt_tokens']}); "
         f"{cache['hit']} hit, {cache['partial']} partial, {cache['miss']} miss"),
        ("KV use", f"{kv['mean']:.1%} in the mean, {kv['max']:.1%} at most" if kv is not None else
         "not read in so short a time" if server is not None else _NOT_TOLD),
        ("paused", _NOT_TOLD if server is None or server["paused"] is None else f"{server['paused']:.0f}"),
    ]
    if server and server["draft_tokens"]:
        rows.append(("drafts", f"{server['draft_acceptance'] or 0:.1%} of {server['draft_tokens']:.0f} drafted tokens "
                               "accepted"))
    if server and server["misses"]:
        reasons = ", ".join(f"{reason} {number:.0f}" for reason, number in sorted(server["misses"].items()))
        rows.append(("tokens missed", reasons))
    if requests["shorter_than_asked"]:
        rows.append(("shorter", f"{requests['shorter_than_asked']} answers had fewer tokens than asked for"))
    rows += [("error", f"{number} × {_shortened(text)}") for text, number in requests["errors"].items()][:5]
    return rows


def _times_table(times: dict[str, dict[str, float]]) -> str:
    columns = ("mean", "min", *(f"p{p}" for p in PERCENTILES), "max", "spread")
    header = ("ms", "count", *(name.upper() if name[0] == "p" and name[1].isdigit() else name for name in columns))
    rows = [(name, values["count"], *(_ms(values.get(column)) for column in columns))
            for name, values in times.items()]
    if "queue wait" not in times:
        rows.append(("queue wait", 0, *("-" for _ in columns)))
    lines = [table(rows, header)]
    if "queue wait" in times:
        lines.append("queue wait: from the server's histogram, exact to its buckets")
    else:
        lines.append("queue wait: " + _NOT_TOLD)
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "-"
    value = seconds * 1e3
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _rate(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _shortened(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= 160 else line[:157] + "…"
