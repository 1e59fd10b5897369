"""One set of weights on its way out: copied bucket by bucket, sent as soon as each is whole.

The trainer's thread fills it; the threads that send wait for the bucket they need next. Bucket k is
sent while k + 1 is copied. Holds one copy of the weights, on the device that sends them.
"""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from torch import Tensor

from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import Probe
from async_grpo.types import WeightsName
from async_grpo.weights.flatten import digest, flatten
from async_grpo.weights.plan import BucketPlan


class Snapshot:
    """Weights as they are sent; once filled, they do not change until the next publish.

    Args:
        weights: their name.
        plan: what is in which bucket.
        probe: of these weights.
        buckets: [num_bytes] uint8 each, to be overwritten.
    """

    def __init__(
        self, weights: WeightsName, plan: BucketPlan, probe: Probe, buckets: list[Tensor]
    ) -> None:
        self.weights, self.plan, self.probe = weights, plan, probe
        self.buckets = buckets
        self._filled: list[Future[None]] = [Future() for _ in buckets]

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
                filled.set_result(None)
        except BaseException as error:
            failed = WeightSyncError("trainer", str(self.weights), "copy", str(error))
            for filled in self._filled:
                if not filled.done():
                    filled.set_exception(failed)
            raise

    def whole_buckets(self, timeout_s: float) -> Iterator[Tensor]:
        """Each bucket as soon as it is filled.

        Args:
            timeout_s: deadline of each.

        Raises:
            WeightSyncError: it was not filled in time, or never will be.
        """
        for index, (payload, filled) in enumerate(zip(self.buckets, self._filled, strict=True)):
            try:
                filled.result(timeout_s)
            except TimeoutError as error:
                raise WeightSyncError(
                    "trainer",
                    str(self.weights),
                    "copy",
                    f"bucket {index} took over {timeout_s:g} s",
                ) from error
            yield payload

    def digest(self, timeout_s: float) -> str:
        """A hash that tells whether two snapshots of one plan hold the same bytes.

        Reads all of them, so not on the trainer's own thread.
        """
        values = [digest(payload) for payload in self.whole_buckets(timeout_s)]
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
