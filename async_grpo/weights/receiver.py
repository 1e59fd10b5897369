"""An engine's side of one weight update: the calls, in order, each with its deadline.

    broadcast:  begin (pause, begin_update) -> ... go -> join (destroy_group, init_group)
                -> receive (bucket 0 .. n-1) -> finish
    files:      begin (pause) -> load (update_from_disk) -> finish
    both:       finish: [end_update ->] [flush ->] version -> checksum    (still paused)
                -> resume -> probe
    abandon:    [end_update ->] resume                                    (nothing was sent)

No torch, no processes, no routing: HTTP calls through the EngineClient protocol. What to do about a
failure is the driver's business.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from async_grpo.engine_api import (
    FLATTENED_BUCKET,
    NOT_RECEIVED,
    Checksums,
    GenerateRequest,
    InitGroupRequest,
    PauseMode,
    SamplingParams,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
)
from async_grpo.errors import EngineSilent, GenerationError, WeightSyncError
from async_grpo.interfaces import EngineClient
from async_grpo.replay_parts import BucketSpec, ProbeIds, Rendezvous, UpdateOrder
from async_grpo.weights.probing import ProbeGap, fitting, probe_gap
from async_grpo.weights.server_names import unknown_names

_DEADLINE = "weights.timeout_s"

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Received:
    """What `finish` found."""

    checksums: Checksums | None
    """of the weights; None: the server gives none"""
    kv_kept: bool
    """KV entries of the weights before remain: of frozen requests, or of cached prefixes"""


class WeightReceiver:
    """One engine, one update. Call the methods in the order of the module's docstring.

    Args:
        client: of the engine.
        engine_id: for messages.
        order: what is to come.
        rank_offset: the engine's first rank in the update group.
        mode: what becomes of running requests.
        served_name: what the engine is to call the weights.
        timeout_s: deadline of each collective phase, and of loading files.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        engine_id: str,
        order: UpdateOrder,
        rank_offset: int,
        mode: PauseMode,
        served_name: str,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._engine_id = engine_id
        self._order = order
        self._rank_offset = rank_offset
        self._mode = mode
        self._served_name = served_name
        self._timeout_s = timeout_s
        self._session = order.files is None
        """files are loaded without an update session"""

    async def check_names(self) -> None:
        """Refuse tensors that the server does not have: SGLang ignores them with a 200.

        Raises:
            WeightSyncError: as every method here; names the phase.
        """
        with self._phase("names"):
            checksums = await self._client.checksums()
        if checksums is None:
            return
        known = set(checksums.tensors)
        if not known:
            raise self._error("names", "the server lists no tensors (weights.check_names)")
        sent = [name for bucket in self._order.buckets for name in bucket.names]
        if unknown := unknown_names(sent, known):
            shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            raise self._error(
                "names",
                f"the server has no {shown} ({len(unknown)} of {len(sent)} tensors), and would "
                "ignore them silently; does it serve another model? (weights.check_names=false "
                "if it has them under names of its own)",
            )

    async def begin(self) -> None:
        """Stop decoding and open the session: requests must not run into an update."""
        with self._phase("pause"):
            await self._client.pause(self._mode)
        if self._session:
            with self._phase("begin"):
                await self._client.begin_update()

    async def load(self, directory: Path) -> None:
        """Load files instead of receiving buckets."""
        with self._phase("load", _DEADLINE):
            await self._client.update_from_disk(
                UpdateFromDiskRequest(
                    model_path=str(directory),
                    weight_version=self._served_name,
                    flush_cache=False,  # a step of its own, as with buckets
                ),
                timeout_s=self._timeout_s,
            )

    async def abandon(self) -> None:
        """Nothing was sent: go on with the present weights."""
        with self._phase("abandon"):
            if self._session:
                await self._client.end_update(missing_ok=True)
            await self._client.resume()

    async def join(self, rendezvous: Rendezvous, previous_group: str) -> None:
        """Join the group if it is fresh.

        Args:
            rendezvous: of the order that says `go`.
            previous_group: the group that this engine is a member of; empty: none. Left for a
                fresh one.
        """
        if rendezvous.fresh:
            with self._phase("init_group", _DEADLINE):
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

    async def receive(self, rendezvous: Rendezvous) -> None:
        """Take every bucket.

        A bucket that was received and refused does not end the sequence: the trainer broadcasts
        them all the same, and other engines of the cell wait for it. The first failure is raised at
        the end. Nothing more is sent to an engine that did not answer, or that received nothing:
        it would take the bytes of that bucket for the next one's.
        """
        failure: WeightSyncError | None = None
        last = len(self._order.buckets) - 1
        for index, bucket in enumerate(self._order.buckets):
            try:
                with self._phase(f"bucket {index}", _DEADLINE):
                    await self._client.update_from_distributed(
                        self._bucket_request(bucket, rendezvous.group_name, last=index == last),
                        timeout_s=self._timeout_s,
                    )
            except WeightSyncError as error:
                failure = failure or error
                if not was_refused(error) or NOT_RECEIVED in str(error):
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
            weight_version=self._served_name if last else None,
            load_format=FLATTENED_BUCKET,
        )

    async def finish(self) -> Received:
        """Close the session; while still paused, drop cached KV and check that the weights are in.

        Under in_place nothing is dropped: it is refused while requests are frozen, and the
        namespace of prefixes protects new ones.
        """
        if self._session:
            with self._phase("end"):
                await self._client.end_update()
        kv_kept = True
        if self._mode is not PauseMode.IN_PLACE:
            kv_kept = not await self._flush()
        with self._phase("version"):
            info = await self._client.model_info()
        # somebody may have asked, behind a `?`, who drives it
        if info.weight_version.partition("?")[0] != self._served_name:
            raise self._error("version", f"the engine says {info.weight_version!r}")
        with self._phase("checksum"):
            return Received(await self._client.checksums(), kv_kept)

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

    async def probe(self, room: int | None) -> ProbeGap:
        """Compare the engine's log-probs of fixed ids with the trainer's, at temperature 1.

        This, and only this, proves that the engine computes what the trainer computes. Where the
        first ids disagree, others are asked about: rounding alone may move one set far, but hardly
        two.

        Args:
            room: longest prompt of the engine; None: not known.

        Returns:
            The gap of the set that agreed.
        """
        probe = self._order.probe
        for number, ids in enumerate(probe.sets):
            gap = probe_gap(*await self._ask(number, fitting(ids, room)))
            if gap.within(probe.tolerance, probe.max_tolerance):
                return gap
            logger.warning(
                "engine %s: probe %d of weights %s is off by %.3g nats on average, %.3g at most",
                self._engine_id, number, self._order.weights, gap.mean, gap.largest,
            )  # fmt: skip
        raise self._error(
            "probe",
            f"log-probs differ from the trainer's by {gap.mean:.3g} nats on average and "
            f"{gap.largest:.3g} at most, more than {probe.tolerance:.3g} or "
            f"{probe.max_tolerance:.3g}, with each of {len(probe.sets)} sets of ids",
        )

    async def _ask(self, number: int, ids: ProbeIds) -> tuple[list[float | None], list[float]]:
        """The engine's log-probs of one set, and the trainer's."""
        request = GenerateRequest(
            input_ids=ids.token_ids,
            sampling_params=SamplingParams(max_new_tokens=1, temperature=1.0),
            rid=f"probe-{self._order.publish_sequence}-{self._engine_id}" + f"-{number}" * number,
            return_logprob=True,
            logprob_start_len=0,
            extra_key=f"probe-{self._served_name}" + f"-{number}" * number,
        )
        with self._phase("probe", _DEADLINE):
            reply = await self._client.generate(request, timeout_s=self._timeout_s)
        pairs = reply.meta_info.input_token_logprobs
        found = [logprob for logprob, *_ in pairs[1:]]
        answered = [token_id for _, token_id, *_ in pairs]
        if answered != ids.token_ids or len(found) != len(ids.logprobs):
            raise self._error("probe", f"log-probs of {len(answered)} ids, not of the probe's")
        return found, ids.logprobs

    @contextmanager
    def _phase(self, phase: str, deadline: str = "engine.control_timeout_s") -> Iterator[None]:
        try:
            yield
        except GenerationError as error:
            field = f" ({deadline})" if isinstance(error, EngineSilent) else ""
            raise self._error(phase, f"{error}{field}") from error

    def _error(self, phase: str, message: str) -> WeightSyncError:
        return WeightSyncError(self._engine_id, str(self._order.weights), phase, message)


def was_refused(error: WeightSyncError) -> bool:
    """The engine answered, with a no: it is not stuck, and may be spoken to."""
    cause = error.__cause__
    return isinstance(cause, GenerationError) and not cause.retryable
