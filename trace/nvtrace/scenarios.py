"""Scenarios: small named runs, each of which shows one behaviour of the scheduler.

They run on a CPU in seconds, with the tiny Qwen3 that ships or any other Qwen3 model. Their titles
are in the catalogs. To record one, pass a Recorder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm import SamplingParams
from nanovllm.assets import TINY_QWEN3
from nanovllm.errors import RequestRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.observer import Observer
    from nanovllm.outputs import RequestOutput
    from nanovllm.utils.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives while others run.

    Attributes:
        message: the user's message.
        before_step: it is queued before this engine step; None: when the engine is idle.
    """

    message: str
    before_step: int | None


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to run.

    Attributes:
        name: its name on the command line.
        messages: the requests at the start.
        arrivals: the requests that arrive later, in order. If empty, `generate` runs the messages.
        max_tokens, temperature: of every request.
        config: engine settings.
        output_lens: exactly how many tokens each request generates, in the order of arrival
            (end-of-sequence tokens are ignored); if empty, `max_tokens` is the limit.
    """

    name: str
    messages: tuple[str, ...]
    arrivals: tuple[Arrival, ...] = ()
    max_tokens: int = 256
    temperature: float = 0.6
    config: Mapping[str, Any] = field(default_factory=dict)
    output_lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may change in a scenario; None keeps the scenario's own value.

    `chat_template_kwargs` are for the model's chat template: `{"enable_thinking": False}`, say.
    """

    model: str | Path | None = None
    messages: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of a run: its message and its output."""

    message: str
    output: RequestOutput


_QUESTION = "what is a block table"

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        # The article's run: the batch shrinks from 2 to 1 when the first request ends.
        Scenario("example", ("introduce yourself", "list all prime numbers within 100")),
        # Two equal prompts in one step share nothing. The third arrives while they run: blocks are
        # shared. The fourth arrives when all have ended: free blocks are revived.
        Scenario(
            "shared-prefix",
            (_QUESTION, _QUESTION),
            (Arrival(_QUESTION, before_step=5), Arrival(_QUESTION, before_step=None)),
            max_tokens=64,
            config={"kvcache_block_size": 4, "num_kvcache_blocks": 128},
        ),
        # A budget of 8 tokens per step: prompts of 11 and 17 tokens are computed in chunks.
        Scenario(
            "chunked-prefill",
            ("introduce yourself", "list all prime numbers within 100"),
            max_tokens=32,
            config={"max_num_batched_tokens": 8},
        ),
        # 24 blocks of 4 tokens are not enough for three answers: the youngest is preempted.
        Scenario(
            "preemption",
            ("introduce yourself", "list all prime numbers within 100", "what is preemption"),
            max_tokens=64,
            config={"kvcache_block_size": 4, "num_kvcache_blocks": 24},
        ),
        # Requests that arrive while others run join at the next step.
        Scenario(
            "late-join",
            ("list all prime numbers within 100",),
            (Arrival("introduce yourself", 12), Arrival("what is continuous batching", 40)),
            max_tokens=96,
        ),
        # The article's four answers of uneven length, and two requests that arrive while they run.
        # Compare with `--policy static`: there the places of requests that ended early stay empty
        # until the slowest has ended, and the late requests wait for it.
        Scenario(
            "static-vs-continuous",
            (
                "what is a step",
                "what is a block table",
                "introduce yourself",
                "list all prime numbers within 100",
            ),
            (Arrival("what is preemption", 10), Arrival("what is a prefill step", 30)),
            config={"max_num_seqs": 4},
            output_lens=(20, 80, 200, 256, 200, 100),
        ),
    )
}


def run_scenario(
    scenario: Scenario, observer: Observer | None = None, options: Options | None = None
) -> list[Answer]:
    """Run a scenario to its end.

    Args:
        scenario: one of SCENARIOS, or your own.
        observer: a Recorder, or another observer.
        options: what to change. Its messages replace all requests of the scenario.

    Returns:
        One answer for each request, in the order of their arrival.

    Raises:
        NanoVLLMError: the model cannot be loaded, or every request was refused.
    """
    from nanovllm import LLM  # noqa: PLC0415 - loads torch, which `nvtrace run --list` can do without

    options = options or Options()
    config = {**scenario.config, **options.config, "seed": options.seed}
    messages = options.messages or scenario.messages
    arrivals = () if options.messages else scenario.arrivals
    llm = LLM(_first(options.model, TINY_QWEN3), observer=observer, **config)
    try:
        if arrivals:
            return _run_arrivals(llm, scenario, options)
        prompts = _prompts(llm.tokenizer, messages, options)
        params = [_params(scenario, options, index) for index in range(len(prompts))]
        outputs = llm.generate(prompts, params)
        return [Answer(*pair) for pair in zip(messages, outputs, strict=True)]
    finally:
        llm.exit()


def check_prompts(scenario: Scenario, options: Options) -> None:
    """Check the prompts before the weights are loaded.

    Raises:
        ValueError: a prompt is invalid, or all are too long, or the model's config or tokenizer is
            broken.
    """
    from nanovllm.config import Config  # noqa: PLC0415 - loads torch
    from nanovllm.utils.input_processor import InputProcessor  # noqa: PLC0415 - the same
    from nanovllm.utils.model_config import ModelConfig  # noqa: PLC0415 - the same
    from nanovllm.utils.tokenizer import Tokenizer  # noqa: PLC0415 - the same

    arriving = tuple(arrival.message for arrival in scenario.arrivals)
    messages = options.messages or (*scenario.messages, *arriving)
    config = Config.create(_first(options.model, TINY_QWEN3), {**scenario.config, **options.config})
    model_config = ModelConfig.from_folder(config.model)
    tokenizer = Tokenizer(config.model)
    processor = InputProcessor(tokenizer, model_config.vocab_size)
    requests = processor.batch(_prompts(tokenizer, messages, options), None)
    shortest = min(len(token_ids) for token_ids, *_ in requests)
    positions = model_config.max_position_embeddings
    longest = min(config.max_model_len, positions)
    if shortest >= longest:  # if one fits, the others are refused one by one
        which = "the prompt" if len(requests) == 1 else "the shortest prompt"
        more = "take a model with more positions"
        if shortest < positions:
            more = f"use LLM(max_model_len={positions}): the model has {positions} positions"
        raise RequestRefusedError(
            f"{which} has {shortest} tokens, but max_model_len={longest} bounds prompt and "
            f"completion together: shorten it, or {more}",
            reason="prompt_too_long",
            need=shortest + 1,
            have=longest,
        )


def _prompts(tokenizer: Tokenizer, messages: Iterable[str], options: Options) -> list[list[int]]:
    kwargs = options.chat_template_kwargs
    return [tokenizer.apply_chat_template(message, **kwargs) for message in messages]


def _params(scenario: Scenario, options: Options, index: int) -> SamplingParams:
    temperature = _first(options.temperature, scenario.temperature)
    if scenario.output_lens and not options.messages and options.max_tokens is None:
        length = scenario.output_lens[index]
        return SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
    return SamplingParams(
        temperature=temperature, max_tokens=_first(options.max_tokens, scenario.max_tokens)
    )


def _run_arrivals(llm: LLMEngine, scenario: Scenario, options: Options) -> list[Answer]:
    asked: dict[int, str] = {}
    outputs: dict[int, RequestOutput] = {}

    def ask(message: str) -> None:
        params = _params(scenario, options, len(asked))
        [prompt] = _prompts(llm.tokenizer, [message], options)
        asked[llm.add_request(prompt, params)] = message

    for message in scenario.messages:
        ask(message)
    coming = list(scenario.arrivals)
    while coming or not llm.is_finished():
        is_idle = llm.is_finished()
        while coming and (is_idle or _is_due(coming[0], llm.engine_step + 1)):
            ask(coming.pop(0).message)
            is_idle = False
        for output in llm.step():
            if output["seq_id"] is not None:
                outputs[output["seq_id"]] = output
    return [Answer(message, outputs[seq_id]) for seq_id, message in asked.items()]


def _is_due(arrival: Arrival, next_step: int) -> bool:
    return arrival.before_step is not None and arrival.before_step <= next_step


def _first(chosen: Any, default: Any) -> Any:  # noqa: ANN401 - of whatever type the option is
    return default if chosen is None else chosen
