"""transformers, eager attention and float32: the reference that everybody has."""

import time

from job import Result, measure, read_job


def main() -> None:
    job = read_job()
    start = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="eager")
    result = Result(load_s=time.perf_counter() - start)

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        ids, clock = torch.tensor(prompts), Clock()
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                                do_sample=False, streamer=clock if len(prompts) == 1 else None)
        return clock.times[1:], answer[0, ids.shape[1] :].tolist()

    with torch.inference_mode():
        measure(job, result, run)


main()
