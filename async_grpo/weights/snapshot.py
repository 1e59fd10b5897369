"""One set of weights on its way out: copied bucket by bucket, sent as soon as each is whole.

The trainer's thread fills it; the threads that send wait for the bucket they need next. Bucket k is
sent while k + 1 is copied. Holds one copy of the weights, on the device that sends them.

From a card, `fill` only queues the copies on the trainer's stream, each with an event behind it.
Whoever reads a bucket waits for its event; nobody waits for the stream, on which training goes on.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import Probe
from async_grpo.types import WeightsName
from async_grpo.weights.flatten import flatten
from async_grpo.weights.plan import BucketPlan

COPY = "copy"
"""The phase in which a bucket is filled."""
_LENDING = threading.Lock()
"""Of the counters of all snapshots."""
_POLL_S = 0.001
"""Between two looks at an event: CUDA's own wait for one knows no deadline."""


class Snapshot:
    """Weights as they are sent; once filled, they do not change until the next publish.

    Args:
        weights: their name.
        plan: what is in which bucket.
        probe: of these weights.
        digests: of the bytes of each tensor.
        buckets: [num_bytes] uint8 each, to be overwritten.
        source: the card that the tensors lie on; None: they are on the CPU.
    """

    def __init__(
        self,
        weights: WeightsName,
        plan: BucketPlan,
        probe: Probe,
        digests: dict[str, int],
        buckets: list[Tensor],
        *,
        source: torch.device | None = None,
    ) -> None:
        self.weights, self.plan, self.probe, self.digests = weights, plan, probe, digests
        self.buckets = buckets
        self._source = source
        self._filled: list[Future[torch.cuda.Event | None]] = [Future() for _ in buckets]
        self._num_lent = 0

    @property
    def is_lent(self) -> bool:
        """Whether somebody still reads the buckets, so that they must not be overwritten."""
        return self._num_lent > 0

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The block reads the buckets, however long that takes."""
        with _LENDING:
            self._num_lent += 1
        try:
            yield
        finally:
            with _LENDING:
                self._num_lent -= 1

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the buckets, in order.

        Raises:
            ValueError: they are not those of the plan; whoever waits for a bucket gets an error.
        """
        try:
            for bucket, payload, filled in zip(
                self.plan.buckets, self.buckets, self._filled, strict=True
            ):
                flatten(bucket, tensors, payload)
                filled.set_result(self._queued())
        except BaseException as error:
            failed = WeightSyncError("trainer", str(self.weights), COPY, str(error))
            for filled in self._filled:
                if not filled.done():
                    filled.set_exception(failed)
            raise

    def _queued(self) -> torch.cuda.Event | None:
        """Behind the copies that were queued so far."""
        if self._source is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._source))
        return event

    def bucket(self, index: int, timeout_s: float) -> tuple[Tensor, torch.cuda.Event | None]:
        """A bucket as soon as its copy is queued, and the event behind that; None: it is done.

        Args:
            index: of the bucket.
            timeout_s: deadline.

        Raises:
            WeightSyncError: it was not copied in time, or never will be.
        """
        try:
            return self.buckets[index], self._filled[index].result(timeout_s)
        except TimeoutError as error:
            raise self._late(index, timeout_s) from error

    def whole_buckets(self, timeout_s: float) -> Iterator[Tensor]:
        """Each bucket as soon as its bytes are there.

        Args:
            timeout_s: deadline of each.

        Raises:
            WeightSyncError: it was not filled in time, or never will be.
        """
        for index in range(len(self.buckets)):
            yield self.whole_bucket(index, timeout_s)

    def whole_bucket(self, index: int, timeout_s: float) -> Tensor:
        """A bucket as soon as its bytes are there; as `whole_buckets`."""
        deadline = time.monotonic() + timeout_s
        payload, copied = self.bucket(index, timeout_s)
        while copied is not None and not copied.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise self._late(index, timeout_s)
            time.sleep(_POLL_S)
        return payload

    def _late(self, index: int, timeout_s: float) -> WeightSyncError:
        return WeightSyncError(
            "trainer", str(self.weights), COPY, f"bucket {index} took over {timeout_s:g} s"
        )
