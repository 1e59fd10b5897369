"""Real sockets on loopback; ports are chosen by the system."""

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from async_grpo.errors import CodecError, ConfigError, PeerLost, RpcTimeout
from async_grpo.replay_api.base import Error, ErrorCode, Ok
from async_grpo.replay_api.generator import Claim, ClaimReply
from async_grpo.replay_api.peers import Stats
from async_grpo.replay_api.trainer import Fetch, FetchReply
from async_grpo.transport import envelope
from async_grpo.transport.rpc import Incoming, RpcClient, RpcServer, backoff

LIMIT = 32 << 20
Handler = Callable[[RpcServer, Incoming], None]


@asynccontextmanager
async def serving(handler: Handler, address: str = "tcp://127.0.0.1:0") -> AsyncIterator[RpcServer]:
    server = RpcServer(address, max_frame_bytes=LIMIT)

    async def loop() -> None:
        while True:
            for incoming in await server.receive(0.2):
                handler(server, incoming)

    task = asyncio.create_task(loop())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close(linger_s=0)


@asynccontextmanager
async def client_of(address: str, identity: str = "peer") -> AsyncIterator[RpcClient]:
    client = RpcClient(address, identity=identity, max_frame_bytes=LIMIT)
    client.open()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def ipv6_loopback() -> str:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    return "::1"


def echo(server: RpcServer, incoming: Incoming) -> None:
    if isinstance(incoming.request, Fetch):
        server.reply(incoming, FetchReply(), incoming.payload)
    else:
        server.reply(incoming, Ok())


def ignore(server: RpcServer, incoming: Incoming) -> None:
    """Never answer."""


async def test_replies_find_their_requests_in_any_order():
    held: list[Incoming] = []

    def last_first(server: RpcServer, incoming: Incoming) -> None:
        held.append(incoming)
        if len(held) == 3:
            for item in reversed(held):
                server.reply(
                    item, Error(code=ErrorCode.NOT_FOUND, message=f"{item.request.number}")
                )

    async with serving(last_first) as server, client_of(server.address) as client:
        answers = await asyncio.gather(
            *(
                client.call(Claim(number=number, wait_s=0), timeout_s=20, try_timeout_s=20)
                for number in range(3)
            )
        )
    assert [answer.reply.message for answer in answers] == ["0", "1", "2"]


@pytest.mark.parametrize("size", [0, 10, 100_000, 3_000_000])
async def test_payload_comes_back_unchanged(size):
    payload = [b"h", bytes(size), b"\x00\xff" * 7]
    async with serving(echo) as server, client_of(server.address) as client:
        request = Fetch(incarnation=1, group_id=2, attempt=3)
        answer = await client.call(request, timeout_s=20, try_timeout_s=20, payload=payload)
    assert isinstance(answer.reply, FetchReply)
    assert [bytes(frame) for frame in answer.payload] == payload


async def test_an_address_of_ipv6(ipv6_loopback: str) -> None:
    address = f"tcp://[{ipv6_loopback}]:0"
    async with serving(echo, address) as server, client_of(server.address) as client:
        answer = await client.call(Stats(), timeout_s=20, try_timeout_s=20)
    assert isinstance(answer.reply, Ok)


async def test_silent_server_is_named_with_operation_and_seconds():
    async with serving(ignore) as server, client_of(server.address) as client:
        with pytest.raises(RpcTimeout, match=r"replay server at tcp:.*'Stats' within 0.3 s"):
            await client.call(Stats(), timeout_s=0.3, try_timeout_s=0.1)


async def test_absent_server_times_out_and_close_does_not_hang():
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    async with client_of(f"tcp://127.0.0.1:{port}") as client:
        with pytest.raises(RpcTimeout):
            await client.call(Stats(), timeout_s=0.2, try_timeout_s=10)


