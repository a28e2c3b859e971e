"""The parts of a worker, without its process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.errors import InvalidRequest
from tokenizer_svc import encode, worker
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.detokenize import ByteDecoder, Detokenizer
from tokenizer_svc.encode import check_text
from tokenizer_svc.messages import (
    Chat,
    ChatMessage,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failed,
    FromWorker,
    Open,
    Step,
    pack_ids,
    unpack_ids,
)
from tokenizer_svc.worker import EncodeLane, StepServer

if TYPE_CHECKING:
    from tokenizer_svc.loader import LoadedTokenizer


def serve(loaded: LoadedTokenizer, jobs: list[Encode | Chat | Decode]) -> dict[int, FromWorker]:
    replies: list[Any] = []
    template = ChatTemplate(loaded.chat_template, loaded.special_tokens)
    detokenizer = Detokenizer(loaded.tokenizer)
    EncodeLane("test", loaded, detokenizer, template, replies.append, max_batch=8).serve(jobs)
    assert len(replies) == len(jobs)
    return {reply.call: reply for reply in replies}


def test_one_batch_of_everything(embedded: LoadedTokenizer) -> None:
    chat = Chat(3, [ChatMessage("user", "Hi")], None, False, {})
    replies = serve(
        embedded,
        [
            Encode(1, "alpha", True),
            Encode(2, "", False),
            chat,
            Decode(4, pack_ids([13433]), True),
            Decode(5, pack_ids([-1]), True),
            Chat(6, [], None, False, {}),
        ],
    )
    assert replies[1] == Encoded(1, pack_ids([13433]))
    assert replies[2] == Encoded(2, b"")
    rendered = replies[3]
    assert isinstance(rendered, Encoded)
    assert rendered.text.endswith("assistant\n")
    assert unpack_ids(rendered.token_ids)[0] == 1
    assert replies[4] == Decoded(4, "alpha")
    assert isinstance(replies[5], Failed)
    assert replies[5].field == "token_ids[0]"
    assert isinstance(replies[6], Failed)
    assert replies[6].field == "chat.messages"


def test_a_text_the_library_fails_on_does_not_fail_its_neighbours(
    embedded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(tokenizer: Any, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        if "poison" in texts:
            raise RuntimeError(f"cannot encode {texts}")
        return encode.encode_batch(tokenizer, texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(worker, "encode_batch", failing)
    with caplog.at_level(logging.ERROR):
        replies = serve(
            embedded, [Encode(n, "poison" if n == 1 else "alpha", True) for n in (0, 1, 2)]
        )
    assert replies[0] == Encoded(0, pack_ids([13433]))
    assert replies[2] == Encoded(2, pack_ids([13433]))
    failed = replies[1]
    assert isinstance(failed, Failed)
    assert failed.field is None
    # Found in the log by its number, and no text is there nor in the answer.
    incident = failed.message.rpartition(" ")[2]
    assert incident in caplog.text
    assert "poison" not in caplog.text
    assert "poison" not in failed.message


def test_a_broken_sequence_does_not_break_its_step(
    embedded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = StepServer(Detokenizer(embedded.tokenizer))
    opens = [Open(n, [], True, [], False, [], 0) for n in (1, 2)]
    steps.step(Step(1, 1, opens, [], [], [], [], []))
    whole = ByteDecoder.feed

    def failing(self: ByteDecoder, ids: list[int]) -> str:
        if ids == [82]:
            raise RuntimeError
        return whole(self, ids)

    monkeypatch.setattr(ByteDecoder, "feed", failing)
    done = steps.step(Step(2, 1, [], [1, 2], [1, 1], [82, 81], [False, False], []))
    assert (done.sequences, done.texts) == ([2], ["a"])
    assert [lost.sequence for lost in done.errors] == [1]


def test_a_lone_surrogate_is_named() -> None:
    with pytest.raises(InvalidRequest, match="character 2") as raised:
        check_text("ab\ud83e", "text")
    assert raised.value.field == "text"


def test_a_text_too_long_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_TEXT_CHARS", 3)
    check_text("abc", "text")
    with pytest.raises(InvalidRequest, match="limit is 3") as raised:
        check_text("abcd", "text")
    assert raised.value.field == "text"
