"""Who drives a server: one slot at a time, told by the name of its weights (`names`).

    found                       what a newcomer does
    none of ours, or its own    takes the server
    another slot's              appends a question to the name; within `ANSWER_S` a slot that lives
                                has put its own name back, and the newcomer leaves it alone

A slot looks at the name every `LOOK_S`, so an idle engine that somebody else has taken is found,
too. It then gives the server up for good: two that took it back from each other would never end.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

from async_grpo.engine_api import ServerInfo
from async_grpo.errors import EngineMisconfigured, GenerationError
from async_grpo.generation.engines import Engine
from async_grpo.generation.names import GivenNames, Holder, ServedName, UnknownWeights
from async_grpo.interfaces import EngineClient

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between looks of the slot that drives a server."""
ANSWER_S = 8.0
"""For the answer of the slot that a server's name tells of; after that it counts as dead."""
BUSY_S = 30.0
"""The same while the server is paused: the slot may be in the middle of an update, and its name
comes with the end of that."""
_ASK_AGAIN_S = 0.25
_LET_GO_S = 2.0


class EngineInUse(EngineMisconfigured):
    """Somebody else drives the server; it is not touched again.

    Attributes:
        holder: the other one.
    """

    def __init__(self, url: str, holder: Holder, me: Holder) -> None:
        self.holder = holder
        cure = (
            "engine.urls names one server twice, or two generators attach to it"
            if holder.run == me.run
            else "give each run engines of its own (engine.urls)"
        )
        who = holder.told_to(me)
        super().__init__(f"{url} is driven by {who}: {cure}")


async def require_free(client: EngineClient, me: Holder, answer_s: float = ANSWER_S) -> None:
    """Leave a server alone whose slot still lives.

    Args:
        client: of the server; nothing was changed there yet.
        me: the newcomer.
        answer_s: for the other slot's answer.

    Raises:
        EngineInUse: it lives.
        GenerationError: the server does not answer, or was started again meanwhile.
    """
    found = ServedName.parse((await client.model_info()).weight_version)
    if found is None or found.holder == me:
        return
    question = replace(found, asked_by=me)
    if not await client.rename_weights(str(question)):
        logger.warning("%s cannot be asked who drives it; it was %s", client.url, found.holder)
        return
    logger.info("asking whether %s still drives %s", found.holder, client.url)
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    while True:
        await asyncio.sleep(min(_ASK_AGAIN_S, answer_s))
        text = (await client.model_info()).weight_version
        if text != str(question):
            other = ServedName.parse(text)
            if other is None:
                raise GenerationError(f"{client.url} was started again", retryable=True)
            raise EngineInUse(client.url, other.asked_by or other.holder, me)
        waited_s = loop.time() - asked_s
        if waited_s > answer_s and (waited_s > BUSY_S or await client.ready()):
            logger.warning(
                "%s gives no sign of life on %s, and is replaced", found.holder, client.url
            )
            return


async def hold(client: EngineClient, me: Holder) -> str:
    """Put one's name on a server; returns what it calls its weights now."""
    name = str(ServedName(me, None))
    if await client.rename_weights(name):
        return name
    return (await client.model_info()).weight_version


async def watch_name(engine: Engine, interval_s: float) -> str:
    """Answer those who ask; returns why the engine is not this slot's any more.

    Not during an update: that looks at the name itself, and ends with this slot's.
    """
    names = engine.names
    while True:
        await asyncio.sleep(interval_s)
        weights = engine.weights
        if engine.updating:
            continue
        try:
            found = (await engine.client.model_info()).weight_version
        except GenerationError:
            continue  # whether it lives is judged elsewhere
        if engine.updating or engine.weights != weights:
            continue
        expected = names.served(weights)
        if found == expected:
            continue
        asked = ServedName.parse(found)
        if asked is None or asked.asked_by is None or str(asked.unasked) != expected:
            return _why_lost(engine, found)
        logger.warning(
            "engine %s: %s asks for it, and is refused", engine.engine_id, asked.asked_by
        )
        with suppress(GenerationError):
            await engine.client.rename_weights(expected)


def _why_lost(engine: Engine, found: str) -> str:
    """Note who has taken it."""
    expected = engine.names.served(engine.weights)
    try:
        engine.names.read(found)
    except UnknownWeights as error:
        engine.taken_by = error.holder
        return f"it serves {error}; it should serve {expected!r}"
    return f"it serves {found!r}; it should serve {expected!r}"


async def let_go(client: EngineClient, names: GivenNames) -> None:
    """Leave a server to the next one without a question: best effort."""
    with suppress(GenerationError, TimeoutError):
        async with asyncio.timeout(_LET_GO_S):
            found = ServedName.parse((await client.model_info()).weight_version)
            if found is not None and found.holder == names.holder:
                await client.rename_weights(f"{found.unasked}:left")


def identity(info: ServerInfo) -> str:
    """Tells a server's process from others behind the same URL; empty: it does not say."""
    if info.instance:
        return info.instance
    return f"{info.host}:{info.port}, seed {info.random_seed}" if info.random_seed else ""
