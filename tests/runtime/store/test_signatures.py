"""Statements about engines, their signatures, and what a policy lets through."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError
from ingot.runtime.executor import loading
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.program import Program
from ingot.runtime.store import attestation, provenance
from ingot.runtime.store.attestation import BadKey, private_key, public_key, sign, verify
from ingot.runtime.store.policy import EngineRefused, LoadPolicy
from ingot.runtime.store.store import Store
from tests.runtime.engine_sample import MANIFEST_FIELDS
from tests.runtime.store.samples import add, engine, hash_of

pytest.importorskip("cryptography")
RECIPE = {"name": "tiny", "target": "cpu:x86-64-v3", "precision": "fp32", "max_seq_len": 128}


def write_key(folder: Path, name: str) -> tuple[str, str]:
    """Paths of a private key and its public half."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return str(private), str(public)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    return write_key(tmp_path, "ours")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = {**MANIFEST_FIELDS["model"], "checkpoint_sha256": "1" * 64, "license": "Apache-2.0"}
    return engine(tmp_path / "x.engine", model=model, recipe=RECIPE,
                  toolchain={"c_compiler": "zig 0.17.1 (clang version 22.1.8)", "torch": "2.13.0"})


def sign_file(path: Path, key: str) -> list[bytes]:
    """Signs an engine file as `ingot engines sign` does; the envelopes."""
    with EngineFile.open(path) as file:
        statements = provenance.statements(file.manifest, file.hash)
    envelopes = [sign(statement, private_key(key)) for statement in statements]
    attestation.add(Path(f"{path}.intoto.jsonl"), envelopes)
    return envelopes


def check(path: Path, *keys: str, hashes: tuple[str, ...] = ()) -> None:
    with EngineFile.open(path) as file:
        LoadPolicy.of(list(hashes), list(keys)).check(file, Path(f"{path}.intoto.jsonl"))


def test_what_the_statements_say(path: Path) -> None:
    with EngineFile.open(path) as file:
        slsa, bom = provenance.statements(file.manifest, file.hash)
        assert slsa["_type"] == bom["_type"] == "https://in-toto.io/Statement/v1"
        assert slsa["subject"] == bom["subject"] == [
            {"name": "tiny.cpu:x86-64-v3.fp32.engine", "digest": {"sha256": file.hash}}]
    definition = slsa["predicate"]["buildDefinition"]
    assert slsa["predicateType"] == "https://slsa.dev/provenance/v1"
    assert definition["externalParameters"] == RECIPE
    assert definition["resolvedDependencies"][0] == {
        "name": "tiny", "digest": {"sha256": "1" * 64}, "annotations": {
            "architecture": "TinyForCausalLM", "config_sha256": "0" * 64, "license": "Apache-2.0"}}
    tools = ["pkg:pypi/ziglang@0.17.1", "pkg:pypi/ingot-llm@0.1.0", "pkg:pypi/torch@2.13.0"]
    assert [tool["uri"] for tool in definition["resolvedDependencies"][1:]] == tools
    assert (bom["predicate"]["bomFormat"], bom["predicate"]["specVersion"]) == ("CycloneDX", "1.6")
    assert [tool["purl"] for tool in bom["predicate"]["components"]] == tools
    assert bom["predicate"]["components"][0]["description"] == "clang version 22.1.8"


def test_signing_twice_gives_the_same_bytes(path: Path, keys: tuple[str, str]) -> None:
    assert sign_file(path, keys[0]) == sign_file(path, keys[0])
    assert len(attestation.read(Path(f"{path}.intoto.jsonl"))) == 2


