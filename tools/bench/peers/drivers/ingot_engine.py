"""Ingot's driver: Engine in process."""

import time

from job import Result, measure, read_job


def main() -> None:
    job = read_job()
    start = time.perf_counter()
    from ingot.runtime.engine import Engine
    from ingot.runtime.sampling import SamplingParams

    engine = Engine.load(job.model, num_workers=job.threads)
    result = Result(load_s=time.perf_counter() - start)

    def run(prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        if len(prompts) > 1:
            engine.generate(prompts, params)
            return [], []
        times, ids = [], []
        for piece in engine.stream(prompts[0], params):
            times.append(time.perf_counter())
            ids.append(piece.token_id)
        return times, ids

    measure(job, result, run)


main()
