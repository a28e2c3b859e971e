"""Reads a room's configuration: flags over environment over TOML over defaults.

Every source is checked by itself, so that an error can name the setting as the
user spelled it: `--max-num-seqs`, `PAGEWIRE_MAX_NUM_SEQS`, `[engine] max_num_seqs`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tomllib
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    SettingsConfigDict,
)

from pagewire.config import (
    CHOSEN_BY_LAUNCHER,
    EngineConfig,
    FrontendConfig,
    RoomConfig,
    ServeConfig,
    TokenizerConfig,
)
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ENV_PREFIX = "PAGEWIRE_"
CONFIG_VARIABLE = "PAGEWIRE_CONFIG"
ADDRESS_VARIABLE = "PAGEWIRE_ADDRESS"
API_KEY_VARIABLE = "PAGEWIRE_API_KEY"
"""These two are read by the client commands, not by a room."""

_TABLES: dict[str, type[RoomConfig]] = {
    "frontend": FrontendConfig,
    "tokenizer": TokenizerConfig,
    "engine": EngineConfig,
}
_ROOM_FIELDS = {table: frozenset(room.model_fields) for table, room in _TABLES.items()}
_SHARED_FIELDS = frozenset(
    field
    for field in ServeConfig.model_fields
    if sum(field in fields for fields in _ROOM_FIELDS.values()) > 1
)
_SERVE_FIELDS = frozenset(ServeConfig.model_fields) - frozenset().union(*_ROOM_FIELDS.values())
_TABLE_FIELDS = {**_ROOM_FIELDS, "common": _SHARED_FIELDS, "serve": _SERVE_FIELDS}

Config = TypeVar("Config", bound=RoomConfig)


def load_config(
    cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None
) -> Config:
    """The configuration of one room, or ServeConfig for all of them.

    `argv` is what follows the program's name (default: sys.argv's). The TOML
    file is the one of --config, else of PAGEWIRE_CONFIG. An environment variable
    that is set to nothing counts as not set. Raises ConfigError for an unknown,
    malformed or out-of-range setting, also for one that a stronger source
    overrides; --help prints every flag and raises SystemExit(0).
    """
    flags, config_file = _read_flags(cls, sys.argv[1:] if argv is None else argv, prog)
    environment = _read_environment(cls)
    config_file = config_file or os.environ.get(CONFIG_VARIABLE) or None
    file = _read_toml(cls, Path(config_file)) if config_file else {}
    return cls.model_validate({**file, **environment, **flags})


def as_flags(config: RoomConfig, cls: type[RoomConfig]) -> list[str]:
    """The flags that give `cls` the values that `config` has for its fields.

    None is left out: it is the default wherever it is legal.
    """
    flags = []
    for field in cls.model_fields:
        value = getattr(config, field)
        if isinstance(value, bool):
            flags.append(flag_name(field) if value else f"--no-{flag_name(field)[2:]}")
        elif value is not None:
            flags.append(f"{flag_name(field)}={value}")
    return flags


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    return ENV_PREFIX + field.upper()


# Flags.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _read_flags(
    cls: type[RoomConfig], argv: Sequence[str], prog: str | None
) -> tuple[dict[str, Any], str | None]:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        epilog=f"Every flag is also an environment variable ({flag_name('max_num_seqs')} is "
        f"{variable_name('max_num_seqs')}) and a key of the TOML file; flags win over the "
        "environment, and it over the file.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"A TOML file of settings. Also {CONFIG_VARIABLE}."
    )
    groups = {
        owner: parser.add_argument_group(owner)
        for owner in dict.fromkeys(map(_owner, _fields(cls)))
    }

    def add_flag(_parser: object, *names: str, **options: Any) -> None:
        field = names[0].removeprefix("--").replace("-", "_")
        if "metavar" in options:
            options["metavar"] = _metavar(cls, field)
        is_refused = cls is ServeConfig and field in CHOSEN_BY_LAUNCHER
        options["help"] = argparse.SUPPRESS if is_refused else _help(cls, field)
        groups[_owner(field)].add_argument(*names, **options)

    source = CliSettingsSource[argparse.ArgumentParser](
        _settings_class(cls),
        root_parser=parser,
        add_argument_method=add_flag,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )
    parsed, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise ConfigError(_unknown_flag(cls, unknown[0]))
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    for name, value in given.items():
        # pydantic-settings would take it for a flag that was not given.
        if value == "":
            raise ConfigError(f"{flag_name(name)}: must not be empty")
    config_file = given.pop("config", None)
    values = source(parsed_args=given)()
    return _checked(cls, values, flag_name), config_file


def _unknown_flag(cls: type[RoomConfig], argument: str) -> str:
    if not argument.startswith("--"):
        return f"unexpected argument {argument!r}"
    flag = argument.partition("=")[0]
    field = flag.removeprefix("--").replace("-", "_")
    rooms = [room for room, fields in _ROOM_FIELDS.items() if field in fields]
    if rooms:
        return f"{flag} is not a flag of this process but of: {', '.join(rooms)}"
    return f"unknown flag {flag}" + _did_you_mean(flag, map(flag_name, _fields(cls)))


def _fields(cls: type[RoomConfig]) -> list[str]:
    return list(cls.model_fields)


def _owner(field: str) -> str:
    owners = [table for table, fields in _ROOM_FIELDS.items() if field in fields]
    return owners[0] if len(owners) == 1 else "common" if owners else "serve"


def _metavar(cls: type[RoomConfig], field: str) -> str:
    annotation = cls.model_fields[field].annotation
    if get_origin(annotation) is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    for name, kinds in (("N", (int,)), ("X", (float,))):
        if annotation in kinds or any(arg in kinds for arg in _flat_args(annotation)):
            return name
    return field.rsplit("_", maxsplit=1)[-1].upper()


def _flat_args(annotation: object) -> Iterable[object]:
    for argument in get_args(annotation):
        yield argument
        yield from _flat_args(argument)


def _help(cls: type[RoomConfig], field: str) -> str:
    info = cls.model_fields[field]
    text = (info.description or "").replace("\n", " ").replace("%", "%%")
    default = info.get_default()
    if default is None:
        return text
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{text} [{shown}]".lstrip()


# Environment.


def _read_environment(cls: type[RoomConfig]) -> dict[str, Any]:
    client = {ADDRESS_VARIABLE, API_KEY_VARIABLE}
    known = {CONFIG_VARIABLE, *client, *map(variable_name, ServeConfig.model_fields)}
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise ConfigError(
                f"unknown environment variable {name}" + _did_you_mean(name.upper(), known)
            )
    return _checked(cls, EnvSettingsSource(_settings_class(cls))(), variable_name)


# TOML.


def _read_toml(cls: type[RoomConfig], path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from error
    tables = {name: _check_table(path, name, table) for name, table in document.items()}
    values = dict(tables.get("common", {}))
    if cls is ServeConfig:
        _merge_rooms(path, values, tables)
        return {**values, **tables.get("serve", {})}
    for name, room in _TABLES.items():
        if room is cls:
            values.update(tables.get(name, {}))
    return values


def _check_table(path: Path, name: str, table: object) -> dict[str, Any]:
    known = _TABLE_FIELDS.get(name)
    if known is None:
        what = f"table [{name}]" if isinstance(table, dict) else f"key {name} outside a table"
        raise ConfigError(f"{path}: unknown {what}" + _did_you_mean(name, _TABLE_FIELDS))
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be a table")
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: unknown key [{name}] {key}" + _did_you_mean(key, known))
    room = _TABLES.get(name, ServeConfig)
    return _checked(room, table, lambda field: f"{path}: [{name}] {field}", strict=True)


def _merge_rooms(
    path: Path, values: dict[str, Any], tables: Mapping[str, Mapping[str, Any]]
) -> None:
    """Adds the rooms' tables to [common]. One host has one value of a shared key."""
    seen: dict[str, str] = {}
    for name in _TABLES:
        for key, value in tables.get(name, {}).items():
            if key in seen and values[key] != value:
                raise ConfigError(
                    f"{path}: [{name}] {key} contradicts [{seen[key]}] {key}; "
                    "where all rooms run on one host it belongs in [common]"
                )
            seen[key] = name
            values[key] = value


# What the sources share.


def _settings_class(cls: type[RoomConfig]) -> type[BaseSettings]:
    """`cls` as pydantic-settings wants it; never instantiated."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = __name__
        namespace["model_config"] = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True)

    settings: type[BaseSettings] = types.new_class(cls.__name__, (cls, BaseSettings), {}, fill)
    return settings


def _checked(
    cls: type[RoomConfig],
    values: Mapping[str, Any],
    spell: Any,
    *,
    strict: bool = False,
) -> dict[str, Any]:
    """The given values, converted. `spell` names a field as the source does."""
    try:
        config = cls.model_validate(values, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        raise ConfigError(f"{spell(field)}: {_reason(first)}") from error
    return {field: getattr(config, field) for field in config.model_fields_set}


def _reason(error: Any) -> str:
    message: str = error["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}, got {error['input']!r}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
