"""Load a configuration: schema, then YAML, then `key=value` overrides, then every check at once."""

import difflib
import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from async_grpo.config.presets import PRESETS, Preset
from async_grpo.config.rules import all_problems, resolve_length_limit
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration.

    Args:
        path: YAML file.
        overrides: `section.key=value` items that win over the file.

    Raises:
        ConfigError: the file is missing or no YAML, a key is unknown, a value has the wrong type,
            or a rule is broken; lists every problem found.
    """
    problems: list[str] = []
    layers = _layers(Path(path), overrides, problems)
    merged = _merge_all(_schema(), [*_preset_layers(layers), *layers], problems)
    missing = sorted(OmegaConf.missing_keys(merged))
    problems += [f"{key} is required: set it in {path} or as {key}=..." for key in missing]
    if missing:
        raise ConfigError(problems)
    config = _to_config(merged, problems)
    problems += all_problems(config)  # of what did fit: all problems at once
    if problems:
        raise ConfigError(problems)
    return config


def _to_config(merged: DictConfig, problems: list[str]) -> Config:
    """The tree as objects; one that cannot be made (an unknown `${...}`) has only its problems."""
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems, _first_line(error)]) from error
    assert isinstance(config, Config)
    resolve_length_limit(config)
    return config


def _schema() -> DictConfig:
    """The typed tree; a section without defaults is there too, so that its keys can be named."""
    schema: DictConfig = OmegaConf.structured(Config)
    for section in fields(Config):
        if OmegaConf.is_missing(schema, section.name):
            schema[section.name] = OmegaConf.structured(section.type)
    return schema


def _layers(
    path: Path, overrides: Sequence[str], problems: list[str]
) -> list[tuple[str, dict[str, Any]]]:
    """(where it came from, nested values) of the file and of each override."""
    layers: list[tuple[str, dict[str, Any]]] = []
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} must hold sections (a mapping), got {type(content).__name__}")
    for section, values in (content or {}).items():
        if isinstance(values, dict):
            layers += [(f"{path}", {section: {key: value}}) for key, value in values.items()]
        else:
            layers.append((f"{path}", {section: values}))
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key:
            problems.append(f"override {item!r} must have the form section.key=value")
            continue
        try:
            layer = OmegaConf.to_container(OmegaConf.from_dotlist([item]))
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            problems.append(f"override {item!r}: {_first_line(error)}")
            continue
        assert isinstance(layer, dict)
        layers.append((f"override {item!r}", {str(name): value for name, value in layer.items()}))
    return layers


def _preset_layers(
    layers: list[tuple[str, dict[str, Any]]],
) -> list[tuple[str, dict[str, Any]]]:
    """The fields of the last `algorithm.preset` named, to lie below all layers.

    An unknown name gives none: merging its own layer reports it.
    """
    name = Preset.default.value
    for _, layer in layers:
        section = layer.get("algorithm")
        if isinstance(section, dict):
            name = section.get("preset", name)
    if name not in set(Preset):
        return []
    fields_of = PRESETS[Preset(name)]
    source = f"algorithm.preset={name}"
    return [(source, {"algorithm": {key: value}}) for key, value in fields_of.items()]


def _merge_all(
    base: DictConfig, layers: list[tuple[str, dict[str, Any]]], problems: list[str]
) -> DictConfig:
    """`base` with every layer that fits.

    All in one go, for each merge copies the whole tree; one by one only to find what does not fit.
    """
    try:
        merged = OmegaConf.merge(base, *(layer for _, layer in layers))
    except (OmegaConfBaseException, ValueError, TypeError):
        merged = base
        for source, layer in layers:
            merged = _merge(merged, layer, source, problems)
    assert isinstance(merged, DictConfig)
    return merged


def _merge(base: DictConfig, layer: dict[str, Any], source: str, problems: list[str]) -> DictConfig:
    """`base` with `layer`; a layer that does not fit leaves `base` as it is and one problem."""
    try:
        merged = OmegaConf.merge(base, layer)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = getattr(error, "full_key", None) or next(iter(layer))
        problems.append(f"{key}: {_what_is_wrong(base, layer, error)} (from {source})")
        return base
    assert isinstance(merged, DictConfig)
    return merged


def _what_is_wrong(base: DictConfig, layer: dict[str, Any], error: Exception) -> str:
    """`error` in the words of a configuration."""
    section, content = next(iter(layer.items()))
    known: list[str] = [str(key) for key in base]
    if section in known:
        if not isinstance(content, dict):
            return f"is a section; set its fields, as {section}.FIELD=value"
        known = [str(key) for key in base[section]]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        name = str(getattr(error, "key", "") or section)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"no such field; {hint}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


_AGREED: dict[str, tuple[str, ...]] = {
    # section: fields that are this process's own business
    "policy": ("model", "maker", "maker_options"),
    "task": ("reward_workers",),
    "generation": ("max_running_groups", "request_timeout_s", "on_weight_update"),
    "replay": ("address", "credit_bytes", "request_timeout_s"),
    "staleness": (),
    "algorithm": (),
    "weights": ("host", "probe_tolerance", "download_directory"),
    "eval": (),
}


def agreement_digest(config: Config) -> str:
    """Hash of what all roles of a run must agree on; peers with another digest are refused."""
    agreed: dict[str, Any] = {
        "seed": config.run.seed,
        "num_train_steps": config.run.num_train_steps,
    }
    for section, own in _AGREED.items():
        values = asdict(getattr(config, section))
        agreed[section] = {name: value for name, value in values.items() if name not in own}
    text = json.dumps(agreed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve_object(reference: str, field_name: str) -> Any:
    """The object that `package.module:attribute` names.

    Raises:
        ConfigError: the form is wrong, the module does not import, or has no such attribute.
    """
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{field_name} must be package.module:attribute, got {reference!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{field_name}: cannot import {module_name!r}: {error}; modules are looked for in the "
            "current directory and in PYTHONPATH"
        ) from error
    except Exception as error:  # foreign code runs at its import
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field_name}: importing {module_name!r} failed: {what}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{field_name}: module {module_name!r} has no attribute {attribute!r}"
        ) from error
