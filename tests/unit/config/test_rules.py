"""Every rule, broken once: the field is named; and what is only unwise is a warning."""

from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.rules import group_bytes_bound, max_groups, warnings
from async_grpo.errors import ConfigError
from async_grpo.replay.core.settings import CoreSettings


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {output_dir: out, num_train_steps: 10}\npolicy: {model: m}\ntask: {name: reverse}\n"
    )
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


ONE_FIELD = [
    ("run.num_train_steps=0", "run.num_train_steps must be > 0, got 0"),
    ("run.output_dir=''", "run.output_dir must name a directory"),
    ("policy.model=''", "policy.model must name"),
    ("policy.maker=toy", "policy.maker must be package.module:attribute, got 'toy'"),
    ("task.reward=mine", "task.reward must be package.module:attribute, got 'mine'"),
    ("task.reward_workers=0", "task.reward_workers must be > 0"),
    ("task.system_prompt=hi", "task.system_prompt has no effect without task.chat_template=true"),
    ("generation.temperature=0", "generation.temperature must be > 0"),
    ("generation.max_running_groups=-1", "generation.max_running_groups must be >= 0"),
    ("generation.group_size=1", "generation.group_size must be >= 2"),
    ("engine.max_restarts=-1", "engine.max_restarts must be >= 0"),
    ("engine.urls=[host:1]", "engine.urls: 'host:1' must start with http:// or https://"),
    ("engine.kind=vllm", "engine.kind must be embedded, sglang or package.module:attribute, got"),
    ("engine.kind=sglang", "engine.python must name the interpreter of SGLang's environment"),
    ("engine.tensor_parallel_size=2", "engine.tensor_parallel_size (2) needs engine.kind: sglang"),
    ("engine.device_ids=['0','1']", "engine.device_ids must name the devices of each engine: 1 e"),
    ("replay.max_groups=-1", "replay.max_groups must be >= 0"),
    ("trainer.checkpoint_every=-1", "trainer.checkpoint_every must be >= 0"),
    ("trainer.keep_checkpoints=1", "trainer.keep_checkpoints must be >= 2, got 1"),
    ("replay.address=127.0.0.1:5", "replay.address must start with tcp:// or ipc://"),
    ("replay.peer_timeout_s=3.9", "replay.peer_timeout_s (3.9) must be at least twice"),
    ("staleness.max_staleness=-1", "staleness.max_staleness must be >= 0"),
    ("staleness.pipeline_depth=5", "staleness.pipeline_depth (5) must be <= staleness.max_stale"),
    ("staleness.min_fresh_fraction=0", "staleness.min_fresh_fraction must be in (0, 1], got 0"),
    ("staleness.keep_weight_cap=1", "staleness.keep_weight_cap must be > 1, got 1"),
    ("staleness.force=-1", "staleness.force must be >= 0"),
    ("staleness.force=5", "staleness.force (5) must be <= staleness.max_staleness (4)"),
    ("algorithm.clip_low=1", "algorithm.clip_low must be between 0 and 1"),
    ("algorithm.clip_high=0", "algorithm.clip_high must be > 0"),
    ("algorithm.dual_clip=1.28", "algorithm.dual_clip must exceed 1 + clip_high"),
    ("algorithm.kl_coef=-1", "algorithm.kl_coef must be >= 0"),
    ("trainer.attention=fast", "trainer.attention: "),
    ("trainer.beta2=1", "trainer.beta2 must be in [0, 1)"),
    ("trainer.max_grad_norm=0", "trainer.max_grad_norm must be > 0"),
    ("weights.host=0.0.0.0", "weights.host is told to the others: it must be one address"),
    ("weights.engines_per_cell=0", "weights.engines_per_cell must be > 0"),
    ("launch.num_generators=0", "launch.num_generators must be > 0"),
    ("launch.max_restarts=-1", "launch.max_restarts must be >= 0"),
]


@pytest.mark.parametrize(("override", "expected"), ONE_FIELD)
def test_a_field_out_of_range_is_named(base: Path, override: str, expected: str) -> None:
    assert any(expected in problem for problem in problems_of(base, override))


SGLANG = ["engine.kind=sglang", "engine.python=/env/bin/python"]


@pytest.mark.parametrize("flag", ["--port", "--port=30000", "--dp-size", "--api-key", "--config"])
def test_flags_of_sglang_that_other_fields_set_are_refused(base: Path, flag: str) -> None:
    load_config(base, [*SGLANG, "engine.server_args=[--mem-fraction-static,'0.8']"])
    (problem,) = problems_of(base, *SGLANG, f"engine.server_args=['{flag}']")
    assert problem.startswith(f"engine.server_args: {flag.partition('=')[0]} is set by")


