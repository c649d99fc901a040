"""ONNX Runtime GenAI; the number of threads stands in its genai_config.json."""

import time

from job import Result, context_rate, give, rate_after_first, read_job


def main() -> None:
    job = read_job()
    start = time.perf_counter()
    import numpy as np
    import onnxruntime_genai as genai

    model = genai.Model(job.model)
    result = Result(load_s=time.perf_counter() - start)

    def run(prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        length = len(prompts[0]) + count
        params = genai.GeneratorParams(model)
        params.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        times: list[float] = []
        while not generator.is_done() and len(times) < count:
            generator.generate_next_token()
            times.append(time.perf_counter())
        return times, [int(token) for token in generator.get_sequence(0)[len(prompts[0]) :]]

    run([job.request_prompts[0]], 8)
    times, result.answer = run([job.generation_prompt], job.new_tokens)
    result.generation = rate_after_first(times)
    result.context = context_rate(job.context_prompts, lambda prompt: run([prompt], 1))
    start = time.perf_counter()
    run(job.request_prompts, job.new_tokens)
    result.requests = len(job.request_prompts) * job.new_tokens / (time.perf_counter() - start)
    give(result)


main()
