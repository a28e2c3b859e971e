"""tokenizer_svc over gRPC, as a real process."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf import struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import processors

from pagewire.v1.common_pb2 import ChatInput, ChatMessage
from pagewire.v1.detokenizer_pb2 import (
    DetokenizeStreamRequest,
    GetTokenBytesRequest,
    GetTokenizerInfoRequest,
    OpenSequence,
)
from pagewire.v1.tokenizer_pb2 import (
    ApplyChatTemplateRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.tokenizer_svc.service import (
    Service,
    Stream,
    details_of,
    detokenizer_stub,
    texts_of,
    tokenizer_stub,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tokenizer_svc.loader import LoadedTokenizer

CHAT_IDS = [1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]


@pytest.fixture
async def channel(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with service.channel() as open_channel:
        yield open_channel


def chat(*turns: tuple[str, str]) -> ChatInput:
    return ChatInput(messages=[ChatMessage(role=role, content=content) for role, content in turns])


class TestUnary:
    async def test_token_bytes(self, channel: grpc.aio.Channel) -> None:
        """Halves of characters and special tokens too; what only a model has is empty."""
        request = GetTokenBytesRequest(token_ids=[28120, 10813, 116, 246, 2, 49152, -1])
        reply = await detokenizer_stub(channel).GetTokenBytes(request)
        first, *parrot, end, above, below = reply.tokens
        assert first == b"hello"
        assert b"".join(parrot) == "🦜".encode()
        assert (end, above, below) == (b"<|im_end|>", b"", b"")

    async def test_tokenize(self, channel: grpc.aio.Channel) -> None:
        stub = tokenizer_stub(channel)
        reply = await stub.Tokenize(TokenizeRequest(text="alpha beta gamma delta"))
        assert list(reply.token_ids) == [13433, 11345, 16439, 15184]

    @pytest.mark.parametrize("text", ["", "\u0004"])
    async def test_text_that_becomes_no_ids(self, channel: grpc.aio.Channel, text: str) -> None:
        reply = await tokenizer_stub(channel).Tokenize(TokenizeRequest(text=text))
        assert list(reply.token_ids) == []

    async def test_many_at_once(self, channel: grpc.aio.Channel, embedded: LoadedTokenizer) -> None:
        stub = tokenizer_stub(channel)
        texts = [f"prompt {index} " * (index % 7) for index in range(300)]
        replies = await asyncio.gather(
            *(stub.Tokenize(TokenizeRequest(text=text)) for text in texts)
        )
        for text, reply in zip(texts, replies, strict=True):
            assert list(reply.token_ids) == embedded.tokenizer.encode(text).ids

    async def test_a_long_text(self, channel: grpc.aio.Channel) -> None:
        """6 MiB arrive (SeldonIO/MLServer#290); a short text beside it is not held up."""
        stub = tokenizer_stub(channel)
        long = asyncio.ensure_future(stub.Tokenize(TokenizeRequest(text=" alphabet" * 700_000)))
        short = await stub.Tokenize(TokenizeRequest(text="alpha"))
        assert list(short.token_ids) == [13433]
        assert not long.done()
        assert len((await long).token_ids) == 700_000

    async def test_a_message_over_the_limit(self, channel: grpc.aio.Channel) -> None:
        stub = tokenizer_stub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Tokenize(TokenizeRequest(text="a" * ((64 << 20) + 1)))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(64 << 20) in (raised.value.details() or "")
        assert list((await stub.Tokenize(TokenizeRequest(text="alpha"))).token_ids) == [13433]

    async def test_detokenize(self, channel: grpc.aio.Channel) -> None:
        stub = tokenizer_stub(channel)
        ids = [3, 13433, 3, 10813, 116, 246]
        reply = await stub.Detokenize(DetokenizeRequest(token_ids=ids))
        assert reply.text == "alpha🦜"
        reply = await stub.Detokenize(DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
        assert reply.text == "<repo_name>alpha<repo_name>🦜"
        assert (await stub.Detokenize(DetokenizeRequest())).text == ""

    @pytest.mark.parametrize("stray", [-1, 49152, 2**31 - 1])
    async def test_detokenize_outside_the_vocabulary(
        self, channel: grpc.aio.Channel, stray: int
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await tokenizer_stub(channel).Detokenize(DetokenizeRequest(token_ids=[5, stray]))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(raised.value) == ("INVALID_REQUEST", "token_ids[1]")

    async def test_info(self, channel: grpc.aio.Channel) -> None:
        info = await detokenizer_stub(channel).GetTokenizerInfo(GetTokenizerInfoRequest())
        assert (info.has_chat_template, info.vocab_size, info.num_workers) == (True, 49152, 2)

    @pytest.mark.parametrize(
        "name", ["", "pagewire.v1.TokenizerService", "pagewire.v1.DetokenizerService"]
    )
    async def test_health(self, channel: grpc.aio.Channel, name: str) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


class TestChat:
    async def test_render_and_encode(self, channel: grpc.aio.Channel) -> None:
        request = ApplyChatTemplateRequest(chat=chat(("system", "Be brief."), ("user", "Hi")))
        reply = await tokenizer_stub(channel).ApplyChatTemplate(request)
        assert list(reply.token_ids) == CHAT_IDS
        assert reply.text.endswith("<|im_start|>assistant\n")

    async def test_continue_final_message(self, channel: grpc.aio.Channel) -> None:
        conversation = chat(("user", "Count."), ("assistant", "1\n"))
        conversation.continue_final_message = True
        reply = await tokenizer_stub(channel).ApplyChatTemplate(
            ApplyChatTemplateRequest(chat=conversation)
        )
        assert len(reply.token_ids) == 34
        assert list(reply.token_ids)[-3:] == [198, 33, 198]

    async def test_errors_name_the_field(self, channel: grpc.aio.Channel) -> None:
        stub = tokenizer_stub(channel)
        both = chat(("user", "a"))
        both.continue_final_message = both.add_generation_prompt = True
        reserved = chat(("user", "a"))
        reserved.template_kwargs.update({"chat_template": "x"})
        infinite = chat(("user", "a"))
        infinite.template_kwargs.CopyFrom(
            struct_pb2.Struct(fields={"x": struct_pb2.Value(number_value=float("inf"))})
        )
        for conversation, field in [
            (ChatInput(), "chat.messages"),
            (chat(("user", "a"), ("", "b")), "chat.messages[1].role"),
            (both, "chat.add_generation_prompt"),
            (reserved, "chat.template_kwargs.chat_template"),
            (infinite, "chat.template_kwargs"),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ApplyChatTemplate(ApplyChatTemplateRequest(chat=conversation))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details_of(raised.value) == ("INVALID_REQUEST", field)

    async def test_bos_is_not_added_twice(self, tmp_path: Path, embedded: LoadedTokenizer) -> None:
        """vllm-project/vllm#16976, #27486, #2012; and a template that refuses a role
        (EricLBuehler/mistral.rs#506)."""
        copy = type(embedded.tokenizer).from_str(embedded.tokenizer.to_str())
        copy.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>",
            pair="<|im_start|> $A $B:1 <|im_end|>",
            special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
        )
        copy.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": embedded.chat_template})
        )
        refusing = tmp_path / "refusing.jinja"
        refusing.write_text("{{ raise_exception('no system role here') }}")
        with Service("--model", str(tmp_path)) as service:
            async with service.channel() as channel:
                stub = tokenizer_stub(channel)
                request = ApplyChatTemplateRequest(
                    chat=chat(("system", "Be brief."), ("user", "Hi"))
                )
                assert list((await stub.ApplyChatTemplate(request)).token_ids) == CHAT_IDS
                tokenized = await stub.Tokenize(TokenizeRequest(text="alpha"))
                assert list(tokenized.token_ids) == [1, 13433, 2]
                plain = TokenizeRequest(text="alpha", add_special_tokens=False)
                assert list((await stub.Tokenize(plain)).token_ids) == [13433]
        with Service("--model", str(tmp_path), "--chat-template", str(refusing)) as service:
            async with service.channel() as channel:
                stub = tokenizer_stub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="no system role here") as raised:
                    await stub.ApplyChatTemplate(request)
                assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert details_of(raised.value) == ("INVALID_REQUEST", "chat")

    async def test_no_chat_template(self, tmp_path: Path, embedded: LoadedTokenizer) -> None:
        embedded.tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text("{}")
        with Service("--model", str(tmp_path)) as service:
            async with service.channel() as channel:
                info = await detokenizer_stub(channel).GetTokenizerInfo(GetTokenizerInfoRequest())
                assert not info.has_chat_template
                stub = tokenizer_stub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="no chat template") as raised:
                    await stub.ApplyChatTemplate(ApplyChatTemplateRequest(chat=chat(("user", "a"))))
                assert details_of(raised.value) == ("INVALID_REQUEST", "chat")
                assert list((await stub.Tokenize(TokenizeRequest(text="alpha"))).token_ids)


