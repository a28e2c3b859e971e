from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.errors import InvalidRequest
from tokenizer_svc import chat_template
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.messages import ChatMessage

if TYPE_CHECKING:
    from tokenizer_svc.loader import LoadedTokenizer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat(*turns: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role, content) for role, content in turns]


@pytest.fixture
def embedded_template(embedded: LoadedTokenizer) -> ChatTemplate:
    return ChatTemplate(embedded.chat_template, embedded.special_tokens)


def ids_of(embedded: LoadedTokenizer, text: str) -> list[int]:
    ids: list[int] = embedded.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_embedded_template(embedded_template: ChatTemplate, embedded: LoadedTokenizer) -> None:
    text = embedded_template.render(chat(("system", "Be brief."), ("user", "Hi")))
    assert ids_of(embedded, text) == [
        1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198,
    ]  # fmt: skip


def test_generation_prompt_is_the_default_and_can_be_left_out() -> None:
    template = ChatTemplate(PLAIN, {})
    messages = chat(("user", "Hi"))
    assert template.render(messages) == "[user]Hi[/][assistant]"
    assert template.render(messages, add_generation_prompt=True) == "[user]Hi[/][assistant]"
    assert template.render(messages, add_generation_prompt=False) == "[user]Hi[/]"


class TestContinueFinalMessage:
    """vllm-project/vllm#9547. A template that trims is continued after the trimmed text."""

    @pytest.mark.parametrize(
        ("user", "assistant", "count", "last"),
        [
            ("Name one colour.", "The colour is ", 38, [504, 7302, 314, 216]),
            ("Count.", "1\n", 34, [198, 33, 198]),
        ],
    )
    def test_embedded_template(
        self,
        embedded_template: ChatTemplate,
        embedded: LoadedTokenizer,
        user: str,
        assistant: str,
        count: int,
        last: list[int],
    ) -> None:
        messages = chat(("user", user), ("assistant", assistant))
        text = embedded_template.render(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        ids = ids_of(embedded, text)
        assert len(ids) == count
        assert ids[-len(last) :] == last

    @pytest.mark.parametrize("content", ["The colour is ", "1\n", " a b \n\n", "x", "", "  ", "\n"])
    def test_plain_and_trimming_templates(self, content: str) -> None:
        messages = chat(("user", "q"), ("assistant", content))
        header = "[user]q[/][assistant]"
        plain = ChatTemplate(PLAIN, {})
        assert plain.render(messages, continue_final_message=True) == header + content
        trimming = ChatTemplate(PLAIN.replace("m.content", "m.content|trim"), {})
        assert trimming.render(messages, continue_final_message=True) == header + content.strip()
        newline = ChatTemplate(PLAIN.replace("]{{ m.content", "]\n{{ m.content|trim"), {})
        continued = newline.render(messages, continue_final_message=True)
        assert continued == "[user]\nq[/][assistant]\n" + content.strip()

    def test_equals_transformers(self, embedded: LoadedTokenizer) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        ours = ChatTemplate(embedded.chat_template, {})
        for content in ("The colour is ", "1\n", "done."):
            theirs = render_jinja_template(
                [[{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]],
                chat_template=embedded.chat_template,
                continue_final_message=True,
            )[0][0]
            messages = chat(("user", "q"), ("assistant", content))
            assert ours.render(messages, continue_final_message=True) == theirs

    def test_a_template_that_drops_the_last_message(self) -> None:
        template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", {})
        with pytest.raises(InvalidRequest, match="cannot be continued") as raised:
            template.render(chat(("user", "a"), ("user", "b")), continue_final_message=True)
        assert raised.value.field == "chat.continue_final_message"

    def test_not_with_a_generation_prompt(self) -> None:
        with pytest.raises(InvalidRequest) as raised:
            ChatTemplate(PLAIN, {}).render(
                chat(("user", "a")), add_generation_prompt=True, continue_final_message=True
            )
        assert raised.value.field == "chat.add_generation_prompt"


class TestTemplatesThatFail:
    """EricLBuehler/mistral.rs#506: what a template refuses is the caller's error."""

    SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}"
    ALTERNATE = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (SYSTEM + "{% endif %}ok", "no system role here"),
            ("{% for %}", "chat template"),
            ("{{ messages[9].role.x }}", "chat template"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ none + 'x' }}", "TypeError"),
            ("{{ range(10 ** 9) | list }}", "Range too big"),
            ("{{ messages.append(1) }}", "unsafe|not safe|SecurityError|chat template"),
            ("{{ ''.__class__.__mro__ }}", "chat template"),
            ("{% include 'x' %}", "chat template"),
        ],
    )
    def test_invalid_request_with_the_templates_message(self, template: str, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message) as raised:
            ChatTemplate(template, {}).render(chat(("system", "a"), ("user", "b")))
        assert raised.value.field == "chat"
        assert len(raised.value.message) < 1100

    def test_roles_that_must_alternate(self) -> None:
        template = ChatTemplate(self.ALTERNATE, {})
        assert template.render(chat(("user", "a"), ("assistant", "b"))) == "ab"
        with pytest.raises(InvalidRequest, match="must alternate"):
            template.render(chat(("user", "a"), ("user", "b")))

    def test_no_template(self) -> None:
        with pytest.raises(InvalidRequest, match="no chat template") as raised:
            ChatTemplate(None, {}).render(chat(("user", "a")))
        assert raised.value.field == "chat"

    def test_a_long_message_is_cut(self) -> None:
        template = ChatTemplate("{{ raise_exception('x' * 100000) }}", {})
        with pytest.raises(InvalidRequest) as raised:
            template.render(chat(("user", "a")))
        assert len(raised.value.message) < 1100

    def test_a_template_works_after_a_failure(self) -> None:
        template = ChatTemplate(self.SYSTEM + "{% endif %}ok", {})
        with pytest.raises(InvalidRequest):
            template.render(chat(("system", "a")))
        assert template.render(chat(("user", "a"))) == "ok"


