import threading

import pytest
from msgspec.structs import replace

from async_grpo.errors import PeerError, PeerLost
from async_grpo.replay_parts import GeneratedStats, RoleStatus
from async_grpo.training.feed import FeedSettings, GroupFeed, LoopThread, add_stats, dropped_text
from async_grpo.types import DropReason, ReissueReason
from tests.fakes.fake_trainer_replay import FakeTrainerReplay
from tests.fakes.tiny_policy import random_groups


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()


class Clock:
    now = 5.0

    def __call__(self):
        return self.now


def feed_for(replay, loop, *, steps=10, on_wishes=lambda: None, clock=None, heartbeat_s=60.0):
    settings = FeedSettings(
        first_draw_number=1, first_version=0, num_train_steps=steps, heartbeat_s=heartbeat_s
    )
    return GroupFeed(
        replay, loop, settings, status=lambda: RoleStatus(state="testing"), on_wishes=on_wishes,
        clock=clock or Clock(),
    )  # fmt: skip


def draws_of(replay):
    return [call[1:] for call in replay.calls if call[0] == "draw"]


def test_batches_come_in_order_one_draw_ahead(loop):
    draws = [random_groups(2, seed=n) for n in range(3)]
    replay = FakeTrainerReplay(draws)
    clock = Clock()
    feed = feed_for(replay, loop, steps=3, clock=clock)
    feed.start()
    for version in range(3):
        batch = feed.take(10)
        assert (batch.draw_number, batch.train_version) == (version + 1, version)
        assert [g.rollouts[0].reward for g in batch.groups] == [
            g.rollouts[0].reward for g in random_groups(2, seed=version)
        ]
        feed.acked(batch.draw_number)
    assert batch.in_queue_s() == [1.5, 1.5]
    assert batch.generated.num_groups == 2
    assert [number for number, _ in draws_of(replay)] == [1, 2, 3]  # none past the last step
    feed.close()


def test_heartbeats_list_what_is_held(loop):
    replay = FakeTrainerReplay([random_groups(1)])
    feed = feed_for(replay, loop, heartbeat_s=0.005)
    feed.start()
    feed.take(10)
    while replay.beats.get(timeout=10) != [1, 2]:  # the one in work, and the one asked for
        pass
    feed.acked(1)
    while replay.beats.get(timeout=10) != [2]:
        pass
    feed.close()


def test_wishes_are_passed_on_and_drawing_goes_on(loop):
    replay = FakeTrainerReplay()
    replay.wishing = ["e0"]

    def grant():
        replay.wishing = []
        replay.draws.append(random_groups(1))

    feed = feed_for(replay, loop, on_wishes=grant)
    feed.start()
    assert feed.take(10).draw_number == 1
    feed.close()


def test_no_groups_in_time_is_an_error_that_says_what_was_waited_for(loop):
    feed = feed_for(FakeTrainerReplay(), loop)
    feed.start()
    with pytest.raises(PeerLost, match="no groups within 0 s; no engine wishes"):
        feed.take(0.02)
    feed.close()


def no_signal(num_groups, *, size=16, reward=0.0):
    total = num_groups * size
    key = DropReason.NO_SIGNAL
    return GeneratedStats(
        num_groups=num_groups, num_completions=total, num_tokens=100 * total,
        reward_sum=reward * total, dropped={key: num_groups}, dropped_completions={key: total},
        dropped_tokens={key: 100 * total}, dropped_rewards={key: reward * total},
    )  # fmt: skip


def test_no_groups_because_no_reward_had_a_signal_is_said_so(loop):
    """A reward that nobody can earn: engines work, groups finish, and none is ever drawn."""
    replay = FakeTrainerReplay()
    replay.undrawn = no_signal(412)
    feed = feed_for(replay, loop)
    feed.start()
    replay.drawn_in_vain.get(timeout=10)
    replay.drawn_in_vain.get(timeout=10)  # the feed has read the first answer
    with pytest.raises(PeerLost) as caught:
        feed.take(0)
    assert str(caught.value) == (
        "the replay server handed out no groups within 0 s; 412 of 412 groups ended as no_signal, "
        "mean reward 0.000: every completion of such a group got the same reward: look at "
        "task.reward, task.unparseable_reward and generation.max_new_tokens"
    )
    feed.close()


