"""Pins how a configuration is read: OmegaConf's behavior included, where we rely on it."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from async_grpo.config.load import agreement_digest, load_config, resolve_object, to_yaml
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError

BASE = {
    "run": {"output_dir": "out", "num_train_steps": 10},
    "policy": {"model": "some/model"},
    "task": {"name": "reverse"},
}


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, BASE)


def test_defaults_and_types(base: Path) -> None:
    config = load_config(base)
    assert type(config) is Config
    assert (config.staleness.max_staleness, config.staleness.depth) == (4, 2)
    assert config.engine.urls == []


def test_an_override_wins_over_the_file(base: Path) -> None:
    config = load_config(
        base, ["run.num_train_steps=20", "trainer.lr=3e-4", "engine.urls=[http://a:1]"]
    )
    assert config.run.num_train_steps == 20
    assert config.trainer.lr == 3e-4
    assert config.engine.urls == ["http://a:1"]


def test_the_last_override_of_a_key_wins(base: Path) -> None:
    assert load_config(base, ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_enums_are_matched_by_name(base: Path) -> None:
    config = load_config(base, ["staleness.draw_order=ticket", "policy.dtype=bfloat16"])
    assert config.staleness.draw_order == "ticket"
    assert config.policy.dtype == "bfloat16"
    (problem,) = problems_of(base, "staleness.draw_order=Ticket")
    assert "staleness.draw_order" in problem


def test_free_options_keep_their_types(base: Path) -> None:
    config = load_config(base, ["task.options.length=4", "task.options.letters=abc"])
    assert config.task.options == {"length": 4, "letters": "abc"}


def test_a_value_may_refer_to_another(base: Path) -> None:
    config = load_config(base, ["policy.model=${run.output_dir}/first"])
    assert config.policy.model == "out/first"


def test_an_optional_number_may_be_null(base: Path) -> None:
    assert load_config(base, ["staleness.pipeline_depth=null"]).staleness.depth == 2
    assert load_config(base, ["staleness.pipeline_depth=1"]).staleness.depth == 1


@pytest.mark.parametrize(("bound", "depth"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2), (8, 4)])
def test_the_default_depth_leaves_head_room(base: Path, bound: int, depth: int) -> None:
    assert load_config(base, [f"staleness.max_staleness={bound}"]).staleness.depth == depth


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.learning_rate=1", "trainer.learning_rate"),
        ("trainr.lr=1", "trainr"),
        ("trainer.lr=fast", "trainer.lr"),
        ("run.num_train_steps=1.5", "run.num_train_steps"),
        ("staleness.max_staleness=[1]", "staleness.max_staleness"),
        ("run=5", "run"),
        ("trainer.lr", "'trainer.lr' must have the form section.key=value"),
        ("=1", "must have the form section.key=value"),
    ],
)
def test_what_does_not_fit_is_named(base: Path, override: str, named: str) -> None:
    problems = problems_of(base, override)
    assert len(problems) == 1
    assert named in problems[0]


def test_required_keys_are_named(tmp_path: Path) -> None:
    problems = problems_of(write(tmp_path, {"run": {"output_dir": "out"}}))
    named = {problem.split()[0] for problem in problems}
    assert named == {"run.num_train_steps", "policy.model", "task.name"}


def test_several_problems_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, BASE | {"trainer": {"lr": "fast", "speed": 1}, "nonsense": 3})
    problems = problems_of(path, "run.seed=x", "bad")
    for part in ("trainer.lr", "trainer.speed", "nonsense", "run.seed", "'bad'"):
        assert any(part in problem for problem in problems), part


def test_several_broken_rules_are_told_at_once(base: Path) -> None:
    problems = problems_of(base, "trainer.lr=0", "generation.group_size=1", "replay.heartbeat_s=5")
    for part in ("trainer.lr", "generation.group_size", "replay.peer_timeout_s"):
        assert any(part in problem for problem in problems), part


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path / "absent.yaml")
    assert "absent.yaml" in problem
    assert "No such file" in problem


@pytest.mark.parametrize("content", ["run: [1, 2", "\tx: 1", "- a\n- b\n", "just text\n"])
def test_what_is_no_mapping_of_sections_is_refused(tmp_path: Path, content: str) -> None:
    (problem,) = problems_of(write(tmp_path, content))
    assert "config.yaml" in problem


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00run")
    (problem,) = problems_of(path)
    assert "not valid YAML" in problem


def test_the_resolved_yaml_reads_back(base: Path, tmp_path: Path) -> None:
    config = load_config(base, ["task.options.length=4", "policy.model=${run.output_dir}/m"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


AGREED_CHANGES = [
    "run.seed=1", "run.num_train_steps=11", "policy.dtype=bfloat16", "task.name=arithmetic",
    "task.options.length=4", "task.unparseable_reward=0", "task.chat_template=true",
    "task.reward=a:b", "task.reward_timeout_s=6", "generation.group_size=4",
    "generation.max_new_tokens=16", "generation.temperature=0.9", "generation.group_timeout_s=60",
    "replay.groups_per_step=8", "replay.max_bytes=2000000000", "replay.peer_timeout_s=8",
    "staleness.max_staleness=6", "staleness.pipeline_depth=1", "staleness.draw_order=ticket",
    "staleness.on_stale=requeue", "algorithm.clip_low=0.1", "algorithm.kl_coef=0.1",
    "algorithm.zero_variance=keep", "weights.publish_every=2", "weights.engines_per_cell=2",
]  # fmt: skip
OWN_CHANGES = [
    "run.output_dir=elsewhere", "run.no_progress_timeout_s=10", "policy.model=other/model",
    "policy.maker=a:b", "task.reward_workers=2", "generation.max_running_groups=3",
    "generation.request_timeout_s=10", "engine.num_engines=2", "engine.threads=2",
    "engine.python=p", "engine.environment.A=b",
    "replay.address=tcp://127.0.0.1:1", "replay.credit_bytes=1000000000",
    "replay.request_timeout_s=20", "trainer.lr=1", "trainer.device=cpu", "weights.host=10.0.0.1",
    "weights.probe_tolerance=0.01",
    "metrics.tensorboard=false", "launch.num_generators=2",
]  # fmt: skip


@pytest.mark.parametrize("change", AGREED_CHANGES)
def test_the_digest_differs_if_an_agreed_field_does(base: Path, change: str) -> None:
    assert agreement_digest(load_config(base, [change])) != agreement_digest(load_config(base))


@pytest.mark.parametrize("change", OWN_CHANGES)
def test_the_digest_is_equal_if_only_own_fields_differ(base: Path, change: str) -> None:
    assert agreement_digest(load_config(base, [change])) == agreement_digest(load_config(base))


def test_each_machine_may_download_weights_to_a_directory_of_its_own(base: Path) -> None:
    here, there = (
        load_config(base, ["weights.transport=http", f"weights.download_directory={directory}"])
        for directory in ("/here", "/there")
    )
    assert agreement_digest(here) == agreement_digest(there)


def test_every_field_is_documented() -> None:
    """A field's docstring is its entry in docs/configuration.md."""
    import ast
    import inspect
    import sys

    for section in fields(Config):
        module = sys.modules[section.type.__module__]
        tree = ast.parse(inspect.getsource(module))
        (body,) = [
            node.body
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == section.type.__name__
        ]
        for here, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(here, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{section.name}.{ast.unparse(here.target)}"


def test_resolve_object_finds_what_is_named() -> None:
    assert resolve_object("pathlib:Path", "task.name") is Path


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("pathlib", "package.module:attribute"),
        ("pathlib:", "package.module:attribute"),
        (":Path", "package.module:attribute"),
        ("no_such_module_here:x", "cannot import 'no_such_module_here'"),
        ("pathlib:NoSuchThing", "has no attribute 'NoSuchThing'"),
    ],
)
def test_resolve_object_says_what_is_wrong(reference: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_object(reference, "task.name")
    assert caught.value.problems[0].startswith("task.name")
    assert part in caught.value.problems[0]