def test_sglang_returns_the_log_probs_it_samples_with(base: Path) -> None:
    """Row 11; B032."""
    (problem,) = problems_of(base, *SGLANG, "engine.environment.SGLANG_RETURN_ORIGINAL_LOGPROB=1")
    assert problem.startswith("engine.environment: SGLANG_RETURN_ORIGINAL_LOGPROB makes SGLang")


def test_an_engine_has_a_device_for_each_of_its_ranks(base: Path) -> None:
    two_ranks = [*SGLANG, "engine.tensor_parallel_size=2"]
    load_config(base, [*two_ranks, "engine.device_ids=['0,1']"])
    (problem,) = problems_of(base, *two_ranks, "engine.device_ids=['0']")
    assert problem.startswith("engine.device_ids: '0' are fewer devices than engine.tensor_par")


def test_two_generators_do_not_start_engines_on_the_same_devices(base: Path) -> None:
    devices = [*SGLANG, "engine.device_ids=['0']"]
    (problem,) = problems_of(base, *devices, "launch.num_generators=2")
    assert problem.startswith("engine.device_ids with launch.num_generators (2): every generator")


def test_an_engine_does_not_name_a_card_twice(base: Path) -> None:
    two_ranks = [*SGLANG, "engine.tensor_parallel_size=2"]
    (problem,) = problems_of(base, *two_ranks, "engine.device_ids=['1, 1']")
    assert problem == "engine.device_ids: '1, 1' names card 1 twice"


@pytest.mark.parametrize("entry", ["a b", "1,", "-1", "cuda:1", ""])
def test_what_is_no_card_is_not_handed_to_an_engine(base: Path, entry: str) -> None:
    """CUDA ignores it and all that follows, and the engine would start without a card."""
    found = problems_of(base, *SGLANG, f"engine.device_ids=['{entry}']")
    (problem,) = [text for text in found if "is no card" in text]
    assert problem.startswith("engine.device_ids: ")
    load_config(base, [*SGLANG, "engine.device_ids=['GPU-8932f937']"])
    load_config(base, [*SGLANG, "engine.device_ids=['MIG-1']"])


def test_nccl_is_not_given_a_card_of_trainer_and_engine(base: Path) -> None:
    shared = [*SGLANG, "engine.device_ids=['0']"]
    for device in ("auto", "cuda", "cuda:0"):
        (problem,) = problems_of(base, *shared, "weights.backend=nccl", f"trainer.device={device}")
        assert problem.startswith(
            f"engine.device_ids: card 0 is the trainer's too (trainer.device={device}), and NCCL "
            "refuses a shared card"
        )
    for fine in (
        "weights.backend=gloo", "weights.backend=auto", "weights.transport=http",
        "weights.transport=disk", "trainer.device=cuda:1", "trainer.device=cpu",
        "weights.host=10.0.0.1", "engine.environment.CUDA_VISIBLE_DEVICES='1,2'",
    ):  # fmt: skip
        load_config(base, [*shared, "weights.backend=nccl", fine])


def test_two_engines_of_a_cell_do_not_share_a_card_under_nccl(base: Path) -> None:
    shared = [*SGLANG, "engine.num_engines=2", "engine.device_ids=['1','1']"]
    nccl = [*shared, "weights.backend=nccl"]
    (problem,) = problems_of(base, *nccl, "weights.engines_per_cell=2")
    assert problem.startswith("engine.device_ids: two engines have card 1, and NCCL refuses a")
    for apart in ([*nccl, "weights.engines_per_cell=1"], [*shared, "weights.backend=gloo"]):
        assert [text for text in warnings(load_config(base, apart)) if "device_ids" in text] == [
            "engine.device_ids: two engines have card 1; each takes its --mem-fraction-static of "
            "the memory that is free when it starts"
        ]


def test_no_publish_means_no_progress(base: Path) -> None:
    load_config(base, ["weights.publish_every=3"])
    (problem,) = problems_of(base, "weights.publish_every=4")
    assert problem.startswith("weights.publish_every (4) must be <= staleness.pipeline_depth + 1")


FORCED = [
    ("staleness.pipeline_depth=1", "staleness.pipeline_depth (1) must be left out or equal"),
    ("staleness.draw_order=completion", "staleness.draw_order=completion has no effect with"),
    ("staleness.draw_order=ticket", "staleness.draw_order=ticket has no effect with"),
    ("replay.max_groups=47", "replay.max_groups (47) must be at least 48 ((force + 1)"),
    ("staleness.keep_weight_cap=3", "staleness.keep_weight_cap has no effect with"),
    ("weights.publish_every=2", "weights.publish_every (2) must be 1 with staleness.force"),
]


