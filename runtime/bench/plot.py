"""A report's picture: how latencies are distributed, and how they went over time."""

from typing import Any

import numpy as np

from ..errors import RequestError, WorkFailed
from .recorder import RequestRecord

_COLOURS = {"hit": "#2a9d8f", "partial": "#e9a03b", "miss": "#c8553d", None: "#4a6fa5"}


def check_plot(path: str) -> None:
    """Raises RequestError, before any work is done, if no plot can be drawn here or to such a name."""
    try:
        import matplotlib  # noqa: F401  (asked for with --plot only)
    except ImportError:
        raise RequestError("--plot needs matplotlib, which is not installed here.\n"
                           "  Install it: pip install 'ingot-llm[bench]'") from None
    if not path.endswith(".png"):
        raise RequestError(f"--plot {path}: expected a name that ends in .png")


def draw(path: str, records: list[RequestRecord], report: dict[str, Any]) -> None:
    """Writes a PNG. Raises WorkFailed if the file can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    finished = [record for record in records if record.status == "finished"]
    figure, ((first, between), (over_time, under_way)) = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    run = report["run"]
    figure.suptitle(f"{run['model']}  ·  {run['load']}\n{run['machine']}", fontsize=10)

    for cache, colour in _COLOURS.items():
        some = [record for record in finished if record.cache == cache]
        if some:
            _distribution(first, [record.ttft_s for record in some], colour, cache or "all")
            over_time.scatter([record.scheduled_s for record in some], [record.ttft_s * 1e3 for record in some],
                              s=8, color=colour, label=cache or "all")
    gaps = [np.diff(np.asarray(record.times_s)) for record in finished if len(record.times_s) > 1]
    if gaps:
        _distribution(between, np.concatenate(gaps), _COLOURS[None], "all")
    _label(first, "time to first token", "ms", "share of requests")
    _label(between, "inter-token latency", "ms", "share of tokens")
    _label(over_time, "time to first token over time", "s since the start", "ms")
    moments, counts = _under_way(records)
    under_way.step(moments, counts, where="post", color=_COLOURS[None], linewidth=1)
    _label(under_way, "requests under way", "s since the start", "requests")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise WorkFailed(f"cannot write the plot {path!r}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _distribution(axes: Any, seconds: Any, colour: str, label: str) -> None:
    values = np.sort(np.asarray(seconds)) * 1e3
    axes.step(values, np.arange(1, values.size + 1) / values.size, where="post", color=colour, label=label)
    axes.set_xscale("log")


def _under_way(records: list[RequestRecord]) -> tuple[list[float], list[int]]:
    events = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    counts = np.cumsum([change for _, change in events]).tolist()
    return [moment for moment, _ in events], counts


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
