"""The CI files of docs/ci: every command exists with its options, and the jobs do what docs/ci.md says."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.runtime.cli import COMMON_FLAGS, VERBS
from ingot.runtime.store.store import Store

DOCS = Path(__file__).parents[1] / "docs"
FILES = {"github": DOCS / "ci/github-actions.yml", "gitlab": DOCS / "ci/gitlab-ci.yml"}
_COMMAND = re.compile(r"(?:^|[;&|`]\s*|\bdo\s+|\bthen\s+)ingot\s+([^;&|`\n]*)")


def scripts(path: Path) -> dict[str, list[str]]:
    """Job -> its shell commands, in order."""
    parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "jobs" in parsed:
        return {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in parsed["jobs"].items()}
    return {name: job["script"] for name, job in parsed.items() if isinstance(job, dict) and "script" in job}


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where, words behind `ingot`) of each command in the two files and the page."""
    texts = {name: "\n".join(command for script in scripts(path).values() for command in script)
             for name, path in FILES.items()}
    texts["ci.md"] = (DOCS / "ci.md").read_text(encoding="utf-8")
    for name, text in texts.items():
        lines = [line.strip().lstrip("|").strip() for line in text.splitlines()]
        for match in (match for line in lines for match in _COMMAND.finditer(line)):
            words = shlex.split(match[1], comments=True)
            yield name, [word for word in words if word != "…"] if "…" not in words[-1:] else words[:-1]


ALL = [pytest.param(where, words, id=f"{where}: {' '.join(words)[:60]}") for where, words in commands()]


def test_the_commands_are_found() -> None:
    found = [(where, tuple(words[:2])) for where, words in commands()]
    for where in FILES:
        for expected in (("build", "--recipe"), ("verify", "$file"), ("engines", "add"), ("engines", "sign"),
                         ("engines", "push"), ("engines", "rollback")):
            assert (where, expected) in found
    assert len([where for where, _ in found if where == "ci.md"]) >= 6


@pytest.mark.parametrize(("where", "words"), ALL)
def test_each_command_exists_with_its_options(where: str, words: list[str]) -> None:
    verb, *rest = words
    assert verb in VERBS
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag in COMMON_FLAGS:
        parser.add_argument(flag, action="store_true")
    importlib.import_module(VERBS[verb].module).add_arguments(parser)
    if where == "ci.md":  # a table names a command without all that it needs
        options = {option for action in _actions(parser, rest) for option in action.option_strings}
        assert {word for word in rest if word.startswith("-")} <= options, words
        return
    try:
        parser.parse_args(rest)
    except (SystemExit, argparse.ArgumentError) as error:
        pytest.fail(f"ingot {' '.join(words)}: {error}")


def _actions(parser: argparse.ArgumentParser, words: list[str]) -> list[argparse.Action]:
    """The options of a parser and of the verb within that the words name."""
    actions = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
            actions += _actions(action.choices[words[0]], words[1:])
    return actions


def test_what_the_files_use_is_pinned() -> None:
    version = re.search(r'^version = "(.+)"', (DOCS.parent / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    github, gitlab = (yaml.safe_load(path.read_text()) for path in FILES.values())
    assert github["env"]["INGOT_VERSION"] == gitlab["variables"]["INGOT_VERSION"] == version[1]
    uses = [step["uses"] for job in github["jobs"].values() for step in job["steps"] if "uses" in step]
    assert uses and all(re.fullmatch(r"actions/[a-z-]+@v\d+", use) for use in uses)
    for recipe in gitlab["build-engines"]["parallel"]["matrix"][0]["RECIPE"]:
        assert (DOCS.parent / recipe).is_file()


RECIPE = """\
model: {checkpoint}
name: tiny
limits: {{max_batch_size: 2, max_num_tokens: 8}}
calibrate: false
builds:
  - targets: [cpu:x86-64-v3]
    precisions: [int8, fp32]
{more}"""


@dataclass
class Project:
    """A repository with a recipe, its bare origin, and what the jobs are given."""

    folder: Path
    origin: Path
    registry: Path
    environment: dict[str, str]

    def write_recipe(self, checkpoint: Path, more: str = "") -> None:
        (self.folder / "recipes").mkdir(exist_ok=True)
        (self.folder / "recipes/tiny.yaml").write_text(RECIPE.format(checkpoint=checkpoint, more=more))

    def run(self, kind: str, job: str) -> subprocess.CompletedProcess[str]:
        """The job's commands but those that install, in one shell or one each, as the two systems do."""
        script = [command for command in scripts(FILES[kind])[job] if "pip install" not in command]
        pieces = script if kind == "github" else ["\n".join(script)]
        for piece in pieces:
            done = subprocess.run(["bash", "-e", "-c", piece], cwd=self.folder, env=self.environment,
                                  capture_output=True, text=True)
            if done.returncode:
                return done
        return done

    def git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self.folder, env=self.environment, check=True,
                              capture_output=True, text=True).stdout

    def proposed(self, branch: str) -> Store | None:
        """The lock file of a branch at the origin, in a store of its own; None if there is no such branch."""
        done = subprocess.run(["git", "--git-dir", str(self.origin), "show", f"{branch}:engines/engines.lock"],
                              capture_output=True)
        if done.returncode:
            return None
        folder = self.folder.parent / f"checkout of {branch.replace('/', ' ')}"
        folder.mkdir(exist_ok=True)
        (folder / "engines.lock").write_bytes(done.stdout)
        return Store(folder)


@pytest.fixture
def project(tmp_path: Path, speaking_checkpoint: Path) -> Project:
    folder, origin, tools = tmp_path / "project", tmp_path / "origin.git", tmp_path / "bin"
    registry = tmp_path / "registry"
    tools.mkdir()
    for name, text in (("ingot", f'exec {shlex.quote(sys.executable)} -m ingot.runtime.cli "$@"'),
                       ("gh", f'echo "$@" >> {shlex.quote(str(tmp_path / "gh.log"))}; [ "$2" != view ]')):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("INGOT_", "GIT_", "CI_"))},
        "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1",
        "INGOT_CACHE": str(tmp_path / "cache"), "INGOT_USER": "ada", "RECIPE": "recipes/tiny.yaml",
        "REGISTRY": str(registry), "WHY": "commit 1234", "RUNNER_TEMP": str(tmp_path / "bin"), "CI_COMMIT_SHA": "1234",
        "CI_DEFAULT_BRANCH": "main", "CI_SERVER_HOST": "gitlab.example.com", "CI_PROJECT_PATH": "team/engines",
        "CI_PIPELINE_ID": "7", "ENGINES_TOKEN": "secret"}
    for arguments in (["init", "-q", "--bare", "-b", "main", str(origin)], ["init", "-q", "-b", "main", str(folder)]):
        subprocess.run(["git", *arguments], check=True, env=environment)
    made = Project(folder, origin, registry, environment)
    made.git("--git-dir", str(origin), "config", "receive.advertisePushOptions", "true")
    made.git("remote", "add", "origin", str(origin))
    made.git("config", f"url.{origin}.insteadOf", "https://engines:secret@gitlab.example.com/team/engines.git")
    made.git("config", "user.name", "ada")
    made.git("config", "user.email", "ada@example.com")
    made.write_recipe(speaking_checkpoint)
    (folder / ".gitignore").write_text("engines/*\n!engines/engines.lock\nbuild/\n")
    made.git("add", ".")
    made.git("commit", "-qm", "a recipe")
    made.git("push", "-q", "origin", "main")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "build", "rollback"), [
    ("github", "build", "rollback"), ("gitlab", "build-engines", "rollback-engine")])
