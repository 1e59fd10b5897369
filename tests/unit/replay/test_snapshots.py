"""A snapshot spares records, and is never believed over the ledger."""

import itertools
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from async_grpo.replay.core import image
from async_grpo.replay.core.core import ReplayCore
from async_grpo.replay.core.image import decode_state, encode_state, fingerprint
from async_grpo.replay.core.records import EvalClaimed, EvalEnded, decode_record, encode_record
from async_grpo.replay.core.state import State
from async_grpo.replay.snapshots import Snapshots
from async_grpo.replay.store import Ledger
from async_grpo.replay_parts import EndStats
from async_grpo.types import WeightsName
from tests.unit.replay_core.driver import Driver, settings
from tests.unit.replay_core.test_restore import eventful


def state_of(driver: Driver, records) -> State:
    state = ReplayCore(driver.settings).state
    for record in records:
        state.evolve(record)
    return state


def test_an_image_and_the_records_after_it_make_the_state_that_all_records_make():
    driver = eventful()
    assert driver.ledger
    for length in range(len(driver.ledger) + 1):
        before = encode_state(state_of(driver, driver.ledger[:length]))
        state = decode_state(before, driver.settings)
        assert encode_state(state) == before, "nothing is in another order"
        for record in driver.ledger[length:]:
            state.evolve(record)
        assert state == driver.core.state


def test_an_evaluation_round_is_part_of_an_image():
    driver = Driver(settings(eval_every=1, eval_num_prompts=2)).ready()
    weights = WeightsName(1, 0)
    stats = EndStats(num_completions=1, num_tokens=7, reward_sum=1.0)
    claim = {"instance": "g#1", "generator": "g"}
    before = state_of(driver, driver.ledger)
    assert before.evals.num_open == 2
    before.evolve(EvalClaimed(group_id=-1, attempt=1, number=1, **claim))
    ended = EvalEnded(group_id=-1, attempt=1, stats=stats, weights_tokens=[(weights, 7)])
    before.evolve(ended)
    after = decode_state(encode_state(before), driver.settings)
    assert after == before
    for state in (before, after):
        state.evolve(EvalClaimed(group_id=-2, attempt=1, number=2, **claim))
        state.evolve(replace_struct(ended, group_id=-2))
    (result,) = after.evals.results
    assert (result.num_evaluated, result.weights_tokens) == (2, [(weights, 14)])
    assert after == before


def test_tickets_of_an_image_are_the_same_objects_in_the_book_and_in_its_phases():
    driver = eventful()
    book = decode_state(encode_state(driver.core.state), driver.settings).book
    for ticket in itertools.chain.from_iterable(phase.values() for phase in book.by_phase.values()):
        assert book.tickets[ticket.group_id] is ticket


class Place:
    """A ledger of a run, and its snapshot."""

    def __init__(self, tmp_path, driver: Driver) -> None:
        self.driver = driver
        self.path = tmp_path / "ledger.snapshot"
        self.snapshots = Snapshots(self.path, driver.settings)
        self.ledger_path = tmp_path / "ledger.jsonl"
        self.ledger = Ledger(self.ledger_path)
        self.lines = [encode_record(record) for record in driver.ledger]

    def save_after(self, num_records: int) -> None:
        self.ledger.append(self.lines[:num_records])
        state = state_of(self.driver, self.driver.ledger[:num_records])
        self.snapshots.save(state, self.ledger, num_records)
        self.ledger.append(self.lines[num_records:])

    def restored(self) -> State:
        found = self.snapshots.load(self.ledger)
        assert found is not None
        for line in self.ledger.lines(found.offset):
            found.state.evolve(decode_record(line))
        return found.state


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path, eventful())
    yield place
    place.ledger.close()


def test_a_start_reads_only_what_the_snapshot_lacks(place):
    assert place.snapshots.load(place.ledger) is None
    place.save_after(10)
    found = place.snapshots.load(place.ledger)
    assert found is not None
    assert found.num_records == 10
    assert len(list(place.ledger.lines(found.offset))) == len(place.lines) - 10
    assert place.restored() == place.driver.core.state


def test_a_ledger_that_lost_its_end_is_read_from_its_beginning(place):
    place.save_after(10)
    offset = place.snapshots.load(place.ledger).offset
    place.ledger.close()
    with place.ledger_path.open("r+b") as file:
        file.truncate(offset - 3)
    place.ledger = Ledger(place.ledger_path)
    assert place.snapshots.load(place.ledger) is None
    assert not place.path.exists(), "it must not be taken for one of what is appended next"


def test_another_ledger_is_read_from_its_beginning(place):
    place.save_after(10)
    place.ledger.close()
    content = place.ledger_path.read_bytes()
    place.ledger_path.write_bytes(content.replace(b'"g#1"', b'"g#2"'))
    place.ledger = Ledger(place.ledger_path)
    assert place.snapshots.load(place.ledger) is None


@pytest.mark.parametrize("content", [b"", b"\xff\xff", "cut", "flipped"])
def test_a_damaged_snapshot_is_of_no_use(place, content):
    place.save_after(10)
    whole = bytearray(place.path.read_bytes())
    if content == "cut":
        content = whole[: len(whole) // 2]
    elif content == "flipped":
        whole[-20] ^= 1
        content = whole
    place.path.write_bytes(bytes(content))
    assert place.snapshots.load(place.ledger) is None
    assert not place.path.exists()


def test_a_snapshot_of_other_code_or_settings_is_of_no_use(place, monkeypatch):
    place.save_after(10)
    other = Snapshots(place.path, replace(place.driver.settings, seed=7))
    content = place.path.read_bytes()
    assert other.load(place.ledger) is None
    place.path.write_bytes(content)
    monkeypatch.setattr(image, "_source_digest", lambda: "of another version")
    assert place.snapshots.load(place.ledger) is None


def test_a_setting_that_states_do_not_begin_with_changes_nothing():
    assert fingerprint(settings()) == fingerprint(settings(num_train_steps=9))


def test_a_full_disk_costs_the_snapshot_only(place, caplog):
    gone = place.path.with_name("gone") / "ledger.snapshot"  # stands for a file without room
    place.snapshots = Snapshots(gone, place.driver.settings)
    place.save_after(10)
    assert len(list(place.ledger.lines())) == len(place.lines)
    assert not gone.exists()
    assert "no snapshot of the ledger" in caplog.text


def test_names_of_weights_come_back_as_names(place):
    place.save_after(len(place.lines))
    live = place.restored().versions.live
    assert live == WeightsName(1, 1)
    assert isinstance(live, WeightsName)
