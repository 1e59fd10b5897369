"""A Hugging Face tokenizer without transformers: `tokenizers` for ids, jinja2 for the chat format.

Gives the ids and the chat text that `transformers.AutoTokenizer` gives for the same directory; the
generator uses it because transformers brings torch along. Knows nothing of tasks or prompts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from async_grpo.errors import ConfigError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class FastTokenizer:
    """`interfaces.Tokenizer` over a `tokenizer.json`.

    Args:
        backend: the loaded `tokenizer.json`.
        options: the content of `tokenizer_config.json`.
        chat_template: jinja source, or None.
        where: the model, for error messages.
    """

    def __init__(
        self, backend: Backend, options: Mapping[str, Any], chat_template: str | None, where: str
    ) -> None:
        self._backend = backend
        self._where = where
        self._special_tokens = {
            name: text
            for name, value in options.items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        # transformers replaces the post-processor where these are given
        self._explicit = "add_bos_token" in options or "add_eos_token" in options
        self._add_bos = bool(options.get("add_bos_token", False)) and self.bos_token_id is not None
        self._add_eos = bool(options.get("add_eos_token", False)) and self.eos_token_id is not None
        self._template = None if chat_template is None else _compile(chat_template, where)
        self.chat_template = chat_template
        bos = self.bos_token_id
        self.adds_bos = bos is not None and self.encode("")[:1] == [bos]

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        if not (add_special_tokens and self._explicit):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._add_bos and self.bos_token_id is not None:
            ids = [self.bos_token_id, *ids]
        if self._add_eos and self.eos_token_id is not None:
            ids = [*ids, self.eos_token_id]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], **options: Any
    ) -> str | list[int]:
        """The conversation in the model's chat format.

        Args:
            conversation: messages with `role` and `content`.
            **options: `tokenize` (False) returns ids, without adding special tokens; the rest,
                `add_generation_prompt` among it, is passed to the template.

        Raises:
            ConfigError: the model has no chat template, or it refuses the conversation.
        """
        if self._template is None:
            raise ConfigError(
                f"policy.model: {self._where} has no chat template; set task.chat_template=false"
            )
        tokenize = options.pop("tokenize", False)
        variables = {"tools": None, "documents": None, "add_generation_prompt": False}
        try:
            text = self._template.render(
                messages=[dict(message) for message in conversation],
                **{**variables, **self._special_tokens, **options},
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"policy.model: the chat template of {self._where} failed: {error}"
            ) from error
        return self.encode(text, add_special_tokens=False) if tokenize else text


def load_tokenizer(model: str) -> FastTokenizer:
    """The tokenizer of a local directory or a Hugging Face model.

    Raises:
        ConfigError: the model is not found or has no `tokenizer.json`.
    """
    directory = Path(model) if Path(model).is_dir() else _download(model)
    try:
        backend = Backend.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for any failure
        raise ConfigError(
            f"policy.model: cannot load {directory / 'tokenizer.json'}: {error}. Save a fast "
            "tokenizer there: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    options = {
        **_read_json(directory / "special_tokens_map.json"),
        **_read_json(directory / "tokenizer_config.json"),
    }
    template_file = directory / "chat_template.jinja"
    if template_file.exists():
        template: str | None = template_file.read_text(encoding="utf-8")
    else:
        template = _default_template(options.get("chat_template"))
    return FastTokenizer(backend, options, template, model)


def _download(model: str) -> Path:
    """A local copy of the tokenizer's files of a Hugging Face model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"policy.model: {model!r} is neither a directory nor a Hugging Face model that can be "
            f"reached ({type(error).__name__}); give the path of a directory, or download it first"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON object; empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"policy.model: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"policy.model: {path} must hold an object")
    return content


def _token_text(value: Any) -> str | None:
    """Text of a special token, written as a string or as `{"content": ...}`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _default_template(value: Any) -> str | None:
    """The template in a `tokenizer_config.json`: a string, or a list of named ones."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training masks; here it only passes it."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as a plain set

    def parse(self, parser: Any) -> Any:
        """The block's own content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, where: str) -> jinja2.Template:
    """The template in the environment that transformers gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"policy.model: the chat template of {where} does not compile: {error}"
        ) from error


def _to_json(value: Any, **options: Any) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
