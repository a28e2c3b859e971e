"""Chat messages to one text, by the model's Jinja template.

The renderer and its sandbox are transformers' own. What a template refuses, and
what it fails at, is the caller's to know: an InvalidRequest naming `chat`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import jinja2

from pagewire.errors import InvalidRequest
from pagewire.tools import read_arguments
from tokenizer_svc.tool_format import has_tools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pagewire.tools import Tool
    from tokenizer_svc.messages import ChatMessage

    # The renderer takes functions too, and lists are invariant.
    _Schema = dict[str, Any] | Callable[..., Any]

log = logging.getLogger(__name__)

MAX_RENDERED_CHARS = 8 << 20
MAX_RENDER_SECONDS = 10.0
_MAX_MESSAGE_CHARS = 1000
"""An error travels in HTTP/2 trailers, which clients bound at 8 KiB."""

_RESERVED = frozenset(
    {
        "messages",
        "conversations",
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tools",  # chat.tools
        "self",  # jinja's own argument
    }
)
# Letters only, so that no filter of a template changes it; the space behind it tells
# whether the template trims what it is given.
_MARK = "PAGEWIRExCONTINUESxHERE"


class ChatTemplate:
    """Renders conversations with one template; threads may share it."""

    def __init__(self, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._has_tools = has_tools(template)
        self._special_tokens = dict(special_tokens)
        self._limit = _RenderLimit(MAX_RENDERED_CHARS, MAX_RENDER_SECONDS)

    def prepare(self) -> None:
        """Imports the renderer, which takes over a second, and compiles the template. A
        template that does not compile is logged, and fails each rendering."""
        if self._template is None:
            return
        try:
            self._limit.start(self._template)
        except jinja2.TemplateError as error:
            log.warning("the chat template does not compile: %s", error)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The prompt text, with whatever BOS the template writes. Tools have passed
        pagewire.tools.check_tools.

        `add_generation_prompt` None means True unless `continue_final_message`.
        Continuing leaves out all that the template puts after the last message's
        content; where the template trims that content, it goes on after the trimmed
        text. Raises InvalidRequest.
        """
        if self._template is None:
            raise InvalidRequest("chat", "the model has no chat template")
        _check(messages, add_generation_prompt, continue_final_message, template_kwargs or {})
        self._check_tools(messages, tools)
        conversation = [_as_dict(index, message) for index, message in enumerate(messages)]
        schemas: list[_Schema] | None = [_schema(tool) for tool in tools] or None
        if continue_final_message:
            content = messages[-1].content
            conversation[-1]["content"] = f"{content}{_MARK} "
            text = self._render(conversation, schemas, False, template_kwargs or {})
            return _cut_at_mark(text, content)
        generation = True if add_generation_prompt is None else add_generation_prompt
        return self._render(conversation, schemas, generation, template_kwargs or {})

    def _check_tools(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> None:
        """A template that leaves out what it does not know would have the model answer
        another question."""
        assert self._template is not None
        if tools and not self._has_tools:
            raise InvalidRequest("chat.tools", "the model's chat template has no tools")
        if "tool_calls" in self._template:
            return
        for index, message in enumerate(messages):
            if message.tool_calls:
                raise InvalidRequest(
                    f"chat.messages[{index}].tool_calls",
                    "the model's chat template has no tool_calls",
                )

    def _render(
        self,
        conversation: list[dict[str, Any]],
        tools: list[_Schema] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        assert self._template is not None
        from transformers.utils import chat_template_utils

        try:
            self._limit.start(self._template)
            rendered = chat_template_utils.render_jinja_template(
                [conversation],
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **template_kwargs},
            )[0]
        except _TooMuch as error:
            raise InvalidRequest("chat", str(error)) from None
        except jinja2.TemplateError as error:
            raise InvalidRequest("chat", _shorten(f"chat template: {error.message}")) from error
        except Exception as error:
            # A template is a program: it can fail in any way that Python can.
            problem = f"{type(error).__name__}: {error}"
            raise InvalidRequest("chat", _shorten(f"chat template: {problem}")) from error
        text: str = rendered[0]
        return text


def _as_dict(index: int, message: ChatMessage) -> dict[str, Any]:
    """As templates name it: a key that does not apply is not there. Raises InvalidRequest."""
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        field = f"chat.messages[{index}].tool_calls"
        values["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": read_arguments(call, f"{field}[{number}]"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        values["name"] = message.name
    return values


def _schema(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _check(
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
) -> None:
    if not messages:
        raise InvalidRequest("chat.messages", "there are no messages")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"chat.messages[{index}].role", "the role is empty")
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "chat.add_generation_prompt",
            "add_generation_prompt begins a new message, continue_final_message goes on with the "
            "last one: only one of them can be true",
        )
    for name in template_kwargs:
        if name in _RESERVED:
            raise InvalidRequest(f"chat.template_kwargs.{name}", "this name is reserved")


def _cut_at_mark(text: str, content: str) -> str:
    position = text.rfind(_MARK)
    if position < 0:
        raise InvalidRequest(
            "chat.continue_final_message",
            "the chat template leaves the last message out, so it cannot be continued",
        )
    prompt = text[:position]
    trimmed = not text.startswith(f"{_MARK} ", position)
    if trimmed and content.strip():
        # The mark kept the content's trailing space from being trimmed.
        prompt = prompt.removesuffix(content[len(content.rstrip()) :])
    return prompt


def _shorten(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    return message[:_MAX_MESSAGE_CHARS] + "..."


class _TooMuch(Exception):
    """A limit was passed."""


class _RenderLimit:
    """Bounds one rendering's time and output.

    A compiled template joins what it yields by its environment's `concat`, also
    inside macros; that is where the limits are looked at. (The sandbox bounds range().)
    """

    def __init__(self, max_chars: int, max_seconds: float) -> None:
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._local = threading.local()

    def start(self, template: str) -> None:
        """Raises jinja2.TemplateSyntaxError if the template cannot be compiled."""
        from transformers.utils import chat_template_utils

        environment = chat_template_utils._compile_jinja_template(template).environment
        environment.concat = self._concat
        self._local.deadline = time.monotonic() + self._max_seconds

    def _concat(self, pieces: Iterable[str]) -> str:
        kept: list[str] = []
        size = 0
        deadline: float = self._local.deadline
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > self._max_chars:
                raise _TooMuch(f"the rendered chat is over {self._max_chars} characters")
            if time.monotonic() > deadline:
                raise _TooMuch(f"the chat template ran for more than {self._max_seconds:g} s")
        return "".join(kept)