async def test_lost_reply_is_asked_for_again_and_the_late_one_is_discarded():
    seen: list[Incoming] = []

    def second_time(server: RpcServer, incoming: Incoming) -> None:
        seen.append(incoming)
        if len(seen) == 2:
            server.reply(seen[0], Error(code=ErrorCode.NOT_FOUND, message="of the first try"))
            server.reply(seen[1], Ok())

    async with serving(second_time) as server, client_of(server.address) as client:
        answer = await client.call(Stats(), timeout_s=20, try_timeout_s=0.1)
    assert answer.reply == Ok()
    assert seen[0].request_id != seen[1].request_id


async def test_restarted_server_gets_what_was_unanswered_at_once():
    arrived = asyncio.Event()

    def note(server: RpcServer, incoming: Incoming) -> None:
        arrived.set()

    async with AsyncExitStack() as stack:
        async with serving(note) as first:
            address = first.address
            client = await stack.enter_async_context(client_of(address))
            # the next try by itself would be due in 40 s
            call = asyncio.create_task(client.call(Stats(), timeout_s=50, try_timeout_s=40))
            await asyncio.wait_for(arrived.wait(), 20)
        async with serving(echo, address):
            assert (await asyncio.wait_for(call, 20)).reply == Ok()


async def test_replies_sent_just_before_the_server_closed_are_answers():
    num_calls = 30
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with client_of(f"tcp://127.0.0.1:{port}") as client:
        calls = [
            asyncio.create_task(client.call(Stats(), timeout_s=3, try_timeout_s=3))
            for _ in range(num_calls)
        ]
        async with asyncio.timeout(20):
            asked = [await router.recv_multipart() for _ in range(num_calls)]
        # the client's loop stands still until both the replies and the end have reached it
        blocking = zmq.Socket.shadow(router)
        for peer, frame in asked:
            request_id, _ = envelope.open_envelope(frame)
            blocking.send_multipart([peer, envelope.encode(request_id, Ok())])
        router.close(linger=5000)
        context.term()
        assert select.select([client._monitor.descriptor], [], [], 10)[0]
        answers = await asyncio.gather(*calls)
    assert [answer.reply for answer in answers] == [Ok()] * num_calls


async def test_call_from_another_loop_is_refused():
    async with serving(echo) as server, client_of(server.address) as client:

        def elsewhere() -> None:
            asyncio.run(client.call(Stats(), timeout_s=1, try_timeout_s=1))

        with pytest.raises(RuntimeError, match="does not own the socket"):
            await asyncio.to_thread(elsewhere)


async def test_oversize_frame_is_refused_before_it_is_sent():
    arrived: list[Incoming] = []

    def note(server: RpcServer, incoming: Incoming) -> None:
        arrived.append(incoming)

    async with serving(note) as server, client_of(server.address) as client:
        with pytest.raises(CodecError, match="exceeds the limit"):
            await client.call(Stats(), timeout_s=5, try_timeout_s=5, payload=[bytes(LIMIT + 1)])
    assert arrived == []


async def test_occupied_address_names_the_setting():
    async with serving(echo) as server:
        with pytest.raises(ConfigError, match=r"replay\.address: cannot bind"):
            RpcServer(server.address, max_frame_bytes=LIMIT)


async def test_malformed_messages_cost_one_error_and_honest_peers_go_on():
    good = envelope.encode(7, Claim(number=1, wait_s=0.0))
    tree = msgspec.msgpack.decode(good)
    wrong_tag = msgspec.msgpack.encode({**tree, "body": {"type": "Nope"}})
    unknown_field = msgspec.msgpack.encode({**tree, "body": {**tree["body"], "more": 1}})
    other_version = msgspec.msgpack.encode({**tree, "wire_version": 99})
    nested = msgspec.msgpack.encode({**tree, "body": 0})[:-1] + b"\x91" * 100_000
    huge = msgspec.msgpack.encode({**tree, "body": 0})[:-1] + b"\xdd\xff\xff\xff\xff"
    silent = [[], [b""], [b"\xc1"], [good[:-3]], [nested], [huge], [b"\xdd\xff\xff\xff\xff"]]
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.DEALER)
    try:
        async with serving(echo) as server, client_of(server.address) as client:
            raw.connect(server.address)
            for frames in silent:
                await raw.send_multipart([*frames] or [b""])
            for frame in (wrong_tag, unknown_field, other_version):
                await raw.send_multipart([frame])
            codes = []
            async with asyncio.timeout(20):
                for _ in range(3):
                    request_id, body = envelope.open_envelope((await raw.recv_multipart())[0])
                    reply = envelope.decode_reply(body)
                    assert isinstance(reply, Error)
                    assert (request_id, len(reply.message) <= 500) == (7, True)
                    codes.append(reply.code)
            assert codes == [
                ErrorCode.BAD_REQUEST,
                ErrorCode.BAD_REQUEST,
                ErrorCode.WIRE_MISMATCH,
            ]
            assert server.num_malformed == len(silent) + 3
            assert (await client.call(Stats(), timeout_s=5, try_timeout_s=5)).reply == Ok()
    finally:
        raw.close(linger=0)
        context.term()


