"""push and pull through a real registry on this machine; a connection breaks, and a byte flips on the registry's disk.

docker-registry is Debian's package of that name; $INGOT_TEST_REGISTRY names another binary of the same program
(github.com/distribution/distribution). Skipped where there is none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ingot.runtime.store.blobs import BlobMismatch
from ingot.runtime.store.remotes import oci, open_remote, remote
from ingot.runtime.store.store import Store
from ingot.runtime.store.transfer import pull, push
from tests.runtime.store.samples import add, engine, sha256

OWN = bytes(range(256)) * 40_000
CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: '{at}'}}
"""


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "registry"


@pytest.fixture
def address(storage: Path, tmp_path: Path) -> Iterator[str]:
    binary = os.environ.get("INGOT_TEST_REGISTRY") or shutil.which("docker-registry")
    if binary is None:
        pytest.skip("no docker-registry here; apt-get install docker-registry, or set $INGOT_TEST_REGISTRY")
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    config = tmp_path / "registry.yml"
    config.write_text(CONFIG.format(folder=storage, at=at))
    process = subprocess.Popen([binary, "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(at.rpartition(":")[2]))):
                break
            assert process.poll() is None, "the registry ended by itself"
            time.sleep(0.05)
        yield at
    finally:
        process.terminate()
        process.wait(10)


@dataclass
class Cable:
    """A way to a server that breaks, once each, when so many bytes have gone to it (up) or come from it (down)."""

    target: str
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    address: str = ""


@contextlib.contextmanager
def connect(cable: Cable) -> Iterator[Cable]:
    host, _, port = cable.target.rpartition(":")
    server = socket.create_server(("127.0.0.1", 0))
    cable.address = f"127.0.0.1:{server.getsockname()[1]}"

    def carry(source: socket.socket, target: socket.socket, limits: list[int]) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                carried += len(data)
                if limits and carried >= limits[0]:
                    limits.pop(0)
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = server.accept()[0]
                upstream = socket.create_connection((host, int(port)))
                for arguments in ((client, upstream, cable.up), (upstream, client, cable.down)):
                    threading.Thread(target=carry, args=arguments, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield cable
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)


def test_push_and_pull_with_breaks_and_a_flipped_byte(address: str, storage: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "UPLOAD_BYTES", 2_000_000)
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.001)
    store, target = Store(tmp_path / "store"), Store(tmp_path / "target")
    hash = add(store, engine(tmp_path / "a.engine", OWN), "prod")
    with connect(Cable(address, up=[5_000_000, 300_000])) as cable, \
            open_remote(f"oci://{cable.address}/team/engines") as there:
        sent = push(store, there, hash, "prod")
        assert sent.num_sent == sent.num_blobs and sent.num_retries == 2 and cable.up == []
    with open_remote(f"oci://{address}/team/engines") as there:
        assert there.resolve("prod") == hash
        assert push(store, there, hash, "prod").num_sent == 0

        data = storage / "docker/registry/v2/blobs/sha256" / sha256(OWN)[:2] / sha256(OWN) / "data"
        flipped = bytearray(OWN)
        flipped[5_000_000] ^= 1
        data.write_bytes(flipped)
        with pytest.raises(BlobMismatch, match=sha256(OWN)):
            pull(target, there, "prod")
        assert target.engines() == [] and target.find_blob(sha256(OWN)) is None
        data.write_bytes(OWN)
    with connect(Cable(address, down=[3_000_000, 3_000_000])) as cable, \
            open_remote(f"oci://{cable.address}/team/engines") as there:
        got = pull(target, there, "prod")
        assert (got.hash, got.num_retries) == (hash, 2) and cable.down == []
    assert target.verify().good
    with target.open(hash) as file:
        assert file.read(f"weights/{sha256(OWN)}.bin") == OWN