@pytest.mark.parametrize(("override", "expected"), FORCED)
def test_forced_staleness_leaves_no_choice(base: Path, override: str, expected: str) -> None:
    (problem,) = problems_of(base, "staleness.force=2", override)
    assert problem.startswith(expected)


def test_forced_staleness_resolves_depth_and_order(base: Path) -> None:
    config = load_config(base, ["staleness.force=3"])
    assert (config.staleness.depth, config.staleness.order) == (3, "oldest_version")
    settings = CoreSettings.from_config(config)
    assert (settings.forced, settings.pipeline_depth) == (True, 3)
    assert settings.draw_order == "oldest_version"


def test_the_buffer_holds_one_step(base: Path) -> None:
    largest = group_bytes_bound(load_config(base))
    assert largest == 8 * 8 * 256
    load_config(base, [f"replay.max_bytes={16 * largest}"])
    (problem,) = problems_of(base, f"replay.max_bytes={16 * largest - 1}")
    assert problem.startswith("replay.max_bytes")
    assert f"at least {16 * largest}" in problem


def test_with_ticket_order_the_buffer_holds_a_window(base: Path) -> None:
    window = 3 * 16 * group_bytes_bound(load_config(base))
    in_order = "staleness.draw_order=ticket"
    load_config(base, [f"replay.max_bytes={window}", in_order])
    (problem,) = problems_of(base, f"replay.max_bytes={window - 1}", in_order)
    assert "draw_order=ticket" in problem


def test_the_limit_in_groups_holds_one_step(base: Path) -> None:
    load_config(base, ["replay.max_groups=16"])
    (problem,) = problems_of(base, "replay.max_groups=15")
    assert problem.startswith("replay.max_groups (15) must be at least 16")


def test_the_default_limit_in_groups_is_the_window_and_a_step(base: Path) -> None:
    assert max_groups(load_config(base)) == 3 * 16 + 16
    assert max_groups(load_config(base, ["replay.max_groups=20"])) == 20


def test_a_full_group_fits(base: Path) -> None:
    (problem,) = problems_of(base, "replay.max_group_bytes=16383")
    assert problem.startswith("replay.max_group_bytes (16383) is below the 16384 bytes")


def test_no_more_updates_than_groups(base: Path) -> None:
    (problem,) = problems_of(base, "trainer.updates_per_step=17")
    assert problem.startswith("trainer.updates_per_step (17) must be <= replay.groups_per_step")


def test_a_good_configuration_has_no_warning(base: Path) -> None:
    assert warnings(load_config(base)) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["staleness.pipeline_depth=3"], "staleness.max_staleness (4) is below twice"),
        (["engine.urls=[http://a:1]", "engine.num_engines=2"], "engine.num_engines has no effect"),
        (["engine.urls=[http://a:1]", "engine.python=p"], "engine.python has no effect with engi"),
        (
            ["engine.kind=sglang", "engine.python=p", "run.no_progress_timeout_s=600"],
            "run.no_progress_timeout_s (600) is not above engine.start_timeout_s (600)",
        ),
        (["engine.server_args=['--x']"], "engine.server_args has no effect with engine.kind: em"),
        (["staleness.min_fresh_fraction=0.9"], "staleness.min_fresh_fraction has no effect"),
        (["policy.maker_options.a=1"], "policy.maker_options has no effect"),
        (["task.name=jsonl", "task.chat_template=true"], "task.reward is left to jsonl, whose own"),
    ],
)
def test_what_is_unwise_is_a_warning(base: Path, overrides: list[str], expected: str) -> None:
    (warning,) = warnings(load_config(base, overrides))
    assert expected in warning


def test_a_reward_or_plain_completions_make_exact_answers_possible(base: Path) -> None:
    chat = ["task.name=jsonl", "task.chat_template=true"]
    assert warnings(load_config(base, [*chat, "task.reward=mine:reward"])) == []
    assert warnings(load_config(base, ["task.name=jsonl"])) == []


@pytest.mark.parametrize(
    "urls",
    ["http://a:1,http://a:1", "http://a:1,http://A:1/", "http://localhost:1,http://127.0.0.1:1"],
)
def test_one_server_given_twice_is_refused(base, urls):
    (problem,) = problems_of(base, f"engine.urls=[{urls}]")
    assert problem.startswith("engine.urls names 'http://")
    assert "twice: two slots would drive one server" in problem


def test_different_servers_are_no_problem(base):
    config = load_config(base, ["engine.urls=[http://a:1,http://a:2,http://b:1]"])
    assert len(config.engine.urls) == 3


def test_several_generators_do_not_share_attached_servers(base):
    (problem,) = problems_of(base, "engine.urls=[http://a:1]", "launch.num_generators=2")
    assert problem.startswith("engine.urls with launch.num_generators (2): every generator would")
