"""The same model in PyTorch, by transformers: eager, and by torch.compile with CUDA graphs ("reduce-overhead")."""
from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .throughput import BATCHES, CONTEXT, PROMPT, Speed

_STEPS, _WARM_UP = 24, 4
_REPEATS = 3


def load(checkpoint: Path, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa",
                                                 local_files_only=True)
    return model.to(device).eval()


def peer_speeds(model: Any, compiled: bool, batches: tuple[int, ...] = BATCHES, context: int = CONTEXT,
                prompt: int = PROMPT, seconds: float = 120.0,
                progress: Callable[[str], None] = lambda text: None) -> list[Speed]:
    """Generation with a static cache, then context. What has not begun after so many seconds is left out."""
    import torch

    who = "PyTorch compiled" if compiled else "PyTorch eager"
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if compiled else model.forward
    deadline, found = time.perf_counter() + seconds, []
    for phase, batch, work in [("generation", batch, _generation) for batch in batches] + [("context", 1, _context)]:
        size = context if phase == "generation" else prompt
        count = batch if phase == "generation" else prompt
        if compiled and phase == "context":
            continue  # CUDA graphs are for steps of one shape; a prompt has any
        if time.perf_counter() > deadline:
            found.append(Speed(who, phase, batch, count, float("nan"), problem="no time left"))
            continue
        try:
            with torch.inference_mode():
                found.append(Speed(who, phase, batch, count, work(model, forward, batch, size)))
        except Exception as error:  # of PyTorch's compiler anything may come; it is the peer's result
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            found.append(Speed(who, phase, batch, count, float("nan"), problem=reason))
        progress(f"{who}, {phase}, {batch}: {found[-1].problem or f'{1e3 * found[-1].seconds:.2f} ms a step'}")
    return found


def _generation(model: Any, forward: Any, batch: int, context: int) -> float:
    """Seconds of a step: the forward pass and the choice of the greedy tokens, which the host reads."""
    import torch
    from transformers import StaticCache

    device = model.device
    cache = StaticCache(config=model.config, max_cache_len=context + _STEPS + _WARM_UP)
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    _step(model.forward, ids, cache, 0)
    token = ids[:, -1:]
    times = []
    for number in range(_STEPS + _WARM_UP):
        begin = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()  # results of the step before are not needed any more
        logits = _step(forward, token, cache, context + number)
        token = logits[:, -1].argmax(-1, keepdim=True).clone()
        token.cpu()
        times.append(time.perf_counter() - begin)
    return float(sorted(times[_WARM_UP:])[_STEPS // 2])


def _context(model: Any, forward: Any, batch: int, prompt: int) -> float:
    import torch
    from transformers import StaticCache

    ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device=model.device)
    cache = StaticCache(config=model.config, max_cache_len=prompt)
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        _step(forward, ids, cache, 0)[:, -1].argmax(-1).cpu()
        times.append(time.perf_counter() - begin)
        cache.reset()
    return float(sorted(times[1:])[_REPEATS // 2])


def _step(forward: Any, ids: Any, cache: Any, position: int) -> Any:
    """Logits of the last token. Versions of transformers differ in what they want to be told."""
    import torch

    positions = torch.arange(position, position + ids.shape[1], device=ids.device)
    target = getattr(forward, "_torchdynamo_orig_callable", forward)
    accepted = inspect.signature(target).parameters
    cache_name = "cache" if "cache" in accepted else "past_key_values"
    given = {"input_ids": ids, cache_name: cache, "use_cache": True, "position_ids": positions[None],
             "cache_position": positions, "logits_to_keep": 1}
    return forward(**{name: value for name, value in given.items() if name in accepted}).logits
