"""How fast the workloads of bench/peers.py could be at best, from what a model's steps read
and multiply and what the machine reaches (bench/ceilings.py).

A token's products are 2 operations for each element of the layers' matrices, and of the head
where it is sampled from; its attention is 4 * (elements of a token's queries in all layers)
operations for each key it looks at. A step reads the layers' and the head's weights once, and
the KV of each sequence that decodes; what all sequences share is read once. Each new token's
KV is written. Work takes

    max(bytes / read, products / ceiling of the weights + attention / ceiling of its floats)

seconds. A lone stream computes its prompt, then its output, each of which takes as long by
itself. Several streams share steps, of which sum of outputs / streams is the least number, and
at best prompts are computed beside so much decoding that neither memory nor arithmetic ever
waits: there the bytes and operations of both are added up first. No server that computes each
token in a step of its own is faster; one that guesses tokens and is right may be.

Time to first token is at least that of its own prompt alone in a step. Time between tokens
is that of a step in which all streams decode, at the mean of their contexts: a server that
keeps fewer of them running goes below. The 99th percentiles are the scheduler's business, and
have no floor here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.workloads import Size, size

WEIGHTS = ("float32", "bfloat16", "packed")
"""How a server keeps matrices; packed: in the bytes that the checkpoint stores, multiplied as
bytes. The KV cache and attention are in bfloat16 but where weights are float32."""

RATES = ("output tok/s", "prompt tok/s")
FLOORS = (*RATES, "TTFT p50 ms", "ITL p50 ms")
"""The figures of bench/peers.py that have one."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all threads together, a second; a multiply-add is two operations."""

    threads: int
    num_bytes: int
    """Over which reading was measured."""
    read: float
    float32: float
    bfloat16: float
    int8: float | None
    """None where the CPU has no instruction for products of bytes."""

    def __str__(self) -> str:
        products = {"float32": self.float32, "bfloat16": self.bfloat16, "int8": self.int8}
        rates = [f"{name} {rate / 1e9:.0f}" for name, rate in products.items() if rate is not None]
        return (
            f"Ceilings of {self.threads} thread(s): read {self.read / 1e9:.1f} GB/s (over "
            f"{self.num_bytes / 1e6:.0f} MB); products, 10^9 operations a second: "
            f"{', '.join(rates)}."
        )

    def or_better(self, other: Ceilings | None) -> Ceilings:
        """The better of two measurements of the same, each by itself."""
        if other is None:
            return self
        int8 = None if self.int8 is None or other.int8 is None else max(self.int8, other.int8)
        return replace(
            self,
            read=max(self.read, other.read),
            float32=max(self.float32, other.float32),
            bfloat16=max(self.bfloat16, other.bfloat16),
            int8=int8,
        )


