"""What a generator does first with a server that answers: clean up, and learn what it is.

    /server_info -> pause in_place -> end_weight_update -> destroy group -> continue -> /ready
                 -> abort all -> slots, context, vocabulary

Whoever drove the server before us may have died in the middle of an update, and a server that is
not paused ends a session only when its requests have ended. A server just started takes the same
calls. Knows nothing of processes or of what comes after.
"""

import logging

import msgspec

from async_grpo.engine_api import PauseMode, ServerInfo
from async_grpo.errors import GenerationError
from async_grpo.interfaces import EngineClient

logger = logging.getLogger(__name__)


async def shake_hands(client: EngineClient, *, left_group: str, timeout_s: float) -> ServerInfo:
    """Sizes of a server that is clean and takes requests.

    Args:
        client: of the server.
        left_group: update group that its last life was a member of; empty: none that we know.
        timeout_s: deadline of the first answer.

    Raises:
        GenerationError: retryable: it does not answer, or is not ready yet. Else it is not a server
            for this run.
    """
    info = await client.server_info(timeout_s=timeout_s)
    for name in ("dp_size", "pp_size"):
        if getattr(info, name) != 1:
            raise GenerationError(
                f"the server has {name} {getattr(info, name)}: a weight update reaches one replica "
                "only; start several servers instead",
                retryable=False,
            )
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
    return info


async def _with_limits(client: EngineClient, info: ServerInfo) -> ServerInfo:
    """What it can hold now, which may be less than what its arguments say, or not said there."""
    load = await client.load()
    context = info.context_length or await client.context_length()
    # SGLang ends a completion early, without a word, where its whole KV cache is smaller
    limits = [limit for limit in (context, load.max_total_num_tokens) if limit]
    return msgspec.structs.replace(
        info,
        max_running_requests=load.max_running_requests or info.max_running_requests,
        context_length=min(limits, default=None),
    )
