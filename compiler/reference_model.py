"""The checkpoint in Hugging Face's own implementation: float32 on the CPU, what engines are held against."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.runtime.errors import RequestError
from ingot.runtime.host import available_cores

from .checkpoint.open import open_checkpoint
from .checkpoint.quantized import read_quantized

if TYPE_CHECKING:
    import torch


class ReferenceModel:
    """Loaded once; every method runs it without gradients, with eager attention."""

    def __init__(self, source: str) -> None:
        """source: as `ingot build` takes it. Raises CheckpointError, WorkFailed."""
        import torch
        import transformers

        from .importer.importer import load_model

        # Progress bars and hints of a library that the user did not call.
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        checkpoint = open_checkpoint(source)
        path = checkpoint.path
        torch.set_num_threads(available_cores())
        if read_quantized(checkpoint) is not None:
            # transformers would want each method's own library, and a GPU for most of them.
            self.model: Any = load_model(checkpoint)
            return
        folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
            local_files_only=True, **options).eval()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """[T, vocab_size] f32."""
        return self.traced(token_ids, ())[0]

    def traced(self, token_ids: Sequence[int], modules: Collection[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The logits, and what the named modules give: the first output of each, as f32."""
        import torch

        found: dict[str, np.ndarray] = {}

        def keep(name: str) -> Any:
            def hook(module: torch.nn.Module, inputs: object, output: Any) -> None:
                found[name] = (output[0] if isinstance(output, tuple) else output).float().numpy().copy()
            return hook

        with ExitStack() as stack, torch.inference_mode():
            for name in modules:
                stack.enter_context(self._module(name).register_forward_hook(keep(name)))
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits
        return logits[0].float().numpy(), found

    def responses(self, token_ids: Sequence[int], values: Mapping[str, np.ndarray],
                  ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """What each layer makes of another program's hidden states, so that its own error shows.

        values: name of a module -> what the other program computed for its output, [T, H], in the order of execution.
        Returns, for every module whose input is the output of the one before: (that input, the module's output of it).
        """
        import torch

        last: list[Any] = [None, None]  # the output of the module before, and what takes its place
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        given: dict[str, np.ndarray] = {}

        def enter(name: str) -> Any:
            def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if last[0] is None or last[1] is None:
                    return None
                taken = torch.tensor(last[1].reshape(last[0].shape))
                if args and args[0] is last[0]:
                    args = (taken, *args[1:])
                elif kwargs.get("hidden_states") is last[0]:
                    kwargs = kwargs | {"hidden_states": taken}
                else:
                    return None
                given[name] = last[1]
                return args, kwargs
            return hook

        def leave(name: str) -> Any:
            def hook(module: torch.nn.Module, args: object, output: Any) -> None:
                out = output[0] if isinstance(output, tuple) else output
                if name in given:
                    found[name] = given[name], out.float().numpy().reshape(len(token_ids), -1).copy()
                whole = values[name].size == out.numel()
                last[:] = out, np.ascontiguousarray(values[name], np.float32) if whole else None
            return hook

        with ExitStack() as stack, torch.inference_mode():
            for name in values:
                stack.enter_context(self._module(name).register_forward_pre_hook(enter(name), with_kwargs=True))
                stack.enter_context(self._module(name).register_forward_hook(leave(name)))
            self.model(torch.tensor([list(token_ids)]), use_cache=False)
        return found

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[tuple[int, float]]:
        """The most probable token, again and again, and by how much its logit is above the second best."""
        import torch

        tokens, cache = list(token_ids), None
        with torch.inference_mode():
            for _ in range(num_tokens):
                # A model that returns no cache computes everything again.
                ids = torch.tensor([tokens if cache is None else tokens[-1:]])
                output = self.model(ids, cache=cache, use_cache=True)
                best = output.logits[0, -1].float().topk(2)
                cache = output.get("cache")
                tokens.append(int(best.indices[0]))
                yield tokens[-1], float(best.values[0] - best.values[1])

    def _module(self, name: str) -> torch.nn.Module:
        try:
            module: torch.nn.Module = self.model.get_submodule(name)
        except AttributeError:
            raise RequestError(f"the checkpoint has no module {name}, which the engine was traced at; "
                               "is it the one that the engine was built from?") from None
        return module