class TestStream:
    async def test_rows_of_one_step(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        opens = [OpenSequence(sequence=n, skip_special_tokens=True) for n in (7, 8, 9)]
        response = await stream.step({7: [13433], 8: [10813], 9: [3]}, opens=opens)
        assert texts_of(response) == {7: "alpha"}
        response = await stream.step({7: [11345, 16439], 8: [116, 246], 9: []}, finished=[7, 9])
        assert texts_of(response) == {7: " beta gamma", 8: "🦜", 9: ""}
        response = await stream.step({8: [10813]}, finished=[8])
        assert texts_of(response) == {8: "\ufffd"}

    async def test_skip_special_tokens_is_each_sequences_own(
        self, channel: grpc.aio.Channel
    ) -> None:
        stream = Stream(channel)
        opens = [OpenSequence(sequence=n, skip_special_tokens=n % 2 == 0) for n in range(6)]
        response = await stream.step({n: [3, 81] for n in range(6)}, opens=opens)
        assert texts_of(response) == {n: "a" if n % 2 == 0 else "<repo_name>a" for n in range(6)}

    async def test_stop_string(self, channel: grpc.aio.Channel) -> None:
        # vllm-project/vllm#3574
        stream = Stream(channel)
        opens = [
            OpenSequence(sequence=1, stop=["zz", "beta b"]),
            OpenSequence(sequence=2, stop=["beta b"], include_stop_str_in_output=True),
        ]
        first = await stream.step({1: [11345], 2: [11345]}, opens=opens)
        assert texts_of(first)[1] == " "
        second = await stream.step({1: [11345], 2: [11345]})
        texts = texts_of(second)
        assert texts[1] == ""
        assert texts_of(first)[2] + texts[2] == " beta b"
        stops = {second.sequences[stop.row]: stop for stop in second.stops}
        assert (stops[1].stop_index, stops[1].num_tokens) == (1, 2)
        assert (stops[2].stop_index, stops[2].num_tokens) == (0, 2)
        # The engine runs on until it hears of it: those ids are passed over.
        late = await stream.step({1: [11345], 2: [11345]}, finished=[2], closes=[1])
        assert not late.sequences
        assert not late.errors

    async def test_stop_string_inside_a_run_of_tokens(self, channel: grpc.aio.Channel) -> None:
        # sgl-project/sglang#31599
        stream = Stream(channel)
        response = await stream.step(
            {1: [11345] * 5}, opens=[OpenSequence(sequence=1, stop=[" beta beta beta"])]
        )
        assert texts_of(response) == {1: ""}
        assert [(stop.row, stop.num_tokens) for stop in response.stops] == [(0, 3)]

    async def test_a_stop_string_over_a_split_character(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        opens = [OpenSequence(sequence=1, stop=["🦜!"])]
        texts = []
        for token_id in [81, 10813, 116, 246, 0]:
            response = await stream.step(
                {1: [token_id]}, opens=opens if not texts else (), finished=[1] * (token_id == 0)
            )
            texts.append(texts_of(response).get(1, ""))
        assert texts == ["a", "", "", "", "🦜<|endoftext|>"]

    async def test_held_back_text_is_released_at_the_end(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        opens = [OpenSequence(sequence=1, stop=["beta b"])]
        assert texts_of(await stream.step({1: [11345]}, opens=opens)) == {1: " "}
        assert texts_of(await stream.step(finished=[1])) == {1: "beta"}

    async def test_prompt_that_ends_in_half_a_character(self, channel: grpc.aio.Channel) -> None:
        # vllm-project/vllm#48853
        stream = Stream(channel)
        opens = [OpenSequence(sequence=1, prompt_tail=[28120, 15107, 116])]
        response = await stream.step({1: [246, 246, 246]}, opens=opens, finished=[1])
        assert texts_of(response) == {1: "🦜\ufffd\ufffd"}

    async def test_ids_outside_the_vocabulary(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        response = await stream.step(
            {1: [-1, 13433, 49152, 2**31 - 1]}, opens=[OpenSequence(sequence=1)], finished=[1]
        )
        assert texts_of(response) == {1: "alpha"}

    async def test_an_unknown_sequence(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        response = await stream.step({1: [81], 2: [81]}, opens=[OpenSequence(sequence=1)])
        assert texts_of(response) == {1: "a"}
        assert [error.sequence for error in response.errors] == [2]
        closed = await stream.step(closes=[1])
        assert not closed.errors
        response = await stream.step({1: [81]})
        assert [error.sequence for error in response.errors] == [1]

    async def test_an_empty_stop_string(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        response = await stream.step({1: [81]}, opens=[OpenSequence(sequence=1, stop=[""])])
        assert [error.sequence for error in response.errors] == [1]
        assert not response.sequences

    async def test_columns_that_do_not_fit(self, channel: grpc.aio.Channel) -> None:
        for request, field in [
            (DetokenizeStreamRequest(sequences=[1], counts=[1], token_ids=[1]), "finished"),
            (DetokenizeStreamRequest(sequences=[1], finished=[False]), "counts"),
            (DetokenizeStreamRequest(sequences=[1], counts=[2], finished=[False]), "token_ids"),
        ]:
            stream = Stream(channel)
            await stream.call.write(request)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stream.call.read()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details_of(raised.value) == ("INVALID_REQUEST", field)

    async def test_one_response_for_each_request_in_order(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        await stream.step(opens=[OpenSequence(sequence=n) for n in range(8)])

        async def send() -> None:
            for step in range(200):
                await stream.send({n: [81] for n in range(8) if (n + step) % 3})
            await stream.call.done_writing()

        sending = asyncio.create_task(send())
        received = [(await stream.receive()).step for _ in range(200)]
        assert received == list(range(2, 202))
        await sending
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK

    async def test_streams_have_their_own_sequences(self, channel: grpc.aio.Channel) -> None:
        one, two = Stream(channel), Stream(channel)
        await one.step({1: [10813]}, opens=[OpenSequence(sequence=1)])
        await two.step({1: [81]}, opens=[OpenSequence(sequence=1)])
        one.call.cancel()
        assert texts_of(await two.step({1: [81]})) == {1: "a"}

    async def test_replay_continues_after_what_was_emitted(
        self, channel: grpc.aio.Channel, embedded: LoadedTokenizer
    ) -> None:
        """Cut anywhere: ids replayed so far, of whose text any part is with the client."""
        rng = random.Random(23)
        stream = Stream(channel)
        for sequence in range(60):
            ids = [rng.randrange(17, embedded.vocab_size) for _ in range(20)]
            stop = ["zzz", "e q"] if sequence % 2 else []
            opening = OpenSequence(sequence=sequence, stop=stop)
            pieces = []
            cut = rng.randrange(20)
            for position in range(cut):
                response = await stream.step(
                    {sequence: [ids[position]]}, opens=[opening] if position == 0 else ()
                )
                pieces.append(texts_of(response).get(sequence, ""))
            # The client got one delta less than the replayed ids make.
            emitted = "".join(pieces[:-1])
            resumed = OpenSequence(
                sequence=sequence,
                stop=stop,
                replay_token_ids=ids[:cut],
                replay_emitted_chars=len(emitted),
            )
            rest = await stream.step({sequence: ids[cut:]}, opens=[resumed], finished=[sequence])
            assert not rest.errors
            whole = embedded.tokenizer.decode(ids, skip_special_tokens=False)
            if "zzz" not in whole and "e q" not in whole:
                assert emitted + texts_of(rest)[sequence] == whole

    async def test_replay_that_completes_a_stop_string(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        opening = OpenSequence(
            sequence=1, stop=["beta b"], replay_token_ids=[11345, 11345], replay_emitted_chars=1
        )
        response = await stream.step({1: [81]}, opens=[opening])
        assert texts_of(response) == {1: ""}
        assert [(stop.row, stop.num_tokens) for stop in response.stops] == [(0, 2)]

    async def test_replay_that_does_not_fit(self, channel: grpc.aio.Channel) -> None:
        stream = Stream(channel)
        opening = OpenSequence(sequence=1, replay_token_ids=[81], replay_emitted_chars=2)
        response = await stream.step({1: [81]}, opens=[opening])
        assert [error.sequence for error in response.errors] == [1]