async def test_reply_to_a_peer_that_left_is_dropped():
    held: list[Incoming] = []
    arrived = asyncio.Event()

    def hold(server: RpcServer, incoming: Incoming) -> None:
        if isinstance(incoming.request, Claim):
            held.append(incoming)
            arrived.set()
        else:
            server.reply(held[0], ClaimReply())
            server.reply(incoming, Ok())

    async with serving(hold) as server:
        async with client_of(server.address, "leaver") as leaver:
            task = asyncio.create_task(
                leaver.call(Claim(number=1, wait_s=9), timeout_s=9, try_timeout_s=9)
            )
            await asyncio.wait_for(arrived.wait(), 20)
        with pytest.raises(PeerLost, match="this end closed"):
            await task
        async with client_of(server.address, "stayer") as stayer:
            assert (await stayer.call(Stats(), timeout_s=9, try_timeout_s=9)).reply == Ok()


def test_pauses_grow_to_their_cap():
    pauses = [pause for pause, _ in zip(backoff(0.1, 1.0), range(20), strict=False)]
    assert 0.05 <= pauses[0] <= 0.1
    assert all(0.5 <= pause <= 1.0 for pause in pauses[6:])


async def test_flood_of_malformed_messages_does_not_slow_honest_peers():
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.DEALER)
    server = RpcServer("tcp://127.0.0.1:0", max_frame_bytes=LIMIT)
    try:
        raw.connect(server.address)
        for _ in range(200):
            await raw.send(b"nonsense")
        received = []
        async with asyncio.timeout(20):
            while server.num_malformed < 200:
                # a batch of nothing but nonsense must not be followed by the wait of a minute
                received += await server.receive(60.0)
        assert received == []
    finally:
        raw.close(linger=0)
        context.term()
        server.close(linger_s=0)


async def test_more_calls_than_the_queue_holds_wait_for_room_and_lose_nothing(tmp_path):
    address = f"ipc://{tmp_path}/server"
    asked: list[int] = []

    def note(server: RpcServer, incoming: Incoming) -> None:
        asked.append(incoming.request.number)
        server.reply(incoming, Ok())

    async with client_of(address) as client:
        calls = [
            asyncio.create_task(
                client.call(Claim(number=number, wait_s=0), timeout_s=50, try_timeout_s=40)
            )
            for number in range(60)  # more than a DEALER sends ahead, fewer than replies may wait
        ]
        async with serving(note, address):
            async with asyncio.timeout(20):
                await asyncio.gather(*calls)
    assert asked == list(range(60))  # in order, each once


async def test_call_that_gives_up_while_it_waits_for_room_leaves_its_place(tmp_path):
    address = f"ipc://{tmp_path}/server"
    async with client_of(address) as client:
        calls = [client.call(Stats(), timeout_s=0.2, try_timeout_s=0.2) for _ in range(40)]
        refused = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in refused] == [RpcTimeout] * 40
        async with serving(echo, address):
            answer = await client.call(Stats(), timeout_s=20, try_timeout_s=20)
    assert answer.reply == Ok()


async def test_a_close_that_is_cancelled_leaves_no_socket_open() -> None:
    client = RpcClient("tcp://127.0.0.1:1", identity="peer", max_frame_bytes=LIMIT)
    client.open()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)  # it waits for its tasks now
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    assert client._context.closed
