"""Where requests wait until what constrains them is compiled, off the engine's loop."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from engine_core.grammar.grammar import BadConstraint

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.grammar.grammar import Grammar
    from engine_core.request import Request
    from pagewire.types import StructuredOutput

_log = logging.getLogger(__name__)

MAX_CACHED = 128
"""Compiled constraints that are kept; the one unused for longest goes first."""
# A grammar may nest as deep as its text is long, and llguidance recurses: with the
# usual 8 MiB the process would be gone. What is not touched costs nothing.
_STACK_BYTES = 512 * 2**20
_CLOSE_S = 10.0


def compile_nothing(_wanted: StructuredOutput) -> Grammar:
    """For an engine that knows no tokens."""
    raise BadConstraint("this engine compiles no constraints")


class GrammarGate:
    """A queue before the scheduler's. Every method belongs to the loop's thread.

        enter() --> waiting, compiled in a thread of its own --> take_ready() --> scheduler
                          leave(): ended from outside meanwhile

    Requests of one constraint share one compilation, and later ones its result,
    a refusal too.
    """

    def __init__(
        self,
        compile_constraint: Callable[[StructuredOutput], Grammar],
        max_cached: int = MAX_CACHED,
    ) -> None:
        """compile_constraint: runs in the thread; raises BadConstraint."""
        self._compile = compile_constraint
        self._max_cached = max_cached
        self._wake: Callable[[], None] = lambda: None
        self._jobs: SimpleQueue[StructuredOutput | None] = SimpleQueue()
        self._results: deque[tuple[StructuredOutput, Grammar | BadConstraint]] = deque()
        self._cache: OrderedDict[StructuredOutput, Grammar | BadConstraint] = OrderedDict()
        self._waiting: dict[StructuredOutput, list[Request]] = {}
        self._ready: list[Request] = []
        """Theirs was in the cache."""
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Requests in it."""
        return len(self._ready) + sum(map(len, self._waiting.values()))

    def set_wake(self, wake: Callable[[], None]) -> None:
        """wake: called in the thread when take_ready() has something new."""
        self._wake = wake

    @property
    def has_ready(self) -> bool:
        """Whether take_ready() would return something."""
        return bool(self._ready or self._results)

    def enter(self, request: Request) -> None:
        """A request whose sampling has structured_output."""
        wanted = _wanted(request)
        if wanted in self._cache:
            self._ready.append(request)
        elif wanted in self._waiting:
            self._waiting[wanted].append(request)
        else:
            self._waiting[wanted] = [request]
            try:
                self._start_thread()
            except RuntimeError:
                _log.exception("the thread that compiles constraints cannot be started")
                refusal = BadConstraint("the engine has no memory left to compile it")
                self._results.append((wanted, refusal))
            else:
                self._jobs.put(wanted)

    def leave(self, request: Request) -> bool:
        """Takes out a request that ends; False if it is not here."""
        if request in self._ready:
            self._ready.remove(request)
            return True
        wanted = request.sampling.structured_output
        waiting = self._waiting.get(wanted) if wanted is not None else None
        if waiting is None or request not in waiting:
            return False
        waiting.remove(request)
        if not waiting:
            del self._waiting[wanted]  # type: ignore[arg-type]  # known by now
        return True

    def take_ready(self) -> list[tuple[Request, Grammar | BadConstraint]]:
        """Those that wait no longer, in order of arrival for each constraint."""
        while self._results:
            wanted, result = self._results.popleft()
            self._cache[wanted] = result
            self._ready += self._waiting.pop(wanted, ())
        taken = []
        for request in self._ready:
            wanted = _wanted(request)
            self._cache.move_to_end(wanted)
            taken.append((request, self._cache[wanted]))
        self._ready.clear()
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return taken

    def close(self) -> None:
        """Ends the thread, after what it is compiling. Idempotent."""
        if self._thread is not None:
            self._waiting.clear()
            self._jobs.put(None)
            self._thread.join(_CLOSE_S)
            self._thread = None

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            thread.start()
            self._thread = thread
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        while (wanted := self._jobs.get()) is not None:
            # Nobody may be waiting for it any more.
            if wanted in self._waiting:
                self._results.append((wanted, self._attempt(wanted)))
                self._wake()

    def _attempt(self, wanted: StructuredOutput) -> Grammar | BadConstraint:
        try:
            return self._compile(wanted)
        except BadConstraint as error:
            return error
        # A panic of the library is no Exception; it must end one constraint, not the thread.
        except BaseException:
            _log.exception("a %s of %d characters broke", wanted.kind, len(wanted.text))
            return BadConstraint("it cannot be compiled")


def _wanted(request: Request) -> StructuredOutput:
    wanted = request.sampling.structured_output
    assert wanted is not None, request
    return wanted
