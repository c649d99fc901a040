"""push and pull by a registry: only what is missing travels, breaks are survived, wrong bytes are refused, logins."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.store.blobs import BlobMismatch
from ingot.runtime.store.remotes import oci, open_remote, remote
from ingot.runtime.store.store import Store
from ingot.runtime.store.transfer import NameTaken, Transferred, pull, push
from tests.runtime.store.registry import Registry, serve
from tests.runtime.store.samples import SHARED, add, engine, sha256

OWN = b"own weight" * 10_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small parts, short waits, and nobody's real credentials."""
    monkeypatch.setattr(oci, "UPLOAD_BYTES", 30_000)
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.0001)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("INGOT_REGISTRY_USER", raising=False)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serve(Registry()) as registry:
        yield registry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def hash(store: Store, tmp_path: Path) -> str:
    return add(store, engine(tmp_path / "own.engine", OWN), "prod")


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store(tmp_path / "target")


def send(store: Store, registry: Registry, hash: str, name: str | None = None, move: bool = False) -> Transferred:
    with open_remote(registry.url) as remote:
        return push(store, remote, hash, name, move)


def get(store: Store, registry: Registry, reference: str) -> Transferred:
    with open_remote(registry.url) as remote:
        return pull(store, remote, reference)


def test_there_and_back(store: Store, target: Store, registry: Registry, hash: str) -> None:
    sent = send(store, registry, hash, "prod")
    assert (sent.num_sent, sent.num_retries) == (sent.num_blobs, 0)
    for reference in ("prod", hash):
        got = get(target, registry, reference)
        assert got.hash == hash
    assert (got.num_sent, got.sent_bytes) == (0, 0), "the second time, everything is there"
    assert target.engines() == [hash] and target.verify().good
    with target.open(hash) as file:
        assert file.verify()


def test_the_artifact_as_others_see_it(store: Store, registry: Registry, hash: str) -> None:
    send(store, registry, hash, "prod")
    assert sorted(registry.manifests) == sorted([hash, "prod"])
    document = json.loads(registry.manifests["prod"])
    assert document["config"] == {"mediaType": oci.CONFIG_TYPE, "digest": f"sha256:{hash}",
                                  "size": store.manifest_path(hash).stat().st_size}
    assert {layer["annotations"][oci.TITLE]: layer["digest"].removeprefix("sha256:") for layer in document["layers"]} \
        == {name: entry["sha256"] for name, entry in store.manifest(hash)["members"].items()}


def test_only_what_is_missing_travels(store: Store, target: Store, registry: Registry, hash: str,
                                      tmp_path: Path) -> None:
    send(store, registry, hash)
    get(target, registry, hash)
    new = b"new weight" * 5000
    other = add(store, engine(tmp_path / "other.engine", new))
    before = registry.received_bytes
    assert send(store, registry, other).sent_bytes == len(new)
    assert registry.received_bytes - before < len(new) + 8000
    before = registry.sent_bytes
    assert get(target, registry, other).sent_bytes == len(new)
    assert registry.sent_bytes - before < len(new) + 8000
    assert registry.num("PATCH", "uploads") == 4, "the first weight goes in 4 parts, the other in 2, the last by PUT"


@pytest.mark.parametrize("cuts", [[45_000, 10_000, 0, 5_000], [1], [0] * 5])
@pytest.mark.parametrize("forgets", [False, True])
def test_uploads_survive_breaks(store: Store, target: Store, registry: Registry, hash: str, cuts: list[int],
                                forgets: bool) -> None:
    registry.cut_uploads, registry.forgets = list(cuts), forgets
    assert send(store, registry, hash).num_retries == len(cuts)
    get(target, registry, hash)
    assert target.verify().good


def test_a_broken_upload_goes_on_where_the_registry_stands(store: Store, registry: Registry, hash: str) -> None:
    blobs = list(store.manifest(hash)["members"].values())
    index = [entry["sha256"] for entry in blobs].index(sha256(OWN))
    registry.blobs |= {f"sha256:{entry['sha256']}": b"" for i, entry in enumerate(blobs) if i != index}
    for digest in registry.blobs:
        path = store.find_blob(digest.removeprefix("sha256:"))
        assert path is not None
        registry.blobs[digest] = path.read_bytes()
    registry.cut_uploads = [20_000]
    assert send(store, registry, hash).num_sent == 1
    assert registry.received_bytes < len(OWN) + 8000, "the 20,000 bytes were not sent twice"


