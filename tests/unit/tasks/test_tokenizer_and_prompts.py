import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from async_grpo.errors import ConfigError
from async_grpo.tasks.prompts import PromptSource
from async_grpo.tasks.reverse import ReverseTask
from async_grpo.tasks.tokenizer import load_tokenizer
from async_grpo.types import TicketKind

LETTERS = [*"abcdefgh>", " ", ":", "\n"]
SPECIAL = ["<bos>", "<eos>", "<unk>", "<turn>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{%- if message['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{% generation %}<turn>{{ message['role'][0] }}:{{ message['content'] | trim }}"
    "{% endgeneration %}{% if loop.index0 > 5 %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>a:{% endif %}"
)
CHAT = [{"role": "a", "content": " abc "}, {"role": "b", "content": "h g"}]


def save_tokenizer(directory, *, adds_bos=False, template=None, **options):
    backend = Backend(
        models.WordLevel({token: i for i, token in enumerate(SPECIAL + LETTERS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
        **options,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_ids_and_chats_are_those_of_transformers(tmp_path, adds_bos, options):
    model = save_tokenizer(tmp_path, adds_bos=adds_bos, template=TEMPLATE, **options)
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in ["abc>", "", " a h", "xyz", "<turn>a<eos>"]:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(
                text, add_special_tokens=special
            )
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    for prompt in (True, False):
        assert ours.apply_chat_template(
            CHAT, add_generation_prompt=prompt
        ) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert (
        ours.apply_chat_template(CHAT, tokenize=True)
        == theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    )  # fmt: skip


def test_a_template_in_the_tokenizer_config_is_found(tmp_path):
    model = save_tokenizer(tmp_path, template=TEMPLATE)
    expected = load_tokenizer(model).apply_chat_template(CHAT)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    content = json.loads(config.read_text())
    for template in (TEMPLATE, [{"name": "default", "template": TEMPLATE}]):
        config.write_text(json.dumps({**content, "chat_template": template}))
        assert load_tokenizer(model).apply_chat_template(CHAT) == expected


def test_what_is_wrong_with_a_model_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*save_pretrained"):
        load_tokenizer(str(tmp_path))
    model = save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(model).apply_chat_template(CHAT)
    model = save_tokenizer(tmp_path, template="{% if %}")
    with pytest.raises(ConfigError, match="does not compile"):
        load_tokenizer(model)
    model = save_tokenizer(tmp_path, template=TEMPLATE)
    with pytest.raises(ConfigError, match="no such role"):
        load_tokenizer(model).apply_chat_template([{"role": "bad", "content": ""}])


def test_a_model_that_cannot_be_found_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="neither a directory nor"):
        load_tokenizer("./no/such/directory")


def test_a_chat_template_cannot_reach_python(tmp_path):
    template = "{{ messages.__class__.__mro__ }}"
    model = save_tokenizer(tmp_path, template=template)
    with pytest.raises(ConfigError, match="unsafe"):
        load_tokenizer(model).apply_chat_template(CHAT)


WITHOUT_BOS = TEMPLATE.removeprefix("{{ bos_token }}")


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [None, TEMPLATE, WITHOUT_BOS])
def test_a_prompt_has_one_bos_or_none_that_the_model_does_not_use(tmp_path, adds_bos, template):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, adds_bos=adds_bos, template=template))
    prompts = PromptSource(
        ReverseTask(seed=0), tokenizer, chat_template=template is not None, system_prompt=""
    )
    prompt = prompts.prompt(7)
    expected = 1 if adds_bos or template == TEMPLATE else 0
    assert prompt.token_ids.count(0) == expected
    assert prompt.token_ids[:1] == [0] * expected or not expected
    assert 1 not in prompt.token_ids, "an EOS behind the prompt would end the answer"
    assert prompt.answer == ReverseTask(seed=0).question(7)[1]


def test_two_bos_tokens_are_refused(tmp_path):
    model = save_tokenizer(tmp_path, adds_bos=True, template="<bos>" + TEMPLATE)
    with pytest.raises(ConfigError, match="two BOS tokens"):
        PromptSource(ReverseTask(seed=0), load_tokenizer(model), chat_template=True)


class Blank(ReverseTask):
    """Its second text is empty."""

    def question(self, index):
        text, answer, metadata = super().question(index)
        return ("" if index == 1 else text), answer, metadata


def test_b045_a_prompt_without_a_token_is_refused_by_its_number(tmp_path):
    prompts = PromptSource(Blank(seed=0), load_tokenizer(save_tokenizer(tmp_path)))
    assert prompts.prompt(0).token_ids
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        prompts.prompt(1)


def test_the_dataset_follows_the_task_and_the_template(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=TEMPLATE))
    datasets = [
        PromptSource(ReverseTask(seed=0), tokenizer).dataset(),
        PromptSource(ReverseTask(seed=1), tokenizer).dataset(),
        PromptSource(ReverseTask(seed=0), tokenizer, chat_template=True).dataset(),
        PromptSource(
            ReverseTask(seed=0), tokenizer, chat_template=True, system_prompt="abc"
        ).dataset(),
    ]
    assert len({dataset.fingerprint for dataset in datasets}) == 4
    assert datasets[0].num_prompts == 100_000
    assert PromptSource(ReverseTask(seed=0), tokenizer).dataset() == datasets[0]


def test_held_out_prompts_are_those_of_their_own_task(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    without = PromptSource(ReverseTask(seed=0), tokenizer)
    prompts = PromptSource(ReverseTask(seed=0), tokenizer, held_out=ReverseTask(seed=1))

    assert prompts.prompt(3) == without.prompt(3)
    held_out = prompts.prompt(3, TicketKind.EVAL)
    assert (held_out.text, held_out.answer) == ReverseTask(seed=1).question(3)[:2]
    assert prompts.dataset() != without.dataset()
    with pytest.raises(ConfigError, match="holds no prompts out"):
        without.prompt(3, TicketKind.EVAL)


class Texts:
    """A task of the given questions."""

    def __init__(self, *texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def fingerprint(self):
        return str(self.texts)

    def question(self, index):
        return self.texts[index], "", {}


def test_the_longest_prompt_is_the_one_with_the_most_tokens(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    in_tokens = "abc h g"  # 7 tokens; the one with more characters has 4
    train = Texts("a", *["ab"] * 2000, in_tokens, "<turn><turn><turn>a", "b")
    prompts = PromptSource(train, tokenizer, held_out=Texts("a", "abc"))
    assert prompts.longest() == prompts.prompt(2001)
    assert prompts.longest(TicketKind.EVAL).text == "abc"
