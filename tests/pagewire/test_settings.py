from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.config import (
    CHOSEN_BY_LAUNCHER,
    EngineConfig,
    FrontendConfig,
    ServeConfig,
    TokenizerConfig,
)
from pagewire.errors import ConfigError
from pagewire.settings import as_flags, flag_name, load_config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "pagewire.toml"
        path.write_text(text)
        return f"--config={path}"

    return write


def test_defaults_need_no_source() -> None:
    assert load_config(EngineConfig, []) == EngineConfig()


def test_flags_are_spelled_as_people_know_them() -> None:
    config = load_config(
        EngineConfig,
        [
            "--model=/m",
            "--max-model-len=2048",
            "--max-num-seqs",
            "7",
            "--max-num-batched-tokens=99",
            "--gpu-memory-utilization=0.5",
            "--dtype=bfloat16",
            "--block-size=32",
            "--no-enable-prefix-caching",
        ],
    )
    assert config == EngineConfig(
        model="/m",
        max_model_len=2048,
        max_num_seqs=7,
        max_num_batched_tokens=99,
        gpu_memory_utilization=0.5,
        dtype="bfloat16",
        block_size=32,
        enable_prefix_caching=False,
    )
    assert load_config(FrontendConfig, ["--port", "0"]).port == 0


def test_flag_beats_environment_beats_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, toml
) -> None:
    file = toml("[engine]\nmax_num_seqs = 3\nblock_size = 8\nmax_model_len = 11\n")
    monkeypatch.setenv("PAGEWIRE_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("PAGEWIRE_BLOCK_SIZE", "64")
    config = load_config(EngineConfig, [file, "--max-num-seqs=5"])
    assert (config.max_num_seqs, config.block_size, config.max_model_len) == (5, 64, 11)
    assert config.gpu_memory_utilization == EngineConfig().gpu_memory_utilization


def test_config_file_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, toml) -> None:
    path = toml("[common]\nmodel = '/m'\n").removeprefix("--config=")
    monkeypatch.setenv("PAGEWIRE_CONFIG", path)
    assert load_config(TokenizerConfig, []).model == "/m"


def test_a_variable_set_to_nothing_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_MAX_MODEL_LEN", "")
    assert load_config(EngineConfig, []).max_model_len is None


