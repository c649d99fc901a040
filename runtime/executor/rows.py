"""The rows of logits of a step: what is to be done with each, and what each says of its token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import TokenLogprobs

if TYPE_CHECKING:
    from ..sampling_inputs import Owner, StepOutputs
    from ..scheduler import StepPlan
    from .answer import Answer


def rows_of(plan: StepPlan[Answer]) -> list[Owner]:
    """What is to be done with each row of logits."""
    rows: list[Owner] = []
    for answer, count, num_logits in plan.entries:
        if answer.draft:
            rows.append(answer.sampling)
            rows += answer.sampling.ahead(answer.draft)
        elif num_logits == 1 and not answer.prompt_logits:
            rows.append(answer.sampling)
        elif num_logits:
            end = answer.num_computed + count
            rows += answer.rows(end - num_logits, end)
    return rows


def run_logprobs(answer: Answer, row: int, count: int, outputs: StepOutputs) -> list[TokenLogprobs] | None:
    """Of the tokens that a step with a draft has given: from `row` on."""
    wanted = answer.running.request.params.logprobs
    return None if wanted is None else [_row(outputs, place, wanted) for place in range(row, row + count)]


def logprobs_of(answer: Answer, begin: int, end: int, outputs: StepOutputs) -> list[TokenLogprobs] | None:
    """Of rows begin to end: those of the prompt's tokens are kept, that of the answer's is returned."""
    params = answer.running.request.params
    if not answer.num_pending:
        end -= 1
    if answer.prompt_logprobs is not None and params.prompt_logprobs is not None:
        answer.prompt_logprobs += [_row(outputs, row, params.prompt_logprobs) for row in range(begin, end)]
    return None if answer.num_pending or params.logprobs is None else [_row(outputs, end, params.logprobs)]


def _row(outputs: StepOutputs, row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(int(outputs.tokens[row]), float(outputs.logprobs[row]), int(outputs.ranks[row]),
                         outputs.top_ids[row, :count].tolist(), outputs.top_logprobs[row, :count].tolist())