def test_openssl_agrees(path: Path, keys: tuple[str, str], tmp_path: Path) -> None:
    """The signature is one over DSSE's encoding of the payload, by the key in the file."""
    envelope = json.loads(sign_file(path, keys[0])[0])
    payload = base64.b64decode(envelope["payload"])
    (tmp_path / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    (tmp_path / "message").write_bytes(
        b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload)
    try:
        done = subprocess.run(["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys[1], "-rawin", "-in",
                               tmp_path / "message", "-sigfile", tmp_path / "sig"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert done.returncode == 0, done.stderr


def test_signed_by_a_required_key(path: Path, keys: tuple[str, str], tmp_path: Path) -> None:
    sign_file(path, keys[0])
    check(path)
    check(path, keys[1])
    check(path, write_key(tmp_path, "other")[1], keys[1])
    check(path, keys[1], hashes=("0" * 64, hash_of(path)))


def test_refused(path: Path, keys: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="is not signed"):
        check(path, keys[1])
    sign_file(path, write_key(tmp_path, "other")[0])
    with pytest.raises(EngineRefused, match=r"none of the 2 signed statements is a provenance .* by a required key"):
        check(path, keys[1])
    with pytest.raises(EngineRefused, match=f"has the hash {hash_of(path)}; required is {'0' * 64}"):
        check(path, hashes=("0" * 64,))
    sign_file(path, keys[0])
    with pytest.raises(EngineRefused, match="required is"):
        check(path, keys[1], hashes=("0" * 64,))


def test_the_signature_of_another_engine_does_not_count(path: Path, keys: tuple[str, str], tmp_path: Path) -> None:
    other = engine(tmp_path / "other.engine", b"other")
    attestation.add(Path(f"{path}.intoto.jsonl"), sign_file(other, keys[0]))
    with pytest.raises(EngineRefused):
        check(path, keys[1])


def test_an_sbom_alone_is_no_provenance(path: Path, keys: tuple[str, str]) -> None:
    attestation.add(Path(f"{path}.intoto.jsonl"), sign_file(path, keys[0])[1:])
    Path(f"{path}.intoto.jsonl").write_bytes(sign_file(path, keys[0])[1])
    with pytest.raises(EngineRefused):
        check(path, keys[1])


def envelope_of(payload: Any, kind: str, key: str) -> bytes:
    """A good signature over any payload."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    message = f"DSSEv1 {len(kind)} {kind} {len(data)} ".encode() + data
    return json.dumps({"payloadType": kind, "payload": base64.b64encode(data).decode(), "signatures": [
        {"sig": base64.b64encode(private_key(key).sign(message)).decode()}]}).encode()


def test_malformed_envelopes_are_no_statements(path: Path, keys: tuple[str, str]) -> None:
    ours = (public_key(keys[1]),)
    good = sign_file(path, keys[0])[0]
    assert verify(good, ours) is not None
    parsed = json.loads(good)
    changes: list[dict[str, Any]] = [
        {"payload": base64.b64encode(b"{}").decode()}, {"payload": "*"}, {"payload": 3}, {"payloadType": "text/plain"},
        {"payloadType": None}, {"signatures": []}, {"signatures": None}, {"signatures": [{"sig": "AA=="}]},
        {"signatures": [3]}]
    for change in changes:
        assert verify(json.dumps({**parsed, **change}).encode(), ours) is None, change
    for envelope in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        assert verify(envelope, ours) is None
    statement = json.loads(base64.b64decode(parsed["payload"]))
    kind = attestation.PAYLOAD_TYPE
    assert verify(envelope_of(statement, kind, keys[0]), ours) == statement
    wrong: list[tuple[Any, str]] = [(statement, "text/plain"), ({**statement, "_type": "x"}, kind), ([1], kind),
                                    (b"{", kind), (b"[" * 100_000, kind)]
    for payload, payload_type in wrong:
        assert verify(envelope_of(payload, payload_type, keys[0]), ours) is None
    for subject in (None, "x", [], [3], [{"digest": None}], [{"digest": {"sha256": "0" * 64}}]):
        assert not attestation.is_about({"subject": subject}, "1" * 64)


def test_keys_of_other_kinds(tmp_path: Path, keys: tuple[str, str]) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    key = generate_private_key(SECP256R1())
    private, public = tmp_path / "ec.pem", tmp_path / "ec.pub"
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    for load, path, message in ((private_key, str(private), "expected an Ed25519 key"),
                                (public_key, str(public), "expected an Ed25519 key"),
                                (private_key, keys[1], "cannot read a private key"),
                                (public_key, keys[0], "cannot read a public key"),
                                (public_key, "/nowhere", "No such file")):
        with pytest.raises(BadKey, match=message):
            load(path)
    with pytest.raises(RequestError, match="expected all 64"):
        LoadPolicy.of(["abc"], [])


@pytest.mark.parametrize("in_store", [False, True])
def test_nothing_of_a_refused_engine_is_loaded(mock_path: Path, keys: tuple[str, str], tmp_path: Path, in_store: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    real = loading.load_program

    def load_program(*arguments: Any, **options: Any) -> Program:
        loaded.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(loading, "load_program", load_program)
    store = Store(tmp_path / "store")
    reference: str | Path = add(store, mock_path, "prod") and "prod" if in_store else mock_path
    hash = hash_of(mock_path)

    def load(*key_paths: str, hashes: tuple[str, ...] = ()) -> None:
        options = EngineOptions(kv_cache_tokens=96, num_workers=1, store=str(store.folder),
                                policy=LoadPolicy.of(list(hashes), list(key_paths)))
        LoadedEngine(reference, options).close()

    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for refused in (lambda: load(keys[1]), lambda: load(hashes=("0" * 64,))):
        with pytest.raises(EngineRefused):
            refused()
    assert loaded == [] and len(list(Path("/proc/self/fd").iterdir())) == num_open
    with EngineFile.open(mock_path) as file:
        statements = provenance.statements(file.manifest, hash)
    if in_store:
        store.add_attestations(hash, [sign(statement, private_key(keys[0])) for statement in statements])
        load(keys[1], hashes=(hash,))
        assert loaded == [1]
