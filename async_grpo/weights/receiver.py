"""An engine's side of one weight update: the calls, in order, each with its deadline.

    begin:    pause -> begin_update                          (then wait for the order's `go`)
    receive:  [destroy_group ->] [init_group ->] bucket 0 .. n-1
    finish:   end_update -> [flush ->] version -> checksum   (still paused)
    resume -> probe
    abandon:  end_update -> resume                           (nothing was sent)

No torch, no processes, no routing: HTTP calls through the EngineClient protocol. What to do about a
failure is the driver's business.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from async_grpo.engine_api import (
    FLATTENED_BUCKET,
    GenerateRequest,
    InitGroupRequest,
    PauseMode,
    SamplingParams,
    UpdateFromDistributedRequest,
)
from async_grpo.errors import GenerationError, WeightSyncError
from async_grpo.interfaces import EngineClient
from async_grpo.replay_parts import BucketSpec, Rendezvous, UpdateOrder

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Received:
    """What `finish` found."""

    checksum: str
    """over all weights"""
    kv_kept: bool
    """KV entries of the weights before remain: of frozen requests, or of cached prefixes"""


class WeightReceiver:
    """One engine, one update. Call `begin`, `receive`, `finish`, `resume`, `probe` in this order.

    Args:
        client: of the engine.
        engine_id: for messages.
        order: what is to come.
        rank_offset: the engine's first rank in the update group.
        mode: what becomes of running requests.
        timeout_s: deadline of each collective phase.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        engine_id: str,
        order: UpdateOrder,
        rank_offset: int,
        mode: PauseMode,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._engine_id = engine_id
        self._order = order
        self._rank_offset = rank_offset
        self._mode = mode
        self._timeout_s = timeout_s

    async def begin(self) -> None:
        """Stop decoding and open the session: requests must not run into an update.

        Raises:
            WeightSyncError: as every method here; names the phase.
        """
        with self._phase("pause"):
            await self._client.pause(self._mode)
        with self._phase("begin"):
            await self._client.begin_update()

    async def abandon(self) -> None:
        """Nothing was sent: go on with the present weights."""
        with self._phase("abandon"):
            await self._client.end_update(missing_ok=True)
            await self._client.resume()

    async def receive(self, rendezvous: Rendezvous, previous_group: str) -> None:
        """Join the group if it is fresh, then take every bucket.

        A refused bucket does not end the sequence: the trainer broadcasts them all the same, and
        other engines of the cell wait for it. The first failure is raised at the end.

        Args:
            rendezvous: of the order that says `go`.
            previous_group: the group that this engine is a member of; empty: none. Left for a
                fresh one.
        """
        if rendezvous.fresh:
            with self._phase("init_group"):
                if previous_group:
                    await self._client.destroy_group(previous_group)
                await self._client.init_group(
                    InitGroupRequest(
                        master_address=rendezvous.host,
                        master_port=rendezvous.port,
                        rank_offset=self._rank_offset,
                        world_size=rendezvous.world_size,
                        group_name=rendezvous.group_name,
                        backend=rendezvous.backend,
                    ),
                    timeout_s=self._timeout_s,
                )
        failure: WeightSyncError | None = None
        last = len(self._order.buckets) - 1
        for index, bucket in enumerate(self._order.buckets):
            try:
                with self._phase(f"bucket {index}"):
                    await self._client.update_from_distributed(
                        self._bucket_request(bucket, rendezvous.group_name, last=index == last),
                        timeout_s=self._timeout_s,
                    )
            except WeightSyncError as error:
                failure = failure or error
                if _engine_is_lost(error):
                    break
        if failure is not None:
            raise failure

    def _bucket_request(
        self, bucket: BucketSpec, group_name: str, *, last: bool
    ) -> UpdateFromDistributedRequest:
        return UpdateFromDistributedRequest(
            names=bucket.names,
            dtypes=bucket.dtypes,
            shapes=bucket.shapes,
            group_name=group_name,
            # a flush is a step of its own: bundled, its refusal would look like a failed bucket
            flush_cache=False,
            weight_version=str(self._order.weights) if last else None,
            load_format=FLATTENED_BUCKET,
        )

    async def finish(self) -> Received:
        """Close the session; while still paused, drop cached KV and check that the weights are in.

        Under in_place nothing is dropped: it is refused while requests are frozen, and the
        namespace of prefixes protects new ones.
        """
        with self._phase("end"):
            await self._client.end_update()
        kv_kept = True
        if self._mode is not PauseMode.IN_PLACE:
            kv_kept = not await self._flush()
        with self._phase("version"):
            info = await self._client.model_info()
        if info.weight_version != str(self._order.weights):
            raise self._error("version", f"the engine says {info.weight_version!r}")
        with self._phase("checksum"):
            return Received(await self._client.checksum(), kv_kept)

    async def _flush(self) -> bool:
        """Whether it was done; a refusal costs exactness, which the caller then knows."""
        try:
            await self._client.flush_cache()
        except GenerationError as error:
            if error.retryable:
                raise self._error("flush", str(error)) from error
            logger.warning("engine %s: cached KV stays: %s", self._engine_id, error)
            return False
        return True

    async def resume(self) -> None:
        """Go on decoding."""
        with self._phase("resume"):
            await self._client.resume()

    async def probe(self) -> None:
        """Compare the engine's log-probs of fixed ids with the trainer's, at temperature 1.

        This, and only this, proves that the engine computes what the trainer computes.
        """
        probe = self._order.probe
        request = GenerateRequest(
            input_ids=probe.token_ids,
            sampling_params=SamplingParams(max_new_tokens=1, temperature=1.0),
            rid=f"probe-{self._order.publish_sequence}-{self._engine_id}",
            return_logprob=True,
            logprob_start_len=0,
            extra_key=f"probe-{self._order.weights}",
        )
        with self._phase("probe"):
            reply = await self._client.generate(request, timeout_s=self._timeout_s)
        found = [logprob for logprob, *_ in reply.meta_info.input_token_logprobs[1:]]
        ids = [token_id for _, token_id, *_ in reply.meta_info.input_token_logprobs]
        if ids != probe.token_ids or len(found) != len(probe.logprobs):
            raise self._error("probe", f"log-probs of {len(ids)} ids, not of the probe's")
        difference = max(
            (
                float("inf") if logprob is None else abs(logprob - expected)
                for logprob, expected in zip(found, probe.logprobs, strict=True)
            ),
            default=0.0,
        )
        # written so that a NaN fails
        if not difference <= probe.tolerance:
            raise self._error(
                "probe",
                f"log-probs differ from the trainer's by up to {difference:.3g} nats, more than "
                f"{probe.tolerance:.3g}",
            )

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        try:
            yield
        except GenerationError as error:
            raise self._error(phase, str(error)) from error

    def _error(self, phase: str, message: str) -> WeightSyncError:
        return WeightSyncError(self._engine_id, str(self._order.weights), phase, message)


def _engine_is_lost(error: WeightSyncError) -> bool:
    """The engine did not answer, so nothing more may be sent to it."""
    cause = error.__cause__
    return isinstance(cause, GenerationError) and cause.retryable
