"""Files of weights: written, served, fetched, and refused when they are not what was announced."""

import asyncio
import hashlib
import json

import aiohttp
import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import WeightFile, WeightFiles
from async_grpo.training.feed import LoopThread
from async_grpo.types import WeightsName
from async_grpo.weights.addresses import listening_socket
from async_grpo.weights.disk import DiskTransport
from async_grpo.weights.fetch import WeightFetcher
from async_grpo.weights.file_set import file_set
from async_grpo.weights.http_source import HttpTransport
from tests.unit.weights.test_snapshot import make_snapshot

WEIGHTS = WeightsName(1, 2)
TENSORS = {
    "layers.0.w": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "layers.0.b": torch.arange(3).bfloat16(),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
}


def filled(tensors=TENSORS):
    snapshot = make_snapshot(tensors)
    snapshot.fill(tensors)
    return snapshot


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()


def test_the_library_reads_what_is_written_here(tmp_path):
    files = DiskTransport(tmp_path, 1.0).prepare(filled())
    assert files.location == str(tmp_path / "1.2")
    found = {}
    for file in files.files:
        path = tmp_path / "1.2" / file.name
        assert path.stat().st_size == file.num_bytes
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
        if path.suffix == ".safetensors":
            found |= load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    index = json.loads((tmp_path / "1.2" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "1.2" / file, framework="pt") as content:
            assert name in content.keys()  # noqa: SIM118 -- not a mapping
    manifest = json.loads((tmp_path / "1.2" / "manifest.json").read_text())
    assert manifest == {"weights": "1.2", "files": msgspec.to_builtins(files.files)}


def test_one_bucket_is_one_file_without_an_index():
    (content,) = file_set(filled({"a": torch.zeros(2)}), 1.0)
    assert content.file.name == "model.safetensors"


def test_the_publisher_deletes_what_is_older_and_left_over(tmp_path):
    for name in ("1.0", ".partial-1.1", ".partial-1.2", "1.2"):
        (tmp_path / name).mkdir()
    transport = DiskTransport(tmp_path, 1.0)
    snapshot = filled()
    transport.prepare(snapshot)
    assert (tmp_path / "1.0").exists(), "an engine may be reading it"
    written = (tmp_path / "1.2" / "manifest.json").stat().st_mtime_ns
    transport.settled()
    assert [path.name for path in tmp_path.iterdir()] == ["1.2"]
    transport.prepare(snapshot)  # sent again
    assert (tmp_path / "1.2" / "manifest.json").stat().st_mtime_ns == written


def test_a_disk_that_fails_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"file.*phase 'write'"):
        DiskTransport(tmp_path / "file" / "below", 1.0).prepare(filled())


async def test_what_lies_on_a_disk_is_verified(tmp_path):
    files = DiskTransport(tmp_path, 1.0).prepare(filled())
    fetcher = WeightFetcher(str(tmp_path / "other"), 5.0)
    assert await fetcher.get(WEIGHTS, files) == tmp_path / "1.2"
    victim = tmp_path / "1.2" / files.files[0].name
    content = victim.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        victim.write_bytes(damaged)
        with pytest.raises(WeightSyncError, match="announced were"):
            await WeightFetcher(str(tmp_path / "other"), 5.0).get(WEIGHTS, files)
    victim.unlink()
    with pytest.raises(WeightSyncError, match="FileNotFoundError"):
        await WeightFetcher(str(tmp_path / "other"), 5.0).get(WEIGHTS, files)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_served_weights_are_fetched_once_and_verified(loop, tmp_path, host):
    try:
        listening_socket(host).close()
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    transport = HttpTransport(loop.call, host, 1.0)
    fetcher = WeightFetcher(str(tmp_path), 5.0)
    try:
        snapshot = filled()
        files = transport.prepare(snapshot)
        directory = await fetcher.get(WEIGHTS, files)
        found = {}
        for path in directory.glob("*.safetensors"):
            found |= load_file(path)
        assert found.keys() == TENSORS.keys()
        assert torch.equal(found["layers.0.w"], TENSORS["layers.0.w"])
        snapshot.buckets[0].zero_()  # as by the next publish
        assert await fetcher.get(WEIGHTS, files) == directory
        with pytest.raises(WeightSyncError, match="announced were"):
            await WeightFetcher(str(tmp_path / "other"), 5.0).get(WEIGHTS, files)
    finally:
        transport.close()
    with pytest.raises(WeightSyncError, match="Cannot connect"):
        await WeightFetcher(str(tmp_path / "other"), 5.0).get(WEIGHTS, files)


async def test_weights_are_not_for_everyone_who_reaches_the_port(loop):
    transport = HttpTransport(loop.call, "127.0.0.1", 1.0)
    try:
        location = transport.prepare(filled()).location
        root, secret = location.rsplit("/", 2)[:2]
        assert len(secret) >= 20
        async with aiohttp.ClientSession() as session:
            for path in ("1.2/model.safetensors.index.json", f"{secret}x/1.2/manifest.json"):
                async with session.get(f"{root}/{path}") as response:
                    assert response.status == 404
            async with session.get(f"{location}/model.safetensors.index.json") as response:
                assert response.status == 200
            async with session.get(f"{location}/../../etc/passwd") as response:
                assert response.status == 404
    finally:
        transport.close()


async def test_the_secret_is_in_no_error(loop, tmp_path):
    transport = HttpTransport(loop.call, "127.0.0.1", 1.0)
    files = transport.prepare(filled())
    transport.close()
    with pytest.raises(WeightSyncError) as caught:
        await WeightFetcher(str(tmp_path / "other"), 5.0).get(WEIGHTS, files)
    assert files.location.split("/")[3] not in str(caught.value)


async def test_only_the_newest_two_are_kept(loop, tmp_path):
    transport = HttpTransport(loop.call, "127.0.0.1", 1.0)
    fetcher = WeightFetcher(str(tmp_path), 5.0)
    try:
        for version in range(4):
            snapshot = filled()
            snapshot.weights = WeightsName(1, version)
            await fetcher.get(snapshot.weights, transport.prepare(snapshot))
    finally:
        transport.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.2", "1.3"]


async def test_a_file_name_stays_in_its_directory(tmp_path):
    file = WeightFile(name="../escaped", num_bytes=1, sha256="0")
    files = WeightFiles(location="http://127.0.0.1:9/s/1.2", files=[file])
    with pytest.raises(WeightSyncError, match="no plain file name"):
        await WeightFetcher(str(tmp_path), 5.0).get(WEIGHTS, files)


async def test_a_source_that_stalls_is_given_up(tmp_path):
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # the request, and then the end of the connection
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    file = WeightFile(name="model.safetensors", num_bytes=1, sha256="0")
    files = WeightFiles(location=f"http://127.0.0.1:{port}/s/1.2", files=[file])
    try:
        with pytest.raises(WeightSyncError, match=r"over 0\.2 s"):
            await WeightFetcher(str(tmp_path), 0.2).get(WEIGHTS, files)
    finally:
        server.close()
    async with asyncio.timeout(10):
        await ended.wait()
    assert list(tmp_path.iterdir()) == []


async def test_the_temporary_directory_goes_with_the_fetcher(loop):
    transport = HttpTransport(loop.call, "127.0.0.1", 1.0)
    fetcher = WeightFetcher("", 5.0)
    try:
        directory = await fetcher.get(WEIGHTS, transport.prepare(filled()))
        assert directory.is_dir()
        fetcher.close()
        assert not directory.parent.exists()
    finally:
        transport.close()
