"""The engine process over the fake model: in a thread, or as a process of its own.

python -m tests.support.engine_process ENDPOINT READY_FILE runs the latter, with
a model that takes a few milliseconds a step.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import zmq

from engine_core.core import EngineCore
from engine_core.kv.manager import KVManager
from engine_core.lora.adapters import Adapters
from engine_core.proc import EngineProcess, serve
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.scheduler import Scheduler
from pagewire.obs.ready import COMMANDS, write_ready_file
from pagewire.wire.messages import PROTOCOL_VERSION, Ready
from pagewire.wire.sockets import bind_commands, bound_endpoint
from tests.support.fake_model import EOS, VOCAB_SIZE, DonePending, FakeRunner, FakeSlots

if TYPE_CHECKING:
    from types import TracebackType

    from engine_core.sched.plan import StepPlan

NUM_BLOCKS = 256
BLOCK_SIZE = 16
TIMEOUT_S = 60.0


class GatedRunner:
    """A FakeRunner that computes only while the gate is open, or step by step."""

    def __init__(self, inner: FakeRunner) -> None:
        self._inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        """Set at each launch."""
        self.permits = threading.Semaphore(0)
        """One for each step that may pass a closed gate."""
        self.error: Exception | None = None
        """Raised by the next launch."""

    def launch(self, plan: StepPlan) -> DonePending:
        self.entered.set()
        if self.error is not None:
            raise self.error
        while not self.gate.is_set() and not self.permits.acquire(timeout=0.02):
            pass
        return self._inner.launch(plan)


class PacedRunner:
    """A FakeRunner that takes its time, so that a test can come in between."""

    def __init__(self, inner: FakeRunner, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self._never = threading.Event()

    def launch(self, plan: StepPlan) -> DonePending:
        self._never.wait(self._step_s)
        return self._inner.launch(plan)


def make_limits(max_num_seqs: int = 8) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=2048,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )


def make_core(limits: SchedulerLimits, runner: Any, adapters: Adapters | None = None) -> EngineCore:
    scheduler = Scheduler(limits, KVManager(NUM_BLOCKS, BLOCK_SIZE))
    return EngineCore(scheduler, runner, epoch=secrets.randbits(64), adapters=adapters)


def make_ready(limits: SchedulerLimits, epoch: int) -> Ready:
    return Ready(
        protocol=PROTOCOL_VERSION,
        epoch=epoch,
        model_name="fake",
        architecture="Fake",
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        dtype="int64",
        device="cpu",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        pid=os.getpid(),
        default_sampling={},
    )


class ThreadedEngine:
    """An EngineProcess whose loop runs in a thread. Use it as a context manager;
    on the way out it is stopped, if it still runs, and must end with `status`."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:0",
        *,
        max_num_seqs: int = 8,
        frontend_timeout: float = 60.0,
        hang_timeout: float = 0.0,
        heartbeat_interval: float = 0.05,
    ) -> None:
        limits = make_limits(max_num_seqs)
        model = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, limits)
        self.runner = GatedRunner(model)
        self.adapters = Adapters(FakeSlots(model), num_slots=2, directory=Path("/"))
        self.core = make_core(limits, self.runner, self.adapters)
        self.status: int | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        router = bind_commands(self._context, endpoint)
        self.endpoint = bound_endpoint(router)
        self.process = EngineProcess(
            self.core,
            make_ready(limits, self.core.epoch),
            self._context,
            router,
            frontend_timeout=frontend_timeout,
            hang_timeout=hang_timeout,
            heartbeat_interval=heartbeat_interval,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.runner.gate.set()
        self.process.stop()
        status = self.join()
        if error is None:
            assert status == 0, status

    def join(self) -> int | None:
        """Waits for the end, and returns the exit status."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the engine does not end"
        return self.status

    def _run(self) -> None:
        self.status = self.process.run()
        self._context.term()


def main() -> int:
    endpoint, ready_file = sys.argv[1:]
    limits = make_limits()
    runner = PacedRunner(FakeRunner(NUM_BLOCKS, BLOCK_SIZE, limits), 0.005)
    core = make_core(limits, runner)
    context: zmq.Context[Any] = zmq.Context()
    router = bind_commands(context, endpoint)
    facts: dict[str, object] = {COMMANDS: bound_endpoint(router)}
    process = EngineProcess(
        core, make_ready(limits, core.epoch), context, router, frontend_timeout=60.0
    )
    status = serve(process, lambda: write_ready_file(ready_file, facts))
    context.term()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
