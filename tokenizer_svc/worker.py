"""A worker process: one tokenizer, all the text of its sequences.

The main thread reads frames and serves steps at once, since every stream waits for
them. Encoding goes to two lanes, threads that each take whatever is waiting as one
batch: one lane for ordinary texts and one for long texts, so that a book does not
hold up a question; those go one at a time, for the memory that encoding takes. (The
library encodes with Python's lock released.)

The worker ends when its socket does, so it never outlives the server. It ignores
SIGINT and SIGTERM: a signal to the whole process group must not take away the text
of streams that the server is draining.

Run as `python -m tokenizer_svc.worker --fd N`, N being a connected stream socket.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire import collector
from pagewire.errors import ConfigError, InvalidRequest, ModelLoadError
from pagewire.obs.logging import setup_logging
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.detokenize import Detokenizer
from tokenizer_svc.encode import check_text, encode_batch
from tokenizer_svc.loader import LoadedTokenizer, load_tokenizer
from tokenizer_svc.messages import (
    LENGTH,
    Chat,
    Decode,
    Decoded,
    DropStream,
    Encode,
    Encoded,
    Failed,
    FromWorker,
    Load,
    Loaded,
    LoadFailed,
    Lost,
    Open,
    Ping,
    Pong,
    Spell,
    Spelled,
    Step,
    StepDone,
    Stop,
    ToWorker,
    decode_to_worker,
    encode_frame,
    pack_ids,
    unpack_ids,
)
from tokenizer_svc.sequence import OutputSequence, resume
from tokenizer_svc.tool_format import find_format, has_tools, special_markers

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

LONG_TEXT_CHARS = 32_768
SHORT_BATCH = 256
_Job = Encode | Chat | Decode | Spell


class Channel:
    """Frames over a socket; sending is safe from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb", buffering=1 << 16)
        self._sending = threading.Lock()

    def receive(self) -> ToWorker | None:
        """The next message; None once the other end is gone."""
        try:
            header = self._reader.read(LENGTH.size)
            if len(header) < LENGTH.size:
                return None
            (size,) = LENGTH.unpack(header)
            body = self._reader.read(size)
        except ConnectionError:
            return None
        return decode_to_worker(body) if len(body) == size else None

    def send(self, message: FromWorker) -> None:
        frame = encode_frame(message)
        with self._sending:
            self._socket.sendall(frame)

    def close(self) -> None:
        """Ends receive() in whatever thread waits there."""
        self._socket.shutdown(socket.SHUT_RDWR)


class StepServer:
    """The sequences of all streams that this worker holds."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._streams: dict[int, dict[int, OutputSequence]] = {}

    def step(self, step: Step) -> StepDone:
        """Answers with at most one row for a sequence."""
        sequences = self._streams.setdefault(step.stream, {})
        done = StepDone(step.call, [], [], [], [])
        replayed: dict[int, str] = {}
        for opening in step.opens:
            self._open(sequences, opening, replayed, done)
        start = 0
        for sequence_id, count, finished in zip(
            step.sequences, step.counts, step.finished, strict=True
        ):
            ids = step.token_ids[start : start + count]
            start += count
            # Unknown: it stopped here and the server did not know it yet.
            sequence = sequences.get(sequence_id)
            if sequence is None:
                continue
            try:
                text = sequence.feed(ids)
                if finished:
                    text += sequence.finish()
            except Exception as error:
                del sequences[sequence_id]
                done.errors.append(Lost(sequence_id, log_bug("detokenization", error)))
                continue
            if replayed:
                text = replayed.pop(sequence_id, "") + text
            stopped = sequence.stop_index is not None
            if text or finished or stopped:
                _add_row(done, sequence_id, sequence, text)
            if finished or stopped:
                del sequences[sequence_id]
        for sequence_id, text in replayed.items():
            if sequence_id in sequences:
                _add_row(done, sequence_id, sequences[sequence_id], text)
        for sequence_id in step.closes:
            sequences.pop(sequence_id, None)
        return done

    def drop(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def _open(
        self,
        sequences: dict[int, OutputSequence],
        opening: Open,
        replayed: dict[int, str],
        done: StepDone,
    ) -> None:
        try:
            sequence, text = resume(self._detokenizer, opening)
        except ValueError as error:
            done.errors.append(Lost(opening.sequence, str(error)))
            return
        if sequence.stop_index is not None:
            _add_row(done, opening.sequence, sequence, text)
            return
        sequences[opening.sequence] = sequence
        if text:
            replayed[opening.sequence] = text


def _add_row(done: StepDone, sequence_id: int, sequence: OutputSequence, text: str) -> None:
    if sequence.stop_index is not None:
        row = len(done.sequences)
        done.stops.append(Stop(row, sequence.stop_index, sequence.num_tokens))
    done.sequences.append(sequence_id)
    done.texts.append(text)


class EncodeLane:
    """A thread that serves Encode, Chat, Decode and Spell in batches of what is waiting."""

    def __init__(
        self,
        name: str,
        loaded: LoadedTokenizer,
        detokenizer: Detokenizer,
        template: ChatTemplate,
        send: Callable[[FromWorker], None],
        *,
        max_batch: int,
    ) -> None:
        self._max_batch = max_batch
        self._loaded = loaded
        self._detokenizer = detokenizer
        self._template = template
        self._send = send
        self._waiting: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: _Job) -> None:
        self._waiting.put(job)

    def _run(self) -> None:
        while True:
            jobs = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(jobs) < self._max_batch:
                    jobs.append(self._waiting.get_nowait())
            try:
                self.serve(jobs)
            except OSError:  # the server is gone; the main thread sees it too
                return

    def serve(self, jobs: list[_Job]) -> None:
        """Answers every job, each exactly once."""
        texts: dict[bool, list[tuple[int, str, bool]]] = {False: [], True: []}
        for job in jobs:
            try:
                if isinstance(job, Decode):
                    self._send(Decoded(job.call, self._decode(job)))
                elif isinstance(job, Spell):
                    ids = unpack_ids(job.token_ids)
                    self._send(Spelled(job.call, [self._detokenizer.spell(id_) for id_ in ids]))
                elif isinstance(job, Encode):
                    check_text(job.text, "text")
                    texts[job.add_special_tokens].append((job.call, job.text, False))
                else:
                    # The template writes its own BOS: the tokenizer must not add another.
                    texts[False].append((job.call, self._render(job), True))
            except OSError:
                raise
            except Exception as error:
                self._send(failure(job.call, error))
        for add_special_tokens, batch in texts.items():
            self._encode(batch, add_special_tokens)

    def _encode(self, batch: list[tuple[int, str, bool]], add_special_tokens: bool) -> None:
        try:
            encoded = encode_batch(
                self._loaded.tokenizer,
                [text for _, text, _ in batch],
                add_special_tokens=add_special_tokens,
            )
        except Exception as error:
            if len(batch) == 1:
                self._send(failure(batch[0][0], error))
                return
            for entry in batch:  # so that one text does not fail its neighbours
                self._encode([entry], add_special_tokens)
            return
        for (call, text, is_chat), ids in zip(batch, encoded, strict=True):
            self._send(Encoded(call, pack_ids(ids), text if is_chat else ""))

    def _decode(self, job: Decode) -> str:
        ids = unpack_ids(job.token_ids).tolist()
        size = self._loaded.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < size)
            raise InvalidRequest(
                f"token_ids[{index}]", f"{ids[index]} is outside the vocabulary of {size} tokens"
            )
        return self._detokenizer.decode(
            ids,
            skip_special_tokens=job.skip_special_tokens,
            spaces_between_special_tokens=job.spaces_between_special_tokens,
            complete_characters_only=job.complete_characters_only,
        )

    def _render(self, job: Chat) -> str:
        for index, message in enumerate(job.messages):
            check_text(message.role, f"chat.messages[{index}].role")
            check_text(message.content, f"chat.messages[{index}].content")
        text = self._template.render(
            job.messages,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            template_kwargs=job.template_kwargs,
            tools=job.tools,
        )
        check_text(text, "chat")
        return text


def failure(call: int, error: Exception) -> Failed:
    if isinstance(error, InvalidRequest):
        return Failed(call, error.field, error.message)
    return Failed(call, None, log_bug("encoding", error))


def log_bug(what: str, error: Exception) -> str:
    """Logs where it happened, without the error's own words, which may hold text."""
    incident = uuid.uuid4().hex[:12]
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s failed, incident %s: %s\n%s", what, incident, type(error).__name__, where)
    return f"{what} failed; incident {incident}"


