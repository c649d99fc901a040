"""ONNX Runtime GenAI; the number of threads stands in its genai_config.json."""

import time

from job import Result, measure, read_job


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

    measure(job, result, run)


main()
