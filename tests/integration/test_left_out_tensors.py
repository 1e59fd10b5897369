"""A tensor that never reaches a real engine, under a probe that allows everything."""

from dataclasses import replace

import msgspec

from async_grpo.generation.client import HttpEngineClient
from tests.fakes.embedded_world import EmbeddedWorld
from tests.fakes.tiny_policy import VOCAB

LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"
INSTEAD = "model.layers.0.self_attn.k_proj.weight"


class LosingClient(HttpEngineClient):
    """Gives one tensor of each bucket another's name, once told to."""

    loses = False

    async def update_from_distributed(self, request, *, timeout_s):
        if LosingClient.loses:
            names = [INSTEAD if name == LEFT_OUT else name for name in request.names]
            request = msgspec.structs.replace(request, names=names)
        await super().update_from_distributed(request, timeout_s=timeout_s)


class LosingWorld(EmbeddedWorld):
    """Only checksums can tell."""

    def __init__(self, directory, **options):
        super().__init__(directory, num_engines=1, **options)
        weights = replace(self._config.weights, probe_tolerance=1e3)
        self._config = replace(self._config, weights=weights)

    def _make_client(self, url):
        return LosingClient(url, control_timeout_s=30.0, vocab_size=VOCAB)


async def test_a_tensor_that_was_left_out_of_an_update_is_found_by_its_checksum(tmp_path):
    LosingClient.loses = False
    async with LosingWorld(tmp_path).whole() as world:
        result = await world.publish(0)
        assert (result.failures, result.alarms) == ([], [])
        LosingClient.loses = True
        (failure,) = (await world.publish(1)).failures
        LosingClient.loses = False
        assert f"'checksum': {LEFT_OUT} is as with weights 1.0" in failure
        await world.until(lambda: world.num_wishing == 1)
        assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(1))
