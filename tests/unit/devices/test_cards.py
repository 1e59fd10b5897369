"""Who gets which card: by default, through an outer CUDA_VISIBLE_DEVICES, and without cards."""

from pathlib import Path

import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.devices.cards import look_up_all, place_engines, placement, visible_cards
from async_grpo.errors import ConfigError
from tests.fakes.machine import make_machine


def config(device: str = "auto", **engine: object) -> Config:
    return Config(
        run=RunSection(output_dir="out", num_train_steps=1),
        policy=PolicySection(model="m"),
        task=TaskSection(name="reverse"),
        engine=EngineSection(**{"kind": "sglang", "python": "p"} | engine),
        trainer=TrainerSection(device=device),
    )


def placed(
    made: Config, root: Path, outer: str | None = None, *, here: bool = True, generators: int = 1
) -> list[list[str]]:
    environ = {} if outer is None else {"CUDA_VISIBLE_DEVICES": outer}
    ids = place_engines(made, environ, trainer_here=here, num_generators=generators, root=root)
    return [look_up_all(each, made.engine, environ, root) for each in ids]


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    return make_machine(tmp_path, 8)


def test_engines_do_not_all_start_on_the_first_card_beside_the_trainer(eight):
    assert placed(config(num_engines=7), eight) == [["1", "2", "3", "4", "5", "6", "7"]]
    assert placed(config("cuda:2", num_engines=3), eight) == [["0", "1", "3"]]
    assert placed(config("cpu", num_engines=2), eight) == [["0", "1"]]
    assert placed(config(num_engines=8), eight, here=False)[0][0] == "0"


def test_an_engine_of_several_ranks_gets_a_slice(eight):
    made = config(num_engines=3, tensor_parallel_size=2)
    assert placed(made, eight) == [["1,2", "3,4", "5,6"]]


def test_several_generators_of_a_machine_do_not_take_the_same_cards(eight):
    assert placed(config(num_engines=2), eight, generators=2) == [["1", "2"], ["3", "4"]]
    with pytest.raises(ConfigError, match=r"launch\.num_generators \(3\): engines need 9 cards"):
        placed(config(num_engines=3), eight, generators=3)


def test_a_number_is_no_card_of_somebody_else_under_an_outer_list(eight):
    made = config(num_engines=2, device_ids=["1", "2,3"])
    assert placed(made, eight, "4,5,6,7") == [["5", "6,7"]]
    assert placed(config(num_engines=3), eight, "4,5,6,7") == [["5", "6", "7"]]
    names = "GPU-a,MIG-b,GPU-c"
    assert placed(config(num_engines=2), eight, names) == [["MIG-b", "GPU-c"]]


def test_names_of_cards_are_taken_as_they_are(eight):
    made = config(num_engines=2, device_ids=["GPU-8932f937", "MIG-1, 0"])
    assert placed(made, eight, "4,5") == [["GPU-8932f937", "MIG-1,4"]]


def test_a_number_beyond_the_cards_is_refused_with_their_number(eight, tmp_path):
    made = config(num_engines=2, device_ids=["1", "4"])
    with pytest.raises(ConfigError, match=r"card 4 of engine 1 is beyond the 4 cards of CUDA_VISI"):
        placed(made, eight, "4,5,6,7")
    with pytest.raises(ConfigError, match="card 9 of engine 0 is beyond the 8 cards of this mach"):
        placed(config(device_ids=["9"]), eight)
    # somebody else's accelerators: nothing is known of them
    assert placed(config(device_ids=["9"]), tmp_path / "none") == [["9"]]


def test_too_few_cards_are_refused_with_the_counts(tmp_path):
    one = make_machine(tmp_path, 1)
    with pytest.raises(ConfigError) as caught:
        placed(config(num_engines=2), one)
    assert str(caught.value).startswith(
        "engine.num_engines (2): engines need 2 cards beside the trainer's, and 0 of the 1 card of "
        "this machine are left: start fewer,"
    )
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size \(2\): engines need 2"):
        placed(config("cpu", tensor_parallel_size=2), one)
    assert placed(config("cpu"), one) == [["0"]]
    with pytest.raises(ConfigError, match="0 of the 0 cards of CUDA_VISIBLE_DEVICES= are left"):
        placed(config(), one, "")


def test_one_card_can_be_shared_where_that_is_asked_for(tmp_path):
    assert placed(config(device_ids=["0"]), make_machine(tmp_path, 1)) == [["0"]]


def test_engines_that_compute_elsewhere_are_not_placed(tmp_path):
    one = make_machine(tmp_path, 1)
    for args in (["--device=cpu"], ["--device", "cpu"]):
        assert placed(config(num_engines=4, server_args=args), one) == [[]]
    assert placed(config(kind="embedded", num_engines=4), one) == [[]]
    assert placed(config(urls=["http://a:1"]), one) == [[]]


def test_without_a_known_card_one_rank_is_left_to_sglang_and_several_are_refused(tmp_path):
    assert placed(config(), tmp_path) == [[]]
    with pytest.raises(ConfigError, match="0 of the 0 cards of this machine are left"):
        placed(config(num_engines=2), tmp_path)


def test_the_environment_of_engines_may_have_a_list_of_its_own(eight):
    made = config(num_engines=2, environment={"CUDA_VISIBLE_DEVICES": "0,6,7"})
    assert placed(made, eight) == [["6", "7"]]


def test_what_cuda_ignores_is_no_card(eight):
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "3,-1,4"}, eight).names == ("3",)
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "-1"}, eight).names == ()
    assert len(visible_cards({}, eight).names) == 8


def test_check_says_who_gets_which_card(eight, tmp_path):
    def said(made: Config, root: Path, **environ: str) -> str:
        return placement(made, environ, trainer_here=True, root=root)

    made = config(num_engines=2)
    assert said(made, eight) == "trainer 0; engines 1 | 2 of the 8 cards of this machine"
    outer = said(made, eight, CUDA_VISIBLE_DEVICES="4,5,6")
    assert outer == "trainer 4; engines 5 | 6 of the 3 cards of CUDA_VISIBLE_DEVICES=4,5,6"
    few = said(config(num_engines=9), eight)
    assert few.startswith("a start on this machine would be refused: engine.num_engines (9): ")
    assert said(made, tmp_path / "none") == (
        "trainer 0; engines 1 each of the others, in order; this machine has none"
    )
    assert said(config("cpu", device_ids=["1"]), eight).startswith("trainer on cpu; engines 1 of ")
    named = said(config(device_ids=["3"]), tmp_path / "none")
    assert named == "trainer 0; engines 3; this machine has none"
