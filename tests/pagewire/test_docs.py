"""Documentation that says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from frontend.metrics import Metrics
from frontend.openai.errors import STATUS as HTTP_STATUS
from frontend.openai.requests import ChatBody, CompletionBody
from frontend.status import STATUS
from pagewire.config import ServeConfig
from pagewire.settings import flag_name

ROOT = Path(__file__).resolve().parents[2]
DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    *("docs/api.md", "docs/operations.md", "docs/models.md", "docs/decisions.md"),
    *("docs/quickstart.md", "docs/client.md", "docs/migration.md"),
)


def test_the_status_table_is_the_one_in_the_code() -> None:
    pattern = r"^\| `(\w+)` \| ([A-Z_]+) \| (\d+) \|"
    rows = re.findall(pattern, (ROOT / "docs/api.md").read_text(), re.M)
    told = {code: (status.name, str(HTTP_STATUS[code])) for code, status in STATUS.items()}
    assert {code: (grpc, http) for code, grpc, http in rows} == told
    assert len(rows) == len(STATUS)


def test_the_metrics_table_is_what_is_exported() -> None:
    source = "".join(path.read_text() for path in (ROOT / "frontend").rglob("*.py"))
    exported = set(re.findall(r'"((?:vllm:|pagewire_)\w+)"', source))
    assert "vllm:time_to_first_token_seconds" in exported
    assert "pagewire_rpcs_handled_total" in Metrics().exposition().decode()
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("## Metrics") : text.index("## Logs")]
    assert set(re.findall(r"`((?:vllm:|pagewire_)\w+)`", section)) == exported


def test_every_alert_has_its_advice() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text())
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("### Alerts") : text.index("## Traces")]
    assert re.findall(r"^\| `(Pagewire\w+)` \|", section, re.M) == alerts


def test_metrics_that_stay_the_same_are_exported() -> None:
    source = "".join(path.read_text() for path in (ROOT / "frontend").rglob("*.py"))
    exported = set(re.findall(r'"((?:vllm:|pagewire_)\w+)"', source))
    rows = re.findall(r"^\|(.*)\|(.*)\|$", (ROOT / "docs/migration.md").read_text(), re.M)
    same = [left for left, right in rows if "vllm:" in left and "the same" in right]
    named = {name for left in same for name in re.findall(r"vllm:\w+", left)}
    assert len(named) > 15
    assert named - exported == set()
    others = {n for _, right in rows for n in re.findall(r"(?:vllm:|pagewire_)\w+", right)}
    assert others - exported == set()


def test_the_clients_failures_are_all_told() -> None:
    from pagewire import client

    told = set(re.findall(r"`(\w+)`", (ROOT / "docs/client.md").read_text()))
    kinds = {
        name
        for name in client.__all__
        if isinstance(getattr(client, name), type)
        and issubclass(getattr(client, name), client.CallFailed)
    }
    assert kinds - told == set()


@pytest.mark.parametrize("name", DOCS)
def test_flags_in_the_docs_exist(name: str) -> None:
    others = {
        "--config", "--help", "--temperature", "--max-tokens", "--chat", "--json", "--build",
        "--wait", "--follow", "--no-reflection", "--no-enable-prefix-caching", "--tenant",
        "--tls-ca", "--api-key", "--http", "--once", "--interval",
        "--no-web-page", "--profile", "--build-arg", "--cpus", "--enable-feature",
        # smg's
        "--target", "--backend", "--policy", "--tokenizer-path", "--worker-urls",
    }  # fmt: skip
    text = (ROOT / name).read_text()
    if name == "docs/migration.md":
        # The first column, and what has no counterpart, are vLLM's.
        text = re.sub(r"^\| [^|]*(?=\|)|Nothing here stands for[^.]*", "", text, flags=re.M)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    bench = re.findall(r'"(--[a-z-]+)"', (ROOT / "pagewire/cli/bench_flags.py").read_text())
    ray = re.findall(r'"(--[a-z-]+)"', (ROOT / "deploy/ray/plan.py").read_text())
    known = {*ray} | {flag_name(field) for field in ServeConfig.model_fields} | others | {*bench}
    assert flags - known == set()


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
        if not target.startswith("https://"):
            assert ((ROOT / name).parent / target).exists(), target


def test_every_field_of_a_body_is_named() -> None:
    text = (ROOT / "docs/api.md").read_text()
    section = text[text.index("## HTTP") :]
    named = set(re.findall(r"`(\w+)`", section))
    for body in (CompletionBody, ChatBody):
        nothing = {f.name for f in msgspec.structs.fields(body) if f.type is type(None)}
        assert set(body.__struct_fields__) - nothing - {"modalities"} - named == set()
