"""Ingot's driver: Engine in process."""

import time

from job import Result, context_rate, give, rate_after_first, read_job


def main() -> None:
    job = read_job()
    start = time.perf_counter()
    from ingot.runtime.engine import Engine
    from ingot.runtime.sampling import SamplingParams

    engine = Engine.load(job.model, num_workers=job.threads)
    result = Result(load_s=time.perf_counter() - start)

    def params(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, ignore_eos=True)

    def generate(prompt: list[int], count: int) -> tuple[list[float], list[int]]:
        times, ids = [], []
        for piece in engine.stream(prompt, params(count)):
            times.append(time.perf_counter())
            ids.append(piece.token_id)
        return times, ids

    generate(job.request_prompts[0], 16)
    times, result.answer = generate(job.generation_prompt, job.new_tokens)
    result.generation = rate_after_first(times)
    result.context = context_rate(job.context_prompts, lambda prompt: generate(prompt, 1))
    start = time.perf_counter()
    answers = engine.generate(job.request_prompts, params(job.new_tokens))
    result.requests = sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - start)
    give(result)


main()
