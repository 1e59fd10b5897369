from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.config.load import load_config
from async_grpo.doctor.report import Verdict
from async_grpo.doctor.text_checks import check_prompts, check_tokenizer, check_vocabulary
from async_grpo.engine_api import ModelInfo, ServerInfo
from async_grpo.training.model import PolicyModel
from async_grpo.training.toy import make_toy_tokenizer

ENDS_TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NEVER_ENDS = ENDS_TURNS.replace("{{ eos_token }}", ".")


@pytest.fixture
def config(tmp_path):
    make_toy_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/run, num_train_steps: 1}}\n"
        f"policy: {{model: {tmp_path}/model}}\n"
        "task: {name: reverse}\n"
    )
    return load_config(path)


def policy(*, vocab_size=50, **ends):
    torch.manual_seed(0)
    tiny = Qwen3Config(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, **ends,
    )  # fmt: skip
    return PolicyModel(Qwen3ForCausalLM(tiny), chunk_tokens=8)


def with_template(config, template):
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(config.policy.model)
    return replace(config, task=replace(config.task, chat_template=True))


def test_the_toy_tokenizer_fits_its_policy(config):
    finding, tokenizer = check_tokenizer(config, policy(eos_token_id=2))
    assert finding.verdict is Verdict.OK
    assert "completions end at 2" in finding.figure
    assert tokenizer is not None
    finding, texts = check_prompts(config, tokenizer)
    assert finding.verdict is Verdict.OK
    assert "1 of them BOS" in finding.figure
    assert texts is not None


def test_more_ids_than_the_policy_knows_fail(config):
    finding, tokenizer = check_tokenizer(config, policy(vocab_size=48))
    assert finding.verdict is Verdict.FAIL
    assert "ids up to 49, the policy knows 48" in finding.figure
    assert tokenizer is None


def test_no_end_anywhere_fails(config):
    tokenizer = make_toy_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(config.policy.model)
    finding, _ = check_tokenizer(config, policy(eos_token_id=None))
    assert finding.verdict is Verdict.FAIL
    assert "names an end token" in finding.figure


def test_a_template_that_ends_turns_where_sampling_stops_passes(config):
    finding, _ = check_tokenizer(with_template(config, ENDS_TURNS), policy(eos_token_id=2))
    assert finding.verdict is Verdict.OK, finding


def test_a_template_whose_answers_never_end_fails(config):
    finding, _ = check_tokenizer(with_template(config, NEVER_ENDS), policy(eos_token_id=2))
    assert finding.verdict is Verdict.FAIL
    assert "no token behind an answer at which sampling stops" in finding.figure


def test_no_template_where_one_is_asked_for_fails(config):
    chat = replace(config, task=replace(config.task, chat_template=True))
    finding, _ = check_tokenizer(chat, policy(eos_token_id=2))
    assert finding.verdict is Verdict.FAIL
    assert "no chat template" in finding.figure


def test_an_engine_too_short_for_the_prompts_fails(config):
    model = policy(eos_token_id=2)
    _, tokenizer = check_tokenizer(config, model)
    _, texts = check_prompts(config, tokenizer)
    info = ServerInfo(version="0.5.23", vocab_size=50, context_length=64)
    named = ModelInfo(model_path="elsewhere", weight_version="default")
    finding = check_vocabulary(info, named, model, texts)
    assert finding.verdict is Verdict.FAIL
    assert "the engine's context (64)" in finding.figure
    info = ServerInfo(version="0.5.23", context_length=1024)
    finding = check_vocabulary(info, named, model, texts)
    assert finding.verdict is Verdict.OK
    assert "does not tell its vocabulary" in finding.figure
