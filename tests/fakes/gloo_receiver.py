"""An engine's end of weight sync in another process: one JSON line in, one out, per publish."""

import json
import sys

import torch

from async_grpo.errors import WeightSyncError
from async_grpo.weights.group import join_group


def main() -> None:
    group = None
    for line in sys.stdin:
        order = json.loads(line)
        rendezvous = order["rendezvous"]
        try:
            if rendezvous.pop("fresh"):
                if group is not None:
                    group.close()
                group = join_group(rank=1, timeout_s=20.0, **rendezvous)
            received = []
            for size in order["sizes"]:
                payload = torch.empty(size, dtype=torch.uint8)
                group.broadcast(payload)
                received += payload.view(torch.float32).tolist()
        except WeightSyncError as error:
            received = [str(error)]
        print(json.dumps(received), flush=True)


if __name__ == "__main__":
    main()
