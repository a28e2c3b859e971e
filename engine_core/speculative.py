"""From a configuration to what guesses ahead, or to nothing that does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from engine_core.model.loader import open_model
from engine_core.sched.drafters import ModelDrafter, NgramDrafter
from engine_core.sched.speculation import Speculation
from engine_core.sched.step_costs import MEASURED_SIZES, StepCosts
from pagewire.errors import ConfigError
from pagewire.model_source import resolve_model

if TYPE_CHECKING:
    from engine_core.device.base import Device
    from engine_core.model.loader import OpenedModel
    from engine_core.runner.model_runner import ModelRunner
    from engine_core.sched.drafters import Drafter
    from pagewire.config import EngineConfig

logger = logging.getLogger(__name__)

_MOST_SAMPLED = 64
"""Tokens drawn in a step, unless more sequences run than that: their logits take memory, and
verifying more has stopped to pay long before."""


def resolve_method(config: EngineConfig, device: Device) -> Literal["none", "ngram", "draft"]:
    """Raises ConfigError for settings that contradict each other."""
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"--prompt-lookup-min is {config.prompt_lookup_min}, must be at most "
            f"--prompt-lookup-max, which is {config.prompt_lookup_max}"
        )
    if config.speculative_model is not None:
        if config.speculative_method not in ("auto", "draft"):
            raise ConfigError(
                f"--speculative-model is for --speculative-method draft, not "
                f"{config.speculative_method}"
            )
        return "draft"
    if config.speculative_method == "draft":
        raise ConfigError("--speculative-method draft needs --speculative-model")
    if config.speculative_method == "auto":
        # Where the device works by itself, planning while it does is worth more.
        return "ngram" if device.is_synchronous else "none"
    return config.speculative_method


def open_draft_model(config: EngineConfig, target: OpenedModel) -> OpenedModel | None:
    """None where none is asked for. Raises ModelLoadError naming the file, ConfigError naming
    the flag."""
    if config.speculative_model is None:
        return None
    opened = open_model(resolve_model(config.speculative_model, flag="--speculative-model"))
    mine, theirs = opened.config.vocab_size, target.config.vocab_size
    if mine != theirs:
        raise ConfigError(
            f"--speculative-model {config.speculative_model} has a vocabulary of {mine} tokens, "
            f"the model one of {theirs}: guesses are token ids, which must mean the same"
        )
    if opened.config.max_positions < MEASURED_SIZES[-1]:
        raise ConfigError(
            f"--speculative-model {config.speculative_model} has a context of "
            f"{opened.config.max_positions} tokens, too short to guess in"
        )
    return opened


def draft_model_len(opened: OpenedModel, max_model_len: int) -> int:
    """Tokens that a draft model sees of sequences of up to max_model_len."""
    context = opened.config.max_positions
    if context < max_model_len:
        logger.warning(
            "%s, the draft model, has a context of %d tokens: sequences of up to %d are served, "
            "and nothing is guessed past the first %d of each",
            opened.source.name,
            context,
            max_model_len,
            context,
        )
    return min(context, max_model_len)


def max_sampled_tokens(config: EngineConfig, method: str, max_num_batched_tokens: int) -> int:
    """The most that a step draws."""
    if method == "none":
        return config.max_num_seqs
    wanted = config.max_num_seqs * (1 + config.num_speculative_tokens)
    most = max(config.max_num_seqs, min(wanted, _MOST_SAMPLED))
    return max(config.max_num_seqs, min(most, max_num_batched_tokens))


def make_speculation(
    config: EngineConfig,
    method: str,
    runner: ModelRunner,
    max_sampled: int,
    draft_len: int | None = None,
) -> Speculation | None:
    """Measures on the runner what verifying costs. draft_len: of a draft model, as
    draft_model_len() tells it."""
    if method == "none":
        return None
    costs = StepCosts(runner.measure_step_costs())
    drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if runner.draft_model is not None:
        drafting = StepCosts(runner.measure_step_costs(runner.draft_model.run_verifying_step))
        logger.info(
            "the draft model takes %.2f of a step for a guess",
            drafting.seconds(1) / costs.seconds(1),
        )
        drafter = ModelDrafter(drafting, draft_len)
    speculation = Speculation(
        drafter,
        costs,
        num_speculative_tokens=config.num_speculative_tokens,
        max_sampled_tokens=max_sampled,
    )
    logger.info(
        "speculative decoding (%s), up to %d tokens: a step of 4 costs %.1f times one of 1, "
        "a step of 8 %.1f times; it is used while at most %d sequences decode",
        method,
        config.num_speculative_tokens,
        costs.seconds(4) / costs.seconds(1),
        costs.seconds(8) / costs.seconds(1),
        speculation.most_decodes,
    )
    return speculation
