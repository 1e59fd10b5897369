"""max_staleness = 0 is a synchronous loop: the whole trainer role against a naive one, float64.

The naive loop below shares no code with the package: it samples, scores, computes the loss token
by token and steps torch's AdamW. Its groups are then served through the real replay server to the
real trainer role, whose losses must be the same. Log-probs travel as float32, so the naive loop
rounds them too.
"""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.staleness import DrawOrder, StalenessSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.replay.server import ReplayServer
from async_grpo.roles import trainer
from async_grpo.training.feed import LoopThread
from async_grpo.types import (
    Completion,
    FinishReason,
    InsertOutcome,
    Rollout,
    RolloutGroup,
    Segment,
    WeightsName,
)
from tests.fakes.replay_harness import at_address, replay_config
from tests.fakes.scripted_generator import ScriptedGenerator
from tests.fakes.tiny_policy import VOCAB, tiny_module

STEPS, GROUPS, SIZE, LENGTH, LR, TEMPERATURE = 3, 2, 4, 6, 1e-2, 0.8


def sample(module, prompt, generator):
    """(ids, float32 log-probs), one token at a time, the whole prefix each time."""
    ids, logprobs = list(prompt), []
    count = int(torch.randint(2, LENGTH + 1, (), generator=generator))
    with torch.no_grad():
        for _ in range(count):
            logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            distribution = (logits / TEMPERATURE).log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(np.float32(distribution[token]))
    return ids[len(prompt) :], logprobs


def synchronous_loop(module):
    """[(groups, loss)] of each step; `module` is trained."""
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.01)
    history = []
    for _ in range(STEPS):
        groups = []
        for _ in range(GROUPS):
            prompt = torch.randint(0, VOCAB, (3,), generator=generator).tolist()
            members = [(prompt, *sample(module, prompt, generator)) for _ in range(SIZE)]
            rewards = [sum(ids) / len(ids) + 0.1 * len(ids) for _, ids, _ in members]
            groups.append((members, rewards))
        total, count = 0.0, 0
        for members, rewards in groups:
            mean = sum(rewards) / SIZE
            deviation = (sum((r - mean) ** 2 for r in rewards) / SIZE) ** 0.5
            for (prompt, ids, logprobs), reward in zip(members, rewards, strict=True):
                advantage = (reward - mean) / (deviation + 1e-8)
                whole = torch.tensor([prompt + ids])
                logits = module(input_ids=whole, use_cache=False).logits[0] / TEMPERATURE
                for index, (token, behavior) in enumerate(zip(ids, logprobs, strict=True)):
                    policy = logits[len(prompt) + index - 1].log_softmax(-1)[token]
                    weight = min(float(torch.exp(policy.detach() - float(behavior))), 2.0)
                    total = total - weight * advantage * torch.exp(policy - policy.detach())
                    count += 1
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        history.append((groups, float(loss.detach())))
    return history


def recorded(history):
    """A function from ticket to the group that the naive loop made in its place."""

    def group_for(ticket, weights: WeightsName):
        step, position = divmod(ticket.group_id, GROUPS)
        assert weights.policy_version == step, "lockstep: a group of a step needs its weights"
        members, rewards = history[step][0][position]
        rollouts = [
            Rollout(
                [
                    Completion(
                        prompt_token_ids=np.array(prompt, dtype=np.int32),
                        token_ids=np.array(ids, dtype=np.int32),
                        behavior_logprobs=np.array(logprobs, dtype=np.float32),
                        segments=[Segment(weights, len(ids))],
                        finish_reason=FinishReason.STOP,
                        temperature=TEMPERATURE,
                    )
                ],
                reward,
            )
            for (prompt, ids, logprobs), reward in zip(members, rewards, strict=True)
        ]
        return RolloutGroup(ticket.group_id, ticket.attempt, ticket.prompt_index, rollouts)

    return group_for


@pytest.fixture
def loop():
    thread = LoopThread("others")
    yield thread
    thread.close()


async def start_server(config, box):
    server = ReplayServer(config)
    box["server"] = server
    box["serving"] = asyncio.create_task(server.serve())
    return server.address


async def start_generator(config, group_for, box):
    box["generator"] = ScriptedGenerator(config, group_for)
    box["generating"] = asyncio.create_task(box["generator"].run())


async def stop(box):
    await asyncio.wait_for(box["generating"], 10)
    box["server"].stop("the test is over")
    await asyncio.wait_for(box["serving"], 10)
    box["server"].close()


def lockstep_config(tmp_path):
    config = replay_config(tmp_path / "run", group_size=SIZE, num_tokens=LENGTH)
    return replace(
        config,
        run=replace(config.run, num_train_steps=STEPS),
        policy=PolicySection(model=str(tmp_path / "model"), dtype=DType.float64),
        staleness=StalenessSection(max_staleness=0, draw_order=DrawOrder.ticket),
        trainer=TrainerSection(lr=LR, weight_decay=0.01, tokens_per_microbatch=30),
        metrics=replace(config.metrics, tensorboard=False),
    )


def test_lockstep_equals_a_synchronous_loop(tmp_path, loop):
    module = tiny_module()
    module.save_pretrained(tmp_path / "model")
    history = synchronous_loop(module)
    config, box = lockstep_config(tmp_path), {}
    config = at_address(config, loop.call(start_server(config, box)))
    loop.call(start_generator(config, recorded(history), box))

    trainer.main(config)

    loop.call(stop(box))
    directory = RunDirectory(tmp_path / "run")
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert losses == pytest.approx([loss for _, loss in history], rel=1e-9, abs=1e-9)
    assert [line["staleness/max"] for line in lines] == [0] * STEPS
    assert all(line["logprob/lag0_gap"] < 1e-6 for line in lines)
    rewards = [np.mean([r for _, group in groups for r in group]) for groups, _ in history]
    assert [line["reward/trained_mean"] for line in lines] == pytest.approx(rewards)
    assert box["generator"].outcomes == [InsertOutcome.STORED] * (STEPS * GROUPS)
    assert [name.policy_version for name in box["generator"].published] == [0, 1, 2, 3]
    witness = [json.loads(line) for line in directory.steps.read_text().splitlines()]
    assert [line["step"] for line in witness] == [0, 1, 2]
    assert [[g["group_id"] for g in line["groups"]] for line in witness] == [[0, 1], [2, 3], [4, 5]]
    assert [line["num_tokens"] for line in witness] == [line["tokens/trained"] for line in lines]
    final = AutoModelForCausalLM.from_pretrained(directory.final_model, dtype=torch.float64)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(final.state_dict()[name], tensor, rtol=1e-7, atol=1e-9)