def length_of(job: _Job) -> int:
    if isinstance(job, Encode):
        return len(job.text)
    if isinstance(job, Decode | Spell):
        return len(job.token_ids)
    # A tool's schema is small beside what makes a lane long.
    return sum(len(message.content) for message in job.messages)


def serve(channel: Channel) -> None:
    """Loads, says so, and serves until the other end is gone."""
    load = channel.receive()
    if load is None:
        return
    assert isinstance(load, Load)
    setup_logging("tokenizer_svc", load.log_level, load.log_format)
    try:
        loaded = load_tokenizer(Path(load.path), load.chat_template)
    except (ModelLoadError, ConfigError) as error:
        channel.send(LoadFailed(str(error), isinstance(error, ConfigError)))
        return
    detokenizer = Detokenizer(loaded.tokenizer)
    steps = StepServer(detokenizer)
    template = ChatTemplate(loaded.chat_template, loaded.special_tokens)
    short = EncodeLane("short", loaded, detokenizer, template, channel.send, max_batch=SHORT_BATCH)
    long = EncodeLane("long", loaded, detokenizer, template, channel.send, max_batch=1)
    short.start()
    long.start()
    channel.send(_facts(loaded, load))
    # Steps and plain texts need not wait for this; a chat does, on the import's lock.
    threading.Thread(target=_prepare, args=(template,), name="prepare", daemon=True).start()
    while (message := channel.receive()) is not None:
        if isinstance(message, Step):
            channel.send(steps.step(message))
        elif isinstance(message, DropStream):
            steps.drop(message.stream)
        elif isinstance(message, Ping):
            channel.send(Pong())
        elif isinstance(message, _Job):
            (long if length_of(message) > LONG_TEXT_CHARS else short).put(message)


def _facts(loaded: LoadedTokenizer, load: Load) -> Loaded:
    template, wanted = loaded.chat_template, load.tool_call_parser
    tool_call_format = find_format(template) if wanted == "auto" else wanted
    return Loaded(
        template is not None,
        loaded.vocab_size,
        tool_call_format,
        has_tools(template),
        special_markers(tool_call_format, loaded.tokenizer),
    )


def _prepare(template: ChatTemplate) -> None:
    template.prepare()
    collector.settle()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tokenizer_svc.worker")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A step should not wait the default 5 ms for a lane that renders or builds lists.
    sys.setswitchinterval(0.001)
    channel = Channel(socket.socket(fileno=arguments.fd))
    try:
        serve(channel)
    except ConnectionError:  # the server went away while it was being answered
        return 0
    return 0


if __name__ == "__main__":
    status = main()
    # A lane may be inside the tokenizer: it must not come back to a finalized interpreter.
    logging.shutdown()
    os._exit(status)
