"""OpenVINO GenAI's continuous batching, fed with token ids."""

import time

from job import Result, measure, read_job


def main() -> None:
    job = read_job()
    start = time.perf_counter()
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, 2048, 16
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": job.threads})
    result = Result(load_s=time.perf_counter() - start)

    def config(count: int) -> object:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = count
        settings.ignore_eos, settings.do_sample = True, False
        return settings

    def run(prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        handles = [pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config(count))
                   for number, prompt in enumerate(prompts)]
        times: list[float] = []
        ids: list[int] = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if len(handles) == 1 and handles[0].can_read():
                for output in handles[0].read().values():
                    ids += output.generated_ids
                times.append(time.perf_counter())
        return times, ids

    measure(job, result, run)


main()
