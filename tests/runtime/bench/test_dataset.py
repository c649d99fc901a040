"""Requests from JSON lines, as trtllm-bench reads them."""

from pathlib import Path

import pytest

from ingot.runtime.bench.dataset import read_dataset
from ingot.runtime.bench.workload import Session, Turn
from ingot.runtime.errors import RequestError


def test_texts_and_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"task_id": 7, "prompt": "Hello", "output_tokens": 5}\n\n'
                    '{"task_id": "x", "input_ids": [1, 2], "output_tokens": 3}\n')
    assert read_dataset(str(path), 10, 10) == [Session("7", (Turn("Hello", 5),)), Session("x", (Turn([1, 2], 3),))]


@pytest.mark.parametrize(("line", "message"), [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[]", "expected an object"),
    ('{"prompt": "a", "output_tokens": 1, "x": 1}', "unknown field 'x'"),
    ('{"output_tokens": 1}', "either prompt or input_ids"),
    ('{"prompt": "a", "input_ids": [1], "output_tokens": 1}', "either prompt or input_ids"),
    ('{"prompt": "", "output_tokens": 1}', "expected a text"),
    ('{"prompt": "a"}', "output_tokens"),
    ('{"prompt": "a", "output_tokens": true}', "output_tokens"),
    ('{"input_ids": [], "output_tokens": 1}', "list of token ids"),
    ('{"input_ids": [1, -1], "output_tokens": 1}', "-1"),
    ('{"input_ids": [1, 10], "output_tokens": 1}', "10"),
    ('{"input_ids": [1, 2, 3], "output_tokens": 8}', "3 \\+ 8 tokens"),
])
def test_wrong_lines_are_told_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(RequestError, match=f"line 2: .*{message}"):
        read_dataset(str(path), 10, 10)


def test_files_that_are_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        read_dataset(str(tmp_path / "missing"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(RequestError, match="no requests"):
        read_dataset(str(tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="cannot read"):
        read_dataset(str(tmp_path / "binary"))
