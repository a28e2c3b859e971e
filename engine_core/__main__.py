"""python -m engine_core: configuration, address, model, then the loop."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import zmq

from engine_core.proc import EngineProcess, serve
from engine_core.progress import report_progress
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.model_source import resolve_model
from pagewire.obs.logging import setup_logging
from pagewire.obs.ready import COMMANDS, MODEL, write_ready_file
from pagewire.settings import load_config
from pagewire.wire.messages import PROTOCOL_VERSION, Ready
from pagewire.wire.sockets import (
    BindError,
    bind_commands,
    bound_endpoint,
    close_bound,
    require_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from engine_core.core import EngineCore
    from engine_core.engine_builder import BuiltEngine
    from engine_core.grammar.gate import GrammarGate
    from engine_core.grammar.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """The engine's exit status: 0 stopped by a signal, 1 crashed, 2 wrong
    configuration, 3 the model cannot be loaded."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    _spin_briefly()
    try:
        config = load_config(EngineConfig, argv, prog="python -m engine_core")
        setup_logging("engine", config.log_level, config.log_format)
        return _run(config)
    except ConfigError as error:
        return _fail(error, 2)
    except ModelLoadError as error:
        return _fail(error, 3)
    except BindError as error:
        return _fail(error, 1)


def _spin_briefly() -> None:
    """Keeps OpenMP threads from spinning away the cores that other rooms need.

    libgomp reads it when torch is loaded, so this comes first.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM or SIGINT while loading, when there is nothing to tell anybody.

    An exception would be lost where Python swallows them (a weakref's callback,
    say), and the signal with it. The next start removes the socket's file.
    """
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # the cursor that the progress bar hid
    os._exit(0)


def _fail(error: Exception, status: int) -> int:
    print(f"engine_core: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
    return status


def _run(config: EngineConfig) -> int:
    context: zmq.Context[Any] = zmq.Context()
    router = None
    built = None
    try:
        # Before the model: a taken address shows at once, and a Hello that comes
        # while the model loads waits in the socket.
        require_local(config.engine_bind, "--engine-bind", allow_remote=config.allow_remote_engine)
        router = bind_commands(context, config.engine_bind)
        endpoint = bound_endpoint(router)
        _log.info("commands on %s", endpoint)
        built = _build(config)
        epoch = secrets.randbits(64)
        vocabulary = _vocabulary(built, config)
        grammars = _make_grammars(built, vocabulary)
        process = EngineProcess(
            _make_core(built, config, epoch, grammars, vocabulary),
            _ready(built, epoch),
            context,
            router,
            frontend_timeout=config.frontend_timeout,
            hang_timeout=config.engine_hang_timeout,
        )

        grammars.set_wake(process.wake)
        built.ranks.watch(process.crash)

        def announce() -> None:
            facts: dict[str, object] = {COMMANDS: endpoint, MODEL: built.model_name}
            write_ready_file(config.ready_file, facts)

        status = serve(process, announce)
        grammars.close()
        context.term()
        return status
    finally:
        if built is not None:
            built.ranks.close()
        if router is not None and not router.closed:
            close_bound(router)
        context.destroy(linger=0)


def _build(config: EngineConfig) -> BuiltEngine:
    resolve_model(config.model, config.served_model_name)  # fails in no time, torch takes seconds
    if config.device.startswith("sim:"):
        from engine_core.sim_builder import build_simulated

        return build_simulated(config)
    if config.tensor_parallel_size > 1:
        return _build_ranks(config)
    from engine_core.engine_builder import build_engine

    with report_progress(config.model) as progress:
        return build_engine(config, progress)


def _build_ranks(config: EngineConfig) -> BuiltEngine:
    from engine_core.parallel.processes import RankProcesses
    from engine_core.parallel.refusals import check_ranks

    check_ranks(config)
    processes = RankProcesses(config)
    try:
        from engine_core.engine_builder import build_engine
        from engine_core.parallel.leader import LeadingRank

        with report_progress(config.model) as progress:
            return build_engine(config, progress, LeadingRank(processes))
    except BaseException:
        processes.close()
        raise


def _vocabulary(built: BuiltEngine, config: EngineConfig) -> Callable[[], Vocabulary]:
    """Read when first asked for."""
    from engine_core.grammar.vocabulary import read_vocabulary

    source = resolve_model(config.model, config.served_model_name)
    return cache(lambda: read_vocabulary(source, built.vocab_size))


def _make_grammars(built: BuiltEngine, vocabulary: Callable[[], Vocabulary]) -> GrammarGate:
    from engine_core.grammar.compiler import GrammarCompiler
    from engine_core.grammar.gate import GrammarGate

    return GrammarGate(GrammarCompiler(vocabulary, built.eos_token_ids).compile)


def _make_core(
    built: BuiltEngine,
    config: EngineConfig,
    epoch: int,
    grammars: GrammarGate,
    vocabulary: Callable[[], Vocabulary],
) -> EngineCore:
    from engine_core.core import EngineCore
    from engine_core.kv.manager import KVManager
    from engine_core.kv.offload import KVOffload
    from engine_core.kv.restore_policy import RestorePolicy
    from engine_core.kv.window import KVWindow
    from engine_core.sched.limits import SchedulerLimits
    from engine_core.sched.policy import make_policy
    from engine_core.sched.scheduler import Scheduler

    try:
        limits = SchedulerLimits(
            max_num_seqs=built.max_num_seqs,
            max_num_batched_tokens=built.max_num_batched_tokens,
            max_model_len=built.max_model_len,
            vocab_size=built.vocab_size,
            eos_token_ids=built.eos_token_ids,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_mixed_prefill_tokens=config.max_mixed_prefill_tokens or 0,
            short_prefill_share=config.short_prefill_share,
        )
        offload = None
        if built.num_host_blocks:
            policy = RestorePolicy(built.block_size, built.kv_costs)
            offload = KVOffload(built.num_host_blocks, policy)
        window = None if built.window is None else KVWindow(built.window, limits.max_chunk)
        kv_manager = KVManager(
            built.num_blocks, built.block_size, config.enable_prefix_caching, offload, window
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    scheduler = Scheduler(
        limits,
        kv_manager,
        make_policy(config.scheduling_policy),
        built.speculation,
        built.prefill_budget,
    )
    return EngineCore(
        scheduler,
        built.runner,
        epoch=epoch,
        grammars=grammars,
        token_bytes=cache(lambda: vocabulary().text_bytes()),
        find_unsupported=built.find_unsupported,
        async_scheduling=built.async_scheduling,
        adapters=built.adapters,
    )


def _ready(built: BuiltEngine, epoch: int) -> Ready:
    return Ready(
        protocol=PROTOCOL_VERSION,
        epoch=epoch,
        model_name=built.model_name,
        architecture=built.architecture,
        max_model_len=built.max_model_len,
        vocab_size=built.vocab_size,
        eos_token_ids=built.eos_token_ids,
        dtype=built.dtype,
        device=built.device,
        num_blocks=built.num_blocks - 1,  # the null block is nobody's business outside
        block_size=built.block_size,
        max_num_seqs=built.max_num_seqs,
        max_num_batched_tokens=built.max_num_batched_tokens,
        pid=os.getpid(),
        default_sampling=built.default_sampling,
        adapters=built.adapters.infos(),
        max_loras=built.adapters.num_slots,
    )


if __name__ == "__main__":
    raise SystemExit(main())
