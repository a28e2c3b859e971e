"""A request's prompt on its way to ids: what is kept of it, and what is echoed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from frontend.request import IdsPrompt
from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from frontend.request import Job, SamplingCall
    from frontend.tokenizer_client import TokenizerClient

_TRUNCATE = "sampling_params.truncate_prompt_tokens"


class ReadPrompt(NamedTuple):
    ids: list[int]
    echo: str
    """What the output's text begins with."""


def check_truncation(sampling: SamplingCall, max_model_len: int) -> None:
    """Raises InvalidRequest."""
    keep = sampling.truncate_prompt_tokens
    if keep is None or keep == -1 or 1 <= keep <= max_model_len:
        return
    raise InvalidRequest(
        _TRUNCATE,
        f"truncate_prompt_tokens is {keep}, must be from 1 to {max_model_len}, the context, or -1",
    )


def check_max_tokens(sampling: SamplingCall, *, echo: bool, best_of: int) -> None:
    """Raises InvalidRequest for no output, unless the prompt itself is what is wanted."""
    field = "sampling_params.max_tokens"
    if sampling.max_tokens is None or sampling.max_tokens >= 1:
        return
    if sampling.max_tokens < 0:
        raise InvalidRequest(field, f"max_tokens is {sampling.max_tokens}, must be at least 1")
    if not echo and sampling.prompt_logprobs is None:
        raise InvalidRequest(
            field, "max_tokens is 0, must be at least 1 without echo and prompt_logprobs"
        )
    if best_of > sampling.n:
        raise InvalidRequest(
            "sampling_params.best_of",
            f"best_of is {best_of} and n is {sampling.n}, but with max_tokens 0 all are the same",
        )


def truncate(job: Job, ids: list[int], max_model_len: int) -> list[int]:
    """The last ids, as many as the job wants."""
    keep = job.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        # A context that is full of prompt has no room for the first output token. Where
        # max_tokens alone is over the context, that is the error to tell of.
        keep = max(1, max_model_len - max(1, job.max_tokens or 1))
    return ids[-keep:]


def needs_tokenizer(job: Job) -> bool:
    return not isinstance(job.prompt, IdsPrompt) or bool(job.bad_words) or job.echo


async def read_prompt(
    tokenizer: TokenizerClient, job: Job, *, max_model_len: int, tokenizer_vocab_size: int
) -> ReadPrompt:
    """Raises InvalidRequest, Unavailable, and what else the tokenizer does."""
    if isinstance(job.prompt, IdsPrompt):
        ids, text = job.prompt.ids, None
    else:
        ids, text = await tokenizer.tokenize(job.prompt)
    kept = truncate(job, ids, max_model_len)
    if not job.echo:
        return ReadPrompt(kept, "")
    if text is not None and len(kept) == len(ids):
        return ReadPrompt(kept, text)
    # As in the output, ids that only the model has add no text.
    known = [token_id for token_id in kept if token_id < tokenizer_vocab_size]
    return ReadPrompt(kept, await tokenizer.detokenize(known, job))
