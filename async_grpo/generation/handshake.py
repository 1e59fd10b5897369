"""What a generator does first with a server that answers: clean up, and learn what it is.

    /server_info -> (attached: is it one server, and does its driver live?)
                 -> pause in_place -> end_weight_update -> destroy group -> continue -> /ready
                 -> abort all -> slots, context, vocabulary -> name

Whoever drove the server before us may have died in the middle of an update, and a server that is
not paused ends a session only when its requests have ended. A server just started takes the same
calls. Knows nothing of processes or of what comes after.
"""

import logging
from dataclasses import dataclass

import msgspec

from async_grpo.engine_api import SGLANG_RESERVE, PauseMode, ServerInfo
from async_grpo.errors import EngineMisconfigured, GenerationError
from async_grpo.generation.connections import NO_ROUTE, StatusError
from async_grpo.generation.holding import ANSWER_S, hold, identity, require_free
from async_grpo.generation.names import GivenNames, Holder
from async_grpo.interfaces import EngineClient

logger = logging.getLogger(__name__)

_NUM_LOOKS = 8
"""Questions that tell one server from several: of two that a balancer draws at random, all reach
the same one once in 128 times."""


class NotAnEngine(EngineMisconfigured):
    """A router or a balancer: no weight update reaches what is behind it."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}. A weight update must reach each engine: name the engines themselves in "
            "engine.urls, without a router or balancer (requests are balanced here)"
        )


@dataclass(frozen=True, slots=True)
class Greeted:
    """A server that is clean, takes requests and bears our name."""

    info: ServerInfo
    names: GivenNames


async def shake_hands(
    client: EngineClient,
    *,
    me: Holder,
    attached: bool,
    left_group: str,
    timeout_s: float,
    answer_s: float = ANSWER_S,
) -> Greeted:
    """Take a server over.

    Args:
        client: of the server.
        me: who drives it from now on.
        attached: somebody else started it, and may have given us anything.
        left_group: update group that its last life was a member of; empty: none that we know.
        timeout_s: deadline of the first answer.
        answer_s: for the answer of another slot whose name it bears.

    Raises:
        EngineInUse: another slot drives it.
        NotAnEngine: it is a router, or several servers.
        GenerationError: retryable: it does not answer, or is not ready yet. Else it is not a server
            for this run.
    """
    info = await identify(client, attached=attached, timeout_s=timeout_s)
    for name in ("dp_size", "pp_size"):
        if getattr(info, name) != 1:
            raise GenerationError(
                f"the server has {name} {getattr(info, name)}: a weight update reaches one replica "
                "only; start several servers instead",
                retryable=False,
            )
    if attached:
        await require_free(client, me, answer_s)
    await client.pause(PauseMode.IN_PLACE)
    await client.end_update(missing_ok=True)
    if left_group:
        await client.destroy_group(left_group)
    await client.resume()
    if not await client.ready():
        raise GenerationError("the server is not ready: it still starts", retryable=True)
    # not before: SGLang ends when its warm-up request is aborted
    await client.abort_all()
    info = await _with_limits(client, info)
    await client.adopt(info)
    return Greeted(info, GivenNames(me, await hold(client, me)))


async def identify(client: EngineClient, *, attached: bool, timeout_s: float) -> ServerInfo:
    """What the server says of itself, if it is one server.

    Raises:
        NotAnEngine: see the class.
        GenerationError: it does not answer, or refuses.
    """
    try:
        info = await client.server_info(timeout_s=timeout_s)
    except StatusError as error:
        if error.status in NO_ROUTE and await client.healthy():
            raise NotAnEngine(
                f"{client.url} answers /health but has no /server_info: it is a router "
                "(sglang-router, a gateway), not an engine"
            ) from error
        raise
    if attached:
        await _require_one(client, info)
    return info


async def _require_one(client: EngineClient, info: ServerInfo) -> None:
    seen = {identity(info)}
    for _ in range(_NUM_LOOKS - 1):
        seen.add(identity(await client.fresh_server_info()))
        if len(seen) > 1:
            raise NotAnEngine(
                f"{client.url} is several servers behind one address ({' and '.join(seen)})"
            )


async def _with_limits(client: EngineClient, info: ServerInfo) -> ServerInfo:
    """What it can hold now, which may be less than what its arguments say, or not said there."""
    load = await client.load()
    context = info.context_length or await client.context_length()
    # SGLang ends a completion early, without a word, where its whole KV cache is smaller
    limits = [limit for limit in (context, load.max_total_num_tokens) if limit]
    reserve = SGLANG_RESERVE if info.engine == "sglang" else 0
    return msgspec.structs.replace(
        info,
        max_running_requests=load.max_running_requests or info.max_running_requests,
        context_length=min(limits) - reserve if limits else None,
    )