def test_a_variable_of_another_room_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_PORT", "1234")
    monkeypatch.setenv("PAGEWIRE_ADDRESS", "host:1")
    monkeypatch.setenv("PAGEWIRE_API_KEY", "pw-x")
    assert load_config(EngineConfig, []) == EngineConfig()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq=4"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--zzz"], "unknown flag --zzz"),
        (["--port=1"], "--port is not a flag of this process but of: frontend"),
        (["--max-num-seqs=x"], "--max-num-seqs: input should be a valid integer.*'x'"),
        (["--max-num-seqs=0"], "--max-num-seqs: .*greater than or equal to 1"),
        (["--max-num-seqs=1.5"], "--max-num-seqs: .*integer"),
        (["--max-num-seqs"], "--max-num-seqs: expected one argument"),
        (["--gpu-memory-utilization=nan"], "--gpu-memory-utilization: "),
        (["--kv-cache-memory=4GX"], "--kv-cache-memory: expected a size such as .*, got '4GX'"),
        (["--kv-cache-memory=0"], "--kv-cache-memory: must be at least a byte"),
        (["--kv-cache-memory="], "--kv-cache-memory: must not be empty"),
        (["--model", ""], "--model: must not be empty"),
        (["--max-model-len="], "--max-model-len: must not be empty"),
        (["--config="], "--config: must not be empty"),
        (
            ["--device=tpu"],
            "--device: input should be 'auto', 'cpu', 'cuda', 'sim:h200', .*, got 'tpu'",
        ),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_bad_flags_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load_config(EngineConfig, argv)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PAGEWIRE_MAX_NUM_SEQ",
            "4",
            "unknown environment variable PAGEWIRE_MAX_NUM_SEQ; did you mean PAGEWIRE_MAX_NUM_SEQS",
        ),
        ("PAGEWIRE_KV_CACHE_MEMORY", "lots", "PAGEWIRE_KV_CACHE_MEMORY: expected a size.*'lots'"),
        ("PAGEWIRE_MAX_NUM_SEQS", "many", "PAGEWIRE_MAX_NUM_SEQS: .*integer.*'many'"),
        ("pagewire_max_num_seqz", "4", "unknown environment variable pagewire_max_num_seqz"),
    ],
)
def test_bad_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        load_config(EngineConfig, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engin]\nmodel = 'm'\n", r"unknown table \[engin\]; did you mean engine"),
        ("model = 'm'\n", "unknown key model outside a table"),
        ("engine = 3\n", "engine must be a table"),
        (
            "[engine]\nmax_num_seq = 3\n",
            r"unknown key \[engine\] max_num_seq; did you mean max_num_seqs",
        ),
        ("[engine]\nport = 3\n", r"unknown key \[engine\] port"),
        ("[common]\nblock_size = 3\n", r"unknown key \[common\] block_size"),
        ("[engine]\nmax_num_seqs = '3'\n", r"\[engine\] max_num_seqs: .*integer"),
        ("[engine]\nmax_num_seqs = true\n", r"\[engine\] max_num_seqs: .*integer"),
        ("[engine]\nenable_prefix_caching = 1\n", r"\[engine\] enable_prefix_caching: .*bool"),
        ("[common]\nmodel = ''\n", r"\[common\] model: .*at least 1 character"),
        ("[engine]\nkv_cache_memory = '4 G'\n", r"\[engine\] kv_cache_memory: expected a size"),
        ("[frontend]\nport = 70000\n", r"\[frontend\] port: .*65535"),
        ("[engine\n", "not TOML"),
    ],
)
def test_bad_files_are_refused_even_where_a_flag_overrides(toml, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(EngineConfig, [toml(text), "--max-num-seqs=9"])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/x\.toml: No such file"):
        load_config(EngineConfig, ["--config=/nowhere/x.toml"])


def test_a_room_reads_its_own_table_and_common(toml) -> None:
    file = toml(
        "[common]\nmodel = '/m'\nlog_level = 'error'\n"
        "[engine]\nlog_level = 'debug'\n"
        "[frontend]\nport = 9\n"
        "[serve]\nstart_timeout = 9\n"
    )
    engine = load_config(EngineConfig, [file])
    assert (engine.model, engine.log_level) == ("/m", "debug")
    tokenizer = load_config(TokenizerConfig, [file])
    assert (tokenizer.model, tokenizer.log_level) == ("/m", "error")
    serve = load_config(ServeConfig, [file])
    assert (serve.model, serve.port, serve.start_timeout) == ("/m", 9, 9.0)


def test_serve_refuses_rooms_that_contradict_each_other(toml) -> None:
    file = toml("[engine]\nmodel = '/a'\n[tokenizer]\nmodel = '/b'\n")
    with pytest.raises(ConfigError, match=r"\[engine\] model contradicts \[tokenizer\] model"):
        load_config(ServeConfig, [file])


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(ServeConfig, ["--help"], "pagewire serve")
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field, info in ServeConfig.model_fields.items():
        # What `pagewire serve` refuses is not offered.
        assert (flag_name(field) in shown) == (field not in CHOSEN_BY_LAUNCHER), field
        if field not in CHOSEN_BY_LAUNCHER and info.description:
            assert " ".join(info.description.split()) in shown
    assert "Sequences running in one step. [128]" in shown


@given(
    st.builds(
        EngineConfig,
        model=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
            lambda text: text not in ("None", "--")  # argparse drops a value of two dashes
        ),
        max_model_len=st.none() | st.integers(1, 1 << 20),
        enable_prefix_caching=st.booleans(),
        gpu_memory_utilization=st.floats(0.01, 1.0),
        dtype=st.sampled_from(["auto", "float32"]),
    )
)
def test_flags_give_back_the_configuration(config: EngineConfig) -> None:
    assert load_config(EngineConfig, as_flags(config, EngineConfig)) == config