def test_a_lost_answer_to_the_last_part(store: Store, registry: Registry, hash: str,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The blob is there, but the connection broke before that was said."""
    real = oci.OciRemote._end_upload
    failed: list[bool] = []

    def end_upload(self: oci.OciRemote, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        if not failed:
            failed.append(True)
            raise remote.Broken("lost")

    monkeypatch.setattr(oci.OciRemote, "_end_upload", end_upload)
    done = send(store, registry, hash)
    assert done.num_retries == 1 and registry.num("POST", "uploads") == done.num_blobs + 1  # and the manifest


def test_an_upload_that_always_breaks_ends(store: Store, registry: Registry, hash: str) -> None:
    registry.cut_uploads = [0] * 1000
    with pytest.raises(WorkFailed, match="6 times in a row"):
        send(store, registry, hash, "prod")
    assert registry.manifests == {}


@pytest.mark.parametrize("ranges", [True, False])
def test_downloads_survive_breaks(store: Store, target: Store, registry: Registry, hash: str, ranges: bool) -> None:
    send(store, registry, hash)
    registry.ranges = ranges
    registry.cut_downloads = {hash: [100, 0], sha256(OWN): [0, 0, 60_000, 0, 10_000], sha256(SHARED): [17_999]}
    assert get(target, registry, hash).num_retries == 6
    assert not any(registry.cut_downloads.values())
    assert target.verify().good and target.engines() == [hash]


def test_the_next_pull_goes_on_where_one_ended(store: Store, target: Store, registry: Registry, hash: str) -> None:
    send(store, registry, hash)
    registry.cut_downloads = {sha256(OWN): [60_000, *[0] * 6]}
    with pytest.raises(WorkFailed, match=r"60,000 of 100,000 bytes have arrived, and the next pull continues there"):
        get(target, registry, hash)
    assert target.engines() == []
    registry.cut_downloads, before = {}, registry.sent_bytes
    get(target, registry, hash)
    assert registry.sent_bytes - before < 40_000 + len(SHARED) + 8000 and target.verify().good


def test_a_flipped_bit_is_refused(store: Store, target: Store, registry: Registry, hash: str) -> None:
    send(store, registry, hash, "prod")
    registry.flip = {f"sha256:{sha256(OWN)}"}
    with pytest.raises(BlobMismatch, match=sha256(OWN)):
        get(target, registry, "prod")
    assert target.engines() == [] and target.find_blob(sha256(OWN)) is None and target.blobs.partial() == []
    registry.flip = {f"sha256:{hash}"}
    with pytest.raises(WorkFailed, match=r"manifest of engine .* was refused"):
        get(target, registry, "prod")
    registry.flip = set()
    get(target, registry, "prod")
    assert target.engines() == [hash] and target.verify().good


def test_names_there_do_not_move_by_themselves(store: Store, registry: Registry, hash: str, tmp_path: Path) -> None:
    send(store, registry, hash, "prod")
    send(store, registry, hash, "prod")
    other = add(store, engine(tmp_path / "other.engine", b"x"))
    with pytest.raises(NameTaken, match=f"prod is the name of engine {hash}"):
        send(store, registry, other, "prod")
    send(store, registry, other, "prod", move=True)
    with open_remote(registry.url) as remote:
        assert remote.resolve("prod") == other


def test_signed_statements_of_several_stores_are_united(store: Store, target: Store, registry: Registry,
                                                        hash: str) -> None:
    store.add_attestations(hash, [b'{"a":1}'])
    send(store, registry, hash)
    get(target, registry, hash)
    assert target.attestations(hash) == [b'{"a":1}']
    target.add_attestations(hash, [b'{"b":2}'])
    send(target, registry, hash)
    send(store, registry, hash)
    get(store, registry, hash)
    assert store.attestations(hash) == [b'{"a":1}', b'{"b":2}']


def test_what_is_not_there(target: Store, registry: Registry) -> None:
    for reference in ("prod", "0" * 64):
        with pytest.raises(RequestError, match=f"no engine of the name or the whole hash {reference}"):
            get(target, registry, reference)
    registry.manifests["image"] = b'{"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"x"}}'
    with pytest.raises(WorkFailed, match="image is no engine"):
        get(target, registry, "image")


@pytest.mark.parametrize("url", ["oci://", "oci://host", "oci://host/UPPER", "oci://host:x/a", "oci://host/a:tag"])
def test_urls_that_name_no_repository(url: str) -> None:
    with pytest.raises(RequestError, match="expected oci://"), open_remote(url):
        pass


@pytest.mark.parametrize("tokens", [False, True])
def test_login(store: Store, target: Store, hash: str, tokens: bool, tmp_path: Path,
               monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Registry(user="ada", password="secret", tokens=tokens)) as registry:
        with pytest.raises(WorkFailed, match="docker login"):
            send(store, registry, hash)
        monkeypatch.setenv("INGOT_REGISTRY_USER", "ada")
        monkeypatch.setenv("INGOT_REGISTRY_PASSWORD", "wrong")
        with pytest.raises(WorkFailed, match=r"refuses|gives no token"):
            send(store, registry, hash)
        monkeypatch.setenv("INGOT_REGISTRY_PASSWORD", "secret")
        send(store, registry, hash)
        monkeypatch.delenv("INGOT_REGISTRY_USER")
        auth = base64.b64encode(b"ada:secret").decode()
        docker_config(tmp_path, {"auths": {registry.address: {"auth": auth}}})
        get(target, registry, hash)
        assert target.verify().good
        if tokens:
            assert registry.num("GET", "^/token") == 5, "a token serves all requests of the same scope"


def test_identity_token(store: Store, hash: str, tmp_path: Path) -> None:
    with serve(Registry(user="ada", password="secret", tokens=True)) as registry:
        docker_config(tmp_path, {"auths": {registry.address: {"identitytoken": "secret"}}})
        assert send(store, registry, hash).num_sent > 0


def test_credential_helper(store: Store, hash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Registry(user="ada", password="secret")) as registry:
        helper = tmp_path / "bin" / "docker-credential-test"
        helper.parent.mkdir()
        helper.write_text(f'#!/bin/sh\nread registry; [ "$registry" = "{registry.address}" ] || exit 1\n'
                          'echo \'{"Username":"ada","Secret":"secret"}\'\n')
        helper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{helper.parent}:/usr/bin:/bin")
        docker_config(tmp_path, {"credHelpers": {registry.address: "test"}})
        assert send(store, registry, hash).num_sent > 0


def docker_config(folder: Path, config: object) -> None:
    (folder / "docker").mkdir(exist_ok=True)
    (folder / "docker" / "config.json").write_text(json.dumps(config))


def test_tls(store: Store, target: Store, hash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serve(Registry(), context) as registry:
        url = f"oci+https://{registry.address}/team/engines"
        with open_remote(url) as remote, pytest.raises(WorkFailed, match="CERTIFICATE_VERIFY_FAILED"):
            push(store, remote, hash)
        assert registry.requests == []
        with open_remote("oci://no-such-host.invalid/x") as remote, pytest.raises(WorkFailed, match="no-such-host"):
            remote.resolve("prod")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with open_remote(url) as remote:
            push(store, remote, hash)
            pull(target, remote, hash)
    assert target.verify().good


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """PEM files of a certificate for 127.0.0.1, signed by itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    key, now = generate_private_key(SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256()))
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(s.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    return paths


def test_credentials_do_not_follow_a_redirect(store: Store, target: Store, hash: str,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_REGISTRY_USER", "ada")
    monkeypatch.setenv("INGOT_REGISTRY_PASSWORD", "secret")
    with serve(Registry(user="ada", password="secret")) as registry, serve(Registry()) as storage:
        send(store, registry, hash)
        storage.blobs, registry.elsewhere = registry.blobs, storage.address
        get(target, registry, hash)
        assert target.verify().good
        assert storage.num("GET", "blobs/sha256") >= len(storage.blobs) - 1
        assert set(storage.authorizations) == {None}
