"""One line in the log for each request that was admitted, when it has ended.

It holds ids, counts and times; what was asked and answered is nobody's business who
reads logs, so the prompt is there only by --log-prompts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from frontend.auth import current_principal
from frontend.branches import branches_of
from frontend.request import IdsPrompt, TextPrompt
from pagewire.errors import PagewireError

if TYPE_CHECKING:
    from frontend.request import Prompt, RequestState

logger = logging.getLogger(__name__)


def log_request(
    state: RequestState, error: BaseException | None, now: float, *, with_prompt: bool
) -> None:
    """`error` is what ended it, None where it ended well; times are in seconds."""
    if not logger.isEnabledFor(logging.INFO):
        return
    job = state.job
    fields: dict[str, object] = {
        "request_id": job.request_id,
        "outcome": state.outcome or "refused",
        "prompt_tokens": len(state.prompt_ids),
        "cached_tokens": state.num_cached_tokens,
        "output_tokens": sum(len(branch.output_ids) for branch in branches_of(state)),
        "total_s": round(now - state.arrived_at, 4),
    }
    if job.tenant:
        fields["tenant"] = job.tenant
    name = current_principal().name
    if name:
        fields["key_name"] = name
    if error is not None:
        fields["code"] = error.code if isinstance(error, PagewireError) else "cancelled"
    if state.first_token_at:
        fields["queue_s"] = round(state.queue_s, 4)
        fields["first_token_s"] = round(state.first_token_at - state.arrived_at, 4)
    if state.num_adds > 1:
        fields["engines"] = state.num_adds
    if with_prompt:
        fields["prompt"] = _readable(job.prompt)
    logger.info("request ended", extra=fields)


def _readable(prompt: Prompt) -> object:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, IdsPrompt):
        return list(prompt.ids)
    return [{"role": it.role, "content": it.content} for it in prompt.messages]