def test_the_jobs(kind: str, build: str, rollback: str, project: Project, speaking_checkpoint: Path,
                  tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)], check=True, capture_output=True)
    project.environment["INGOT_SIGNING_KEY"] = str(key)  # GitLab's is a file, GitHub's the text
    project.environment["SIGNING_KEY"] = key.read_text()

    done = project.run(kind, build)
    assert done.returncode == 0, done.stdout + done.stderr
    store = project.proposed("engines/tiny")
    assert store is not None
    names = {name: move.hash for name, move in store.lock.now().items()}
    assert names.keys() == {"tiny.cpu-x86-64-v3.int8", "tiny.cpu-x86-64-v3.fp32"}
    assert all(move.by == "ada" and move.why == "commit 1234" for move in store.lock.now().values())
    if kind == "github":
        assert "pr create --head engines/tiny" in (tmp_path / "gh.log").read_text()
    # What the lock file names can be had from the registry, signed.
    public = tmp_path / "key.pub"
    subprocess.run(["openssl", "pkey", "-in", str(key), "-pubout", "-out", str(public)], check=True)
    ingot(project, "engines", "pull", str(project.registry), "--store", str(store.folder))
    ingot(project, "engines", "verify", "--store", str(store.folder), "--key", str(public))

    # The same again on the merged branch: the same engines, so nothing is proposed.
    project.git("checkout", "-q", "main")
    project.git("merge", "-q", "engines/tiny")
    project.git("push", "-q", "origin", "main", ":engines/tiny")
    done = project.run(kind, build)
    assert done.returncode == 0 and "nothing changes" in done.stdout and project.proposed("engines/tiny") is None

    # Other weights: the names move, and the rollback moves one back.
    changed = other_weights(speaking_checkpoint, tmp_path)
    project.write_recipe(changed)
    assert project.run(kind, build).returncode == 0
    store = project.proposed("engines/tiny")
    assert store is not None and all(move.hash != names[name] for name, move in store.lock.now().items())
    project.git("checkout", "-q", "main")
    project.git("merge", "-q", "engines/tiny")
    project.environment |= {"NAME": "tiny.cpu-x86-64-v3.int8", "ROLLBACK": "tiny.cpu-x86-64-v3.int8"}
    done = project.run(kind, rollback)
    assert done.returncode == 0, done.stderr
    store = project.proposed("engines/rollback-tiny.cpu-x86-64-v3.int8")
    assert store is not None
    now = store.lock.now()
    assert now["tiny.cpu-x86-64-v3.int8"].hash == names["tiny.cpu-x86-64-v3.int8"]
    assert now["tiny.cpu-x86-64-v3.fp32"].hash != names["tiny.cpu-x86-64-v3.fp32"]


@pytest.mark.slow
def test_a_failing_gate_ends_the_job(project: Project, speaking_checkpoint: Path) -> None:
    project.write_recipe(speaking_checkpoint, "    quality: {min_top1_agreement: 1.0, max_perplexity_increase: 0}\n")
    done = project.run("github", "build")
    assert done.returncode == 1 and "not good enough" in done.stdout + done.stderr
    assert not project.registry.exists() and project.proposed("engines/tiny") is None


def ingot(project: Project, *arguments: str) -> None:
    done = subprocess.run(["ingot", *arguments], env=project.environment, cwd=project.folder, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


def other_weights(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with another last norm."""
    import shutil

    import numpy as np
    from safetensors.numpy import load_file, save_file

    changed: Any = folder / "changed" / checkpoint.name
    shutil.copytree(checkpoint, changed)
    tensors = load_file(changed / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + np.float32(0.5)},
              changed / "model.safetensors", {"format": "pt"})
    return Path(changed)