@dataclass(frozen=True, slots=True)
class ModelReads:
    """What a step of a model reads and multiplies with one form of its weights."""

    weights: str
    """One of WEIGHTS."""
    layer_params: int
    head_params: int
    weight_bytes: int
    """Of the layers and the head."""
    query_width: int
    """Elements of a token's queries in all layers."""
    kv_bytes: int
    """Of a token in all layers."""

    @classmethod
    def of(cls, model: str, weights: str) -> ModelReads:
        """model: as `pagewire serve --model` takes it; its configuration is read, no weights.
        Raises SystemExit that says what has no floor, ModelLoadError what cannot be read."""
        # torch, which the rest of this file does without.
        from engine_core.model.loader import open_model
        from pagewire.model_source import resolve_model

        if weights not in WEIGHTS:
            raise SystemExit(f"no floor for weights {weights!r}; known: {', '.join(WEIGHTS)}")
        opened = open_model(resolve_model(model))
        config = opened.config
        if config.has_experts or any(layer.window is not None for layer in config.layers):
            raise SystemExit(f"{model}: no floor of mixtures of experts and sliding windows")
        shapes = opened.checkpoint.shapes()
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        layers = [n for n, s in shapes.items() if n.startswith("model.layers.") and len(s) == 2]
        params = {name: shapes[name][0] * shapes[name][1] for name in [head, *layers]}
        item = 4 if weights == "float32" else 2
        num_bytes = (
            sum(map(opened.checkpoint.num_bytes, params))
            if weights == "packed"
            else item * sum(params.values())
        )
        return cls(
            weights=weights,
            layer_params=sum(params.values()) - params[head],
            head_params=params[head],
            weight_bytes=num_bytes,
            query_width=config.num_layers * config.num_heads * config.head_dim,
            kv_bytes=2 * item * config.num_layers * config.num_kv_heads * config.head_dim,
        )

    def work(self, *, steps: float, tokens: float, sampled: float, kv: float, pairs: float) -> Work:
        """kv: tokens whose KV is read. pairs: of queries and keys."""
        return Work(
            num_bytes=steps * self.weight_bytes + (kv + tokens) * self.kv_bytes,
            products=2.0 * (self.layer_params * tokens + self.head_params * sampled),
            attention=4.0 * self.query_width * pairs,
        )

    def seconds(self, work: Work, ceilings: Ceilings) -> float:
        attention = ceilings.float32 if self.weights == "float32" else ceilings.bfloat16
        rates = {"float32": ceilings.float32, "bfloat16": ceilings.bfloat16}
        # Without products of bytes, bytes are multiplied as floats.
        products = rates.get(self.weights, ceilings.int8 or ceilings.float32)
        return max(
            work.num_bytes / ceilings.read,
            work.products / products + work.attention / attention,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that are read and written, and operations."""

    num_bytes: float
    products: float
    attention: float

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_bytes + other.num_bytes,
            self.products + other.products,
            self.attention + other.attention,
        )


def floors(
    model: ModelReads, ceilings: Ceilings, workload: str, requests: float = 1.0
) -> dict[str, float]:
    """By the names of FLOORS, in their units; of what a workload has none, none. requests: the
    fraction of the workload's that are sent."""
    load = size(workload, requests)
    prompts, outputs = _prompts(model, load), _outputs(model, load)
    if load.concurrency == 1:
        seconds = model.seconds(prompts, ceilings) + model.seconds(outputs, ceilings)
    else:
        seconds = model.seconds(prompts + outputs, ceilings)
    own = model.work(
        steps=1,
        tokens=load.prompt,
        sampled=1,
        kv=load.shared,
        pairs=load.prompt_pairs + load.prompt * load.shared,
    )
    found = {
        "output tok/s": load.num_requests * load.output / seconds,
        "prompt tok/s": load.num_requests * (load.shared + load.prompt) / seconds,
        "TTFT p50 ms": 1e3 * model.seconds(own, ceilings),
    }
    if load.output > 1:
        steps = _output_steps(load)
        found["ITL p50 ms"] = 1e3 * model.seconds(outputs, ceilings) / steps
    return found


def _prompts(model: ModelReads, load: Size) -> Work:
    count = load.num_requests
    return model.work(
        # Each in a step of its own, or beside the others' and what they decode.
        steps=count / load.concurrency,
        tokens=load.shared + count * load.prompt,
        sampled=count,
        kv=count / load.concurrency * load.shared,
        pairs=(
            load.shared * (load.shared + 1) / 2
            + count * (load.prompt_pairs + load.prompt * load.shared)
        ),
    )


def _outputs(model: ModelReads, load: Size) -> Work:
    """After the first of each, which its prompt gives."""
    count = load.num_requests
    tokens = count * (load.output - 1)
    pairs = count * load.output_pairs + tokens * load.prompt
    return model.work(
        steps=_output_steps(load),
        tokens=tokens,
        sampled=tokens,
        # A token's own is written, not read.
        kv=pairs - tokens + _output_steps(load) * load.shared,
        pairs=pairs + tokens * load.shared,
    )


def _output_steps(load: Size) -> float:
    return load.num_requests * (load.output - 1) / load.concurrency


def fraction(figure: str, value: float, floor: float) -> float:
    """Of what is possible: 1 at the floor, less for what is slower."""
    return value / floor if figure in RATES else floor / value
