"""CTranslate2, int8."""

import json
import time
from pathlib import Path

from job import Result, measure, read_job


def main() -> None:
    job = read_job()
    start = time.perf_counter()
    import ctranslate2

    generator = ctranslate2.Generator(job.model, device="cpu", compute_type="int8", intra_threads=job.threads)
    result = Result(load_s=time.perf_counter() - start)
    words = json.loads(Path(job.model, "vocabulary.json").read_text())
    number = {word: index for index, word in enumerate(words)}

    def run(prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        times: list[float] = []
        ids: list[int] = []
        tokens = [[words[token] for token in prompt] for prompt in prompts]
        if len(prompts) == 1:
            for step in generator.generate_tokens(tokens[0], max_length=count, min_length=count, sampling_topk=1):
                times.append(time.perf_counter())
                ids.append(number[step.token])
        else:
            generator.generate_batch(tokens, max_length=count, min_length=count, sampling_topk=1,
                                     include_prompt_in_result=False)
        return times, ids

    measure(job, result, run)


main()
