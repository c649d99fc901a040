"""The devices that run engines, one module each; `load_program` picks the one that an engine was built for."""

from ..engine_file import EngineFile
from ..program import EngineMismatch, Program


def load_program(engine: EngineFile, kv_cache_tokens: int, num_workers: int | None = None,
                 host_kv_tokens: int = 0) -> Program:
    """Loads the engine's code and weights, with a KV cache of at least `kv_cache_tokens` tokens.

    num_workers: threads of a CPU engine, by default one a core that this process may use.
    host_kv_tokens: room for blocks that are kept in the host's memory.
    Raises EngineMismatch if the engine is for another machine, EngineFormatError if its plan is wrong, WorkFailed.
    """
    target = engine.manifest["target"]["name"]
    if target.partition(":")[0] == "cpu":
        from .cpu import CpuProgram

        return CpuProgram(engine, kv_cache_tokens, num_workers, host_kv_tokens)
    raise EngineMismatch(f"{engine.path} was built for {target}; this version of the runtime runs engines for: cpu")
