"""docs/models.md from the rows of tools.coverage."""
from __future__ import annotations

from collections import Counter

from tools.coverage import TOLERANCE, Row

_HEAD = """\
# Models

Every causal-LM class of transformers {version}, each as a small random checkpoint with each kind of layer, imported
from its folder and compared with transformers in fp32 for every token of a text that is longer than any window:
{count} of {total} classes agree to {tolerance:g} (largest difference of the logits, relative to the largest logit).

    python -m tools.coverage rows.jsonl && python -m tools.coverage --report rows.jsonl docs/models.md

"""


def report(rows: list[Row]) -> str:
    import transformers
    agreeing = [row for row in rows if row.status == "agrees"]
    parts = [_HEAD.format(version=transformers.__version__, count=len(agreeing), total=len(rows), tolerance=TOLERANCE)]
    parts.append("## Classes that agree\n\n| model type | class | layers | attention calls | error |\n"
                 "|---|---|---|---|---|\n")
    parts += [f"| {r.type} | {r.model_class} | {r.layers} | {r.attentions} | {r.error:.1e} |\n" for r in agreeing]
    for status, title, text in (
            ("differs", "Classes that differ", "Imported, but the logits are not those of transformers."),
            ("refused", "Classes that are refused", "The reason is what a user of `ingot build` is told."),
            ("failed", "Classes that fail", "A fault of Ingot: no clear error."),
            ("no model", "Classes without a small model", "transformers itself does not build or run the small "
             "configuration that `tools/small_models.py` makes; nothing is known about these.")):
        chosen = [row for row in rows if row.status == status]
        if chosen:
            parts.append(f"\n## {title}\n\n{text}\n\n| model type | class | reason |\n|---|---|---|\n")
            parts += [f"| {r.type} | {r.model_class or '–'} | {_reason(r)} |\n" for r in chosen]
    parts.append("\n## Operators of the imported graphs\n\n| operator | classes |\n|---|---|\n")
    counts = Counter(operator for row in agreeing for operator in row.operators)
    parts += [f"| {operator} | {count} |\n" for operator, count in sorted(counts.items(), key=lambda i: (-i[1], i[0]))]
    return "".join(parts)


def _reason(row: Row) -> str:
    text = f"error {row.error:.1e}" if row.status == "differs" and row.error is not None else row.reason
    return " ".join(text.split()).replace("|", "\\|")[:400]
