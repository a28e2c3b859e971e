"""Who may do what: every gRPC method and every HTTP route, not some of them.

A server whose key guarded one prefix of its routes and left the others open is what this is
about (vllm-project/vllm#18892), so methods and routes are enumerated, never listed.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import vllm_engine_pb2
from starlette.routing import Route

from frontend.auth import RULES, Auth
from frontend.web.routes import page_routes
from pagewire.api_keys import ROLES, new_key, parse_keys, parse_line
from pagewire.cli import main
from pagewire.errors import ConfigError, PagewireError
from pagewire.kserve import inference_pb2 as kserve_pb2
from pagewire.v1 import admin_pb2, common_pb2, inference_pb2, model_pb2, tokenizer_pb2
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.frontend.conftest import Stack

SHORT = common_pb2.SamplingParams(max_tokens=2)
OUR_SERVICES = tuple(
    service
    for file in (
        inference_pb2,
        model_pb2,
        tokenizer_pb2,
        admin_pb2,
        kserve_pb2,
        vllm_engine_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
)
OTHER_SERVICES = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
PROBES = ("ServerLive", "ServerReady", "ModelReady", "HealthCheck")
"""Health in protocols that have methods of their own for it."""
METHODS = tuple(method for it in (*OUR_SERVICES, *OTHER_SERVICES) for method in it.methods)


class Keys:
    """A file of keys, and what is in it in the clear."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self.clear: dict[str, str] = {}

    def add(self, name: str, tenant: str, *roles: str) -> None:
        self.clear[name], entry = new_key(name, tenant, roles) if roles else new_key(name, tenant)
        self.lines.append(entry.line())
        self.path.write_text("\n".join(["# ours", "", *self.lines]))

    def metadata(self, name: str) -> Any:
        return (("authorization", f"Bearer {self.clear[name]}"),)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys")
    keys.add("acme-app", "acme")
    keys.add("proxy", "*")
    keys.add("reader", "acme", "models")
    keys.add("root", "*", "admin")
    return keys


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The paths of all methods that gRPC servers are given from now on."""
    paths: set[str] = set()
    add = grpc.aio._server.Server.add_generic_rpc_handlers

    def note(server: Any, handlers: Any) -> None:
        for handler in handlers:
            paths.update(
                path
                for path in handler._method_handlers
                if "/pagewire.v1.DetokenizerService/" not in path  # the fake tokenizer's
            )
        add(server, handlers)

    monkeypatch.setattr(grpc.aio._server.Server, "add_generic_rpc_handlers", note)
    return paths


@pytest.fixture
async def locked(served: set[str], make_stack: Callable[..., Any], keys: Keys) -> Stack:
    config = {
        "api_keys": str(keys.path),
        "auth_exempt": "none",
        "resume_ttl": 5.0,
        "vllm_protocol": True,
    }
    stack: Stack = await make_stack(step_s=0.002, config=config)
    return stack


def paths_of(method: Any) -> Iterator[str]:
    service = method.containing_service.full_name
    yield f"/{service}/{method.name}"
    if service == "grpc.reflection.v1alpha.ServerReflection":
        yield f"/grpc.reflection.v1.ServerReflection/{method.name}"


async def status_of(stack: Stack, method: Any, path: str, metadata: Any = None) -> str:
    """Of an empty request to it on its port, or OK with the first answer."""
    is_admin = method.containing_service.name == "AdminService"
    channel = stack.admin_channel if is_admin else stack.channel
    body, call = b"", None
    try:
        if method.client_streaming:
            call = channel.stream_stream(path)(iter([body]), timeout=60, metadata=metadata)
        elif method.server_streaming:
            call = channel.unary_stream(path)(body, timeout=60, metadata=metadata)
        else:
            await channel.unary_unary(path)(body, timeout=60, metadata=metadata)
        if call is not None:
            await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        if call is not None:
            call.cancel()
    return "OK"


async def test_no_method_goes_without_a_key(locked: Stack, served: set[str]) -> None:
    assert served == {path for method in METHODS for path in paths_of(method)}
    for method in METHODS:
        for path in paths_of(method):
            for metadata in (None, (("authorization", "Bearer pw-wrong"),)):
                assert await status_of(locked, method, path, metadata) == "UNAUTHENTICATED", path
    unheard_of = locked.channel.unary_unary("/pagewire.v1.NoService/Nothing")
    assert (await locked.fails(unheard_of(b"", timeout=60))).info.reason == "UNAUTHENTICATED"
    exposition = locked.frontend.metrics.exposition().decode()
    assert "NoService" not in exposition
    assert 'pagewire_rpcs_handled_total{code="UNAUTHENTICATED",method="unknown"} 1' in exposition


async def test_a_refused_call_costs_nothing_and_says_why(locked: Stack, keys: Keys) -> None:
    given: Any = (("x-request-id", "r-1"),)
    failure = await locked.fails(locked.open(prompt="a", metadata=given))
    assert failure.code is grpc.StatusCode.UNAUTHENTICATED
    assert (failure.info.domain, failure.info.reason) == ("pagewire", "UNAUTHENTICATED")
    assert failure.initial == {}  # Trailers-Only
    assert failure.trailing["x-request-id"] == "r-1"
    # Before its message has come.
    waiting = locked.channel.stream_stream("/pagewire.v1.InferenceService/Generate")(timeout=60)
    assert await waiting.code() is grpc.StatusCode.UNAUTHENTICATED
    two = (*keys.metadata("acme-app"), *keys.metadata("proxy"))
    basic = (("authorization", "Basic YTpi"),)
    for metadata in (two, basic, (("authorization", "Bearer"),), (("authorization", ""),)):
        failure = await locked.fails(locked.open(prompt="a", metadata=metadata))
        assert failure.code is grpc.StatusCode.UNAUTHENTICATED
    assert tenants(locked) == []


async def test_roles_decide_of_methods(locked: Stack, keys: Keys) -> None:
    needs = {
        "InferenceService": ("acme-app", "proxy", "root"),
        "TokenizerService": ("acme-app", "proxy", "root"),
        "ModelService": ("acme-app", "proxy", "reader", "root"),
        "AdminService": ("root",),
        "Health": tuple(keys.clear),
        "ServerReflection": tuple(keys.clear),
        "GRPCInferenceService": ("acme-app", "proxy", "root"),
        "GRPCInferenceService/ServerLive": tuple(keys.clear),
        "GRPCInferenceService/ServerReady": tuple(keys.clear),
        "GRPCInferenceService/ModelReady": tuple(keys.clear),
        "GRPCInferenceService/ServerMetadata": ("acme-app", "proxy", "reader", "root"),
        "GRPCInferenceService/ModelMetadata": ("acme-app", "proxy", "reader", "root"),
        "VllmEngine": ("acme-app", "proxy", "root"),
        "VllmEngine/HealthCheck": tuple(keys.clear),
        "VllmEngine/FlushCache": ("root",),
        "VllmEngine/StartProfile": ("root",),
        "VllmEngine/StopProfile": ("root",),
    }
    for method in METHODS:
        if method.name == "Drain":
            continue  # it would be done
        for path in paths_of(method):
            for name in keys.clear:
                code = await status_of(locked, method, path, keys.metadata(name))
                service = method.containing_service.name
                allowed = name in needs.get(f"{service}/{method.name}", needs[service])
                assert (code != "PERMISSION_DENIED") == allowed, (path, name)
                assert code != "UNAUTHENTICATED"
    drain = locked.admin.Drain(
        admin_pb2.DrainRequest(), metadata=keys.metadata("proxy"), timeout=60
    )
    failure = await locked.fails(drain)
    assert (failure.code.name, failure.info.reason) == ("PERMISSION_DENIED",) * 2
    assert failure.message == "this key has not the role admin"


async def test_no_http_route_goes_without_a_key(locked: Stack, keys: Keys) -> None:
    page = {route.path for route in page_routes()}  # files that are the same for everybody
    routes = [it for it in locked.frontend._http.app.routes if it.path not in page]
    assert all(type(route) is Route for route in routes)
    assert {"/metrics", "/live", "/v1/chat/completions"} <= {route.path for route in routes}
    async with httpx.AsyncClient(base_url=f"http://{locked.frontend.http_address}") as client:
        for path in (
            *(route.path for route in routes),
            "//",
            "/web",
            "/web/none",
            "/v1/none",
            "//metrics",
        ):
            for method in ("GET", "POST", "OPTIONS"):
                for headers in ({}, {"authorization": "Bearer pw-wrong"}):
                    # In full: a client takes "//metrics" alone for a host.
                    url = f"http://{locked.frontend.http_address}{path}"
                    got = await client.request(method, url, headers=headers)
                    assert got.status_code == 401, path
                    assert got.headers["www-authenticate"] == "Bearer"
                    assert got.json()["error"]["code"] == "unauthenticated"
        reader = dict(keys.metadata("reader"))
        forbidden = {
            r.path for r in routes if r.path not in ("/v1/models", "/v1/models/{model:path}")
        }
        for path in forbidden:
            got = await client.post(path, headers=reader)
            open_to_any = path in ("/healthz", "/readyz", "/health", "/ping", "/version")
            assert (got.status_code == 403) != open_to_any, path
        assert (await client.get("/none", headers=reader)).status_code == 403
        root = dict(keys.metadata("root"))
        assert (await client.get("/none", headers=root)).status_code == 404
        assert (await client.get("/metrics", headers=root)).status_code == 200
        assert (await client.get("/v1/models", headers=reader)).status_code == 200


async def test_what_is_exempt_is_open_and_nothing_else(
    make_stack: Callable[..., Any], keys: Keys
) -> None:
    exempt = "health,reflection,metrics"
    stack = await make_stack(config={"api_keys": str(keys.path), "auth_exempt": exempt})
    for method in METHODS:
        service = method.containing_service.name
        is_open = service in ("Health", "ServerReflection") or method.name in PROBES
        for path in paths_of(method):
            code = await status_of(stack, method, path)
            assert (code == "UNAUTHENTICATED") != is_open, path
    async with httpx.AsyncClient(base_url=f"http://{stack.frontend.http_address}") as client:
        is_open = {"/healthz", "/readyz", "/health", "/ping", "/metrics", "/live"}
        is_open |= {route.path for route in page_routes()}
        for route in stack.frontend._http.app.routes:
            got = await client.get(route.path)
            assert (got.status_code == 401) != (route.path in is_open), route.path


def test_health_alone_is_open_unless_told_otherwise(keys: Keys) -> None:
    auth = Auth(str(keys.path), "health")
    assert auth.authorize("/grpc.health.v1.Health/Check", ()).name == ""
    for rule in RULES:
        if rule.group != "health":
            with pytest.raises(PagewireError):
                auth.authorize(f"{rule.prefix}X" if rule.prefix[-1] == "/" else rule.prefix, ())
    for exempt in ("helth", "health,none", ""):
        with pytest.raises(ConfigError, match="--auth-exempt"):
            Auth(str(keys.path), exempt)


def tenants(stack: Stack) -> list[str]:
    return [command.tenant for command in stack.engine.commands if isinstance(command, Add)]


async def test_the_key_decides_the_tenant(locked: Stack, keys: Keys) -> None:
    app, proxy = keys.metadata("acme-app"), keys.metadata("proxy")
    named = ("x-tenant-id", "other")
    for fields in ({}, {"tenant": ""}, {"tenant": "acme"}):
        await locked.stream(prompt="a", sampling_params=SHORT, metadata=app, **fields)
    await locked.stream(prompt="a", sampling_params=SHORT, metadata=(*proxy, named))
    await locked.stream(prompt="a", sampling_params=SHORT, metadata=proxy, tenant="third")
    await locked.stream(prompt="a", sampling_params=SHORT, metadata=proxy)
    assert tenants(locked) == ["acme", "acme", "acme", "other", "third", ""]
    for call in (
        locked.open(prompt="a", metadata=(*app, named)),
        locked.open(prompt="a", metadata=app, tenant="other"),
    ):
        failure = await locked.fails(call)
        assert failure.code is grpc.StatusCode.PERMISSION_DENIED
        assert failure.info.reason == "PERMISSION_DENIED"
    async with httpx.AsyncClient(base_url=f"http://{locked.frontend.http_address}") as client:
        body = {"prompt": "a", "max_tokens": 2}
        got = await client.post("/v1/completions", json=body, headers=dict(app))
        assert got.status_code == 200
        got = await client.post("/v1/completions", json=body, headers=dict((*app, named)))
        assert got.status_code == 403
    assert tenants(locked)[6:] == ["acme"]


async def test_another_tenants_request_is_none(make_stack: Callable[..., Any], keys: Keys) -> None:
    keys.add("rival", "rival")
    config = {"api_keys": str(keys.path), "resume_ttl": 5.0}
    stack = await make_stack(auto=False, config=config)
    mine, rival = keys.metadata("acme-app"), keys.metadata("rival")
    resumable = inference_pb2.ResumeOptions()
    call = stack.open(prompt="a", request_id="r", resumable=resumable, metadata=mine)
    await stack.engine.wait_running()
    cancel = inference_pb2.CancelRequest(request_id="r")
    resume = {"request_id": "r", "resume_from": inference_pb2.ResumePoint()}
    for attempt in (
        lambda: stack.inference.Cancel(cancel, metadata=rival, timeout=60),
        lambda: stack.open(**resume, metadata=rival),
    ):
        assert (await stack.fails(attempt())).code is grpc.StatusCode.NOT_FOUND
    call.cancel()
    held = stack.frontend.resumables._held["r"]
    await stack.until(lambda: held.reader is None)
    for attempt in (
        lambda: stack.inference.Cancel(cancel, metadata=rival, timeout=60),
        lambda: stack.open(**resume, metadata=rival),
    ):
        assert (await stack.fails(attempt())).code is grpc.StatusCode.NOT_FOUND
    await stack.inference.Cancel(cancel, metadata=mine, timeout=60)


async def test_keys_come_and_go_without_a_restart(
    locked: Stack, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    watched = locked.frontend._auth.keys
    keys.add("late", "late")
    call = locked.models.ListModels
    assert watched.look()
    await call(model_pb2.ListModelsRequest(), metadata=keys.metadata("late"), timeout=60)
    keys.path.write_text(keys.lines[-1] + "\nnonsense")
    assert not watched.look()
    assert "line 2: expected name:tenant:sha256hex[:roles]" in caplog.text
    await call(model_pb2.ListModelsRequest(), metadata=keys.metadata("proxy"), timeout=60)
    keys.path.unlink()
    assert not watched.look()
    keys.path.write_text(keys.lines[-1])
    assert watched.look()
    gone = call(model_pb2.ListModelsRequest(), metadata=keys.metadata("proxy"), timeout=60)
    assert (await locked.fails(gone)).code is grpc.StatusCode.UNAUTHENTICATED


async def test_no_key_is_in_any_log(
    locked: Stack, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong: Any = (("authorization", "Bearer pw-a-wrong-one"),)
    await locked.stream(prompt="a", sampling_params=SHORT, metadata=keys.metadata("acme-app"))
    await locked.fails(locked.open(prompt="a", metadata=wrong))
    await locked.fails(locked.open(prompt="a", metadata=keys.metadata("reader")))
    async with httpx.AsyncClient(base_url=f"http://{locked.frontend.http_address}") as client:
        await client.get("/v1/models", headers=dict(wrong))
    # As somebody might who mistakes what the file is for.
    keys.path.write_text(f"acme:{keys.clear['proxy']}")
    assert not locked.frontend._auth.keys.look()
    ours = [it for it in caplog.records if not it.name.startswith("http")]  # the client's own
    said = "".join(f"{it.getMessage()} {vars(it)}" for it in ours)
    assert "refused a gRPC call" in said
    assert "'key_name': 'acme-app'" in said
    for key in (*keys.clear.values(), "pw-a-wrong-one"):
        assert key not in said


def test_lines_of_a_keys_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "acme-app", "--tenant=acme", "--role=models", "--role=admin"]) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    assert key not in out
    (tmp_path / "keys").write_text(out)
    auth = Auth(str(tmp_path / "keys"), "none")
    principal = auth.authorize("/pagewire.v1.AdminService/Drain", (f"bearer {key}",))
    assert (principal.name, principal.tenant) == ("acme-app", "acme")
    digest = parse_line(out.strip()).digest.hex()
    for line, said in (
        (f"a:b:{digest}:inference:x", "expected name:tenant"),
        (f"a b:t:{digest}", "the name must have"),
        (f"a:t:{digest.upper()}", "SHA-256 in 64"),
        (f"a:t:{key}", "SHA-256 in 64"),
        (f"a:t:{digest}:{key}", f"a role is none of {', '.join(ROLES)}"),
        (f"a:{'t' * 129}:{digest}", "the tenant must have at most 128"),
        (f"a:t:{digest}\nb:t:{digest}", "line 2: b or its key is there twice"),
        ("# nothing", "there is no key in it"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)) as raised:
            parse_keys(line)
        assert key not in str(raised.value)
        (tmp_path / "keys").write_text(line)
        with pytest.raises(ConfigError, match="--api-keys: "):
            Auth(str(tmp_path / "keys"), "none")
    with pytest.raises(ConfigError, match=r"--api-keys: .*No such file"):
        Auth(str(tmp_path / "none"), "none")
    assert main(["keys", "new", "a:b"]) == 2
