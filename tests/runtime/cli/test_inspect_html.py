"""ingot inspect --html: one page that holds what the other views tell, and needs nothing else."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.runtime.cli import main
from ingot.runtime.cli.inspect import VIEWS
from ingot.runtime.cli.inspect_html import Buffer, arena_buffers
from ingot.runtime.cli.inspect_html import _bucket as told
from ingot.runtime.engine_file import EngineFile
from tests.runtime import mock_engine, mock_gpu_engine

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """text: all that is shown; attributes: (tag, name, value) of every one; raises where tags don't match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.attributes = "", list[tuple[str, str, str | None]]()
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


@pytest.fixture(params=["cpu", "gpu"])
def engine(request: pytest.FixtureRequest, mock_path: Path, tmp_path: Path) -> Path:
    return mock_path if request.param == "cpu" else mock_gpu_engine.write_engine(tmp_path / "gpu.engine")


def write(engine: Path, path: Path) -> str:
    assert main(["inspect", str(engine), "--html", str(path)]) == 0
    return path.read_text("utf-8")


def test_it_holds_all_that_the_views_tell(engine: Path, tmp_path: Path) -> None:
    page = Page(write(engine, tmp_path / "engine.html"))
    with EngineFile.open(engine) as opened:
        plan, manifest = opened.plan, opened.manifest
        assert opened.hash in page.text and manifest["model"]["architecture"] in page.text
    for weight in plan["weights"].values():
        assert weight["label"] in page.text
    for bucket in plan["buckets"]:
        assert f"up to {bucket['tokens']} tokens: {len(bucket['launches'])} launches" in page.text
        assert all(launch["kernel"] in page.text for launch in bucket["launches"])


def test_it_asks_nothing_of_others(engine: Path, tmp_path: Path) -> None:
    page = Page(write(engine, tmp_path / "engine.html"))
    assert not [entry for entry in page.attributes if entry[1] in ("src", "href", "action")]
    assert "default-src 'none'" in next(value or "" for tag, name, value in page.attributes if (tag, name) ==
                                        ("meta", "content") and "default-src" in (value or ""))


def test_names_are_text(mock_code: bytes, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    model = mock_engine.manifest()["model"] | {"name": evil}
    engine = mock_engine.write_engine(tmp_path / "x.engine", mock_code, model=model)
    text = write(engine, tmp_path / "x.html")
    assert evil not in text and evil in Page(text).text


def test_what_is_alive_together_lies_apart(engine: Path) -> None:
    with EngineFile.open(engine) as opened:
        limits = opened.manifest["limits"]
        for bucket in opened.plan["buckets"]:
            found = arena_buffers(bucket, limits["max_batch_size"])
            assert found
            for one in found:
                assert 0 <= one.begin <= one.end < len(bucket["launches"])
                assert one.offset >= 0 and one.offset + one.num_bytes <= bucket["arena_bytes"]
                for other in found:
                    together = one.begin < other.begin < one.end
                    apart = (one.offset >= other.offset + other.num_bytes or
                             other.offset >= one.offset + one.num_bytes)
                    assert not together or apart, (one, other)


def test_a_buffer_lives_from_its_launch_to_its_last_reader() -> None:
    def launch(reads: int | None, writes: int, name: str) -> dict[str, Any]:
        source = [] if reads is None else [["arena", reads]]
        value = {"arg": len(source), "shape": ["2*T", 4], "dtype": "bf16"}
        return {"args": [*source, ["arena", writes]], "writes": {name: value}}

    bucket = {"tokens": 4, "outputs": {"logits": {"offset": 0}},
              "launches": [launch(None, 0, "a"), launch(0, 64, "b"), launch(0, 128, "c"), launch(64, 0, "d")]}
    assert sorted(arena_buffers(bucket, 4), key=lambda buffer: buffer.name) == [
        Buffer("a", 0, 2, 0, 64), Buffer("b", 1, 3, 64, 64), Buffer("c", 2, 2, 128, 64), Buffer("d", 3, 3, 0, 64)]


def test_what_tensor_maps_reach_counts(tmp_path: Path) -> None:
    with EngineFile.open(mock_gpu_engine.write_engine(tmp_path / "gpu.engine")) as engine:
        plan = engine.plan
    bucket = plan["buckets"][-1]
    assert any(arg[0] == "tensormap" for arg in bucket["launches"][1]["args"])
    for each in plan["buckets"]:
        assert told(each, plan["weights"], {})["launches"][1]["weight_bytes"] == mock_gpu_engine.MATRIX.nbytes
    layers = VIEWS["layers"][0](SimpleNamespace(plan={**plan, "buckets": [bucket]}))  # type: ignore[arg-type]
    assert {weight["label"] for layer in layers for weight in layer["weights"]} == {
        weight["label"] for weight in plan["weights"].values()}
    bucket["launches"][1]["args"] = [arg for arg in bucket["launches"][1]["args"] if arg[0] != "arena"]
    bucket["launches"][1]["writes"] = {}
    assert next(buffer for buffer in arena_buffers(bucket, 16) if buffer.name == "x").end == 1


def test_a_file_that_is_no_page_stays(mock_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, path = mock_path.read_bytes(), tmp_path / "x.html"
    assert main(["inspect", str(mock_path), "--html", str(mock_path)]) == 2
    assert "it is not replaced" in capsys.readouterr().err and mock_path.read_bytes() == engine
    path.touch()
    assert write(mock_path, path) == write(mock_path, path)


@pytest.mark.parametrize("target", ["folder", "file/engine.html", "nowhere/engine.html"])
def test_where_no_file_can_be(mock_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["inspect", str(mock_path), "--html", str(tmp_path / target)]) == 2
    told = capsys.readouterr().err
    assert "--html" in told and "Traceback" not in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