class TestLimits:
    def test_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100)
        loop = "{% for i in range(99) %}xx{% endfor %}"
        for template in (loop, f"{{% macro m() %}}{loop}{{% endmacro %}}{{{{ m()[:1] }}}}"):
            with pytest.raises(InvalidRequest, match="over 100 characters"):
                ChatTemplate(template, {}).render(chat(("user", "a")))

    def test_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.05)
        nested = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
        start = time.monotonic()
        with pytest.raises(InvalidRequest, match=r"more than 0\.05 s"):
            ChatTemplate(nested, {}).render(chat(("user", "a")))
        assert time.monotonic() - start < 5


class TestArguments:
    def test_special_tokens_and_kwargs_reach_the_template(self) -> None:
        template = ChatTemplate("{{ bos_token }}{{ tone }}{{ style.n }}", {"bos_token": "<s>"})
        kwargs: dict[str, Any] = {"tone": "dry", "style": {"n": 3}}
        assert template.render(chat(("user", "a")), template_kwargs=kwargs) == "<s>dry3"

    @pytest.mark.parametrize(
        "name", ["messages", "chat_template", "add_generation_prompt", "continue_final_message"]
    )
    def test_reserved_names(self, name: str) -> None:
        with pytest.raises(InvalidRequest) as raised:
            ChatTemplate(PLAIN, {}).render(chat(("user", "a")), template_kwargs={name: "x"})
        assert raised.value.field == f"chat.template_kwargs.{name}"

    def test_no_messages(self) -> None:
        with pytest.raises(InvalidRequest) as raised:
            ChatTemplate(PLAIN, {}).render([])
        assert raised.value.field == "chat.messages"

    def test_an_empty_role(self) -> None:
        with pytest.raises(InvalidRequest) as raised:
            ChatTemplate(PLAIN, {}).render(chat(("user", "a"), ("", "b")))
        assert raised.value.field == "chat.messages[1].role"
