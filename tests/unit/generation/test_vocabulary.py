import pytest

from async_grpo.errors import ConfigError
from async_grpo.generation.vocabulary import policy_vocab_size


@pytest.mark.parametrize(
    "content", ['{"vocab_size": 50, "x": [1]}', '{"text_config": {"vocab_size": 50}}']
)
def test_the_models_own_configuration_tells(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert policy_vocab_size(str(tmp_path)) == 50


def test_a_directory_without_one_does_not_tell(tmp_path):
    assert policy_vocab_size(str(tmp_path)) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"vocab_size": "many"}'])
def test_one_that_cannot_be_used_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"policy\.model.*config\.json"):
        policy_vocab_size(str(tmp_path))