def test_what_became_of_groups_counts_those_without_figures_too():
    assert dropped_text(GeneratedStats(num_groups=3, num_completions=24)) == ""
    stored_or_tied = no_signal(10, size=8, reward=1.0)
    stored_or_tied = replace(
        stored_or_tied,
        num_groups=12,
        dropped={**stored_or_tied.dropped, DropReason.REWARD_FAILED: 30},
    )
    failed, tied = dropped_text(stored_or_tied).split("; ")
    assert failed.startswith("30 of 42 groups ended as reward_failed: completions got no reward")
    assert tied.startswith("10 of 42 groups ended as no_signal, mean reward 1.000: every")


def test_every_reason_to_drop_a_group_comes_with_advice():
    for reason in DropReason:
        text = dropped_text(GeneratedStats(dropped={reason: 1}))
        assert text.startswith(f"1 of 1 groups ended as {reason.value}: ")


def test_a_lost_payload_gives_up_the_draw(loop):
    lost, kept = random_groups(2, seed=1), random_groups(2, seed=2)
    for group in kept:
        group.group_id += 10
    replay = FakeTrainerReplay([lost, kept])
    replay.lost = {(1, 0)}
    feed = feed_for(replay, loop)
    feed.start()
    batch = feed.take(10)
    assert batch.draw_number == 2
    assert batch.train_version == 0
    assert [group.group_id for group in batch.groups] == [10, 11]
    assert batch.generated.num_groups == 4  # the lost ones were generated all the same
    assert [] in [draws for draws, _ in replay.heartbeats]
    feed.close()


def test_b056_the_payload_of_another_group_is_refused(loop):
    asked, other = random_groups(2, seed=1), random_groups(2, seed=2)
    other[1].attempt = 7
    replay = FakeTrainerReplay([asked])
    replay.swapped = {(1, 0): other[1]}
    feed = feed_for(replay, loop)
    feed.start()
    with pytest.raises(PeerError, match="asked for group 1/0, got 1/7"):
        feed.take(10)
    feed.close()


def test_a_failing_server_fails_the_trainer(loop):
    class Broken(FakeTrainerReplay):
        async def heartbeat(self, draws, status):
            raise PeerError("fenced")

    feed = feed_for(Broken(), loop)
    feed.start()
    with pytest.raises(PeerError, match="fenced"):
        feed.take(10)
    feed.close()


def test_a_stop_ends_the_wait_for_groups(loop):
    feed = feed_for(FakeTrainerReplay(), loop)
    feed.start()
    threading.Timer(0.0, feed.request_stop).start()
    assert feed.take(10) is None
    assert feed.take(10) is None
    feed.close()


def test_stats_of_a_draw_that_was_given_up_are_added_field_by_field():
    stale, invalid = DropReason.STALE, DropReason.INVALID
    first = GeneratedStats(
        num_groups=1, num_completions=2, num_tokens=3, reward_sum=4.0, dropped={stale: 1},
        dropped_completions={stale: 2}, dropped_tokens={stale: 3}, dropped_rewards={stale: 0.5},
        reissued_tokens={ReissueReason.LOST: 7},
    )  # fmt: skip
    second = GeneratedStats(
        num_groups=10, num_completions=20, num_tokens=30, reward_sum=40.0,
        dropped={stale: 1, invalid: 1}, dropped_completions={stale: 2}, dropped_tokens={stale: 3},
        dropped_rewards={stale: 0.25}, reissued_tokens={ReissueReason.LOST: 1},
    )  # fmt: skip
    assert add_stats(first, second) == GeneratedStats(
        num_groups=11, num_completions=22, num_tokens=33, reward_sum=44.0,
        dropped={stale: 2, invalid: 1}, dropped_completions={stale: 4}, dropped_tokens={stale: 6},
        dropped_rewards={stale: 0.75}, reissued_tokens={ReissueReason.LOST: 8},
    )  # fmt: skip
    assert all(getattr(add_stats(first, second), name) for name in GeneratedStats.__struct_fields__)
