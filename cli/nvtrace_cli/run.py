"""nvtrace run: run a scenario on the engine, watch it, record its trace.

The scenarios are in `nvtrace.scenarios`; `views/live.py` draws the run.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm.engine.policies import POLICIES
from nvtrace_cli.check import CheckOption, Watch
from nvtrace_cli.failures import CommandError, RunFailedError, UsageError, interrupts_end_it
from nvtrace_cli.options import (
    ChatTemplateOption,
    DeviceOption,
    LangOption,
    ScenarioArgument,
    ThinkingOption,
    complete_policies,
    say,
    template_kwargs,
    words,
)
from nvtrace_cli.outputs import check_out, prove_writable, refuse_streams, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from nvtrace.catalog import Catalog
    from nvtrace.events import Event
    from nvtrace.recorder import Recorder
    from nvtrace.scenarios import Answer, Options, Scenario

DEFAULT_TRACE = Path("trace.jsonl")
_LARGEST_SEED = 2**64 - 1


def run(
    name: ScenarioArgument = None,
    *,
    list_: Annotated[bool, typer.Option("--list", help="List the scenarios.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Qwen3 model; by default the tiny one.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="The trace file; .gz and .zst are compressed; an existing file is renamed."
        ),
    ] = DEFAULT_TRACE,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Use this prompt instead of NAME's prompts (may be repeated)."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens to generate.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 takes the most likely token.")
    ] = None,
    chat_template_kwargs: ChatTemplateOption = None,
    enable_thinking: ThinkingOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"What goes into a step: {', '.join(POLICIES)}.", autocompletion=complete_policies
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=_LARGEST_SEED, help="Seed of all random draws.")
    ] = 0,
    tp: Annotated[
        int, typer.Option(min=1, max=1024, metavar="N", help="Processes that share the model.")
    ] = 1,
    device: DeviceOption = "auto",
    check: CheckOption = False,
    lang: LangOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="The answers (or the list) as JSON.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answers.")] = False,
) -> None:
    """Run a scenario, watch it, and record its trace.

    Answers go to stdout, progress and messages to stderr. Exit codes: 0 done, 1 --check has
    findings, 2 wrong usage, 5 the run failed, 130 interrupted (the trace is complete up to the last
    step).
    """
    with interrupts_end_it():
        from nvtrace.scenarios import SCENARIOS, Options  # noqa: PLC0415 - --help needs no engine
        from nvtrace_cli.views import answers as view  # noqa: PLC0415 - nor rich

    catalog = words(lang)
    if list_:
        if json:
            view.print_json(view.scenario_objects(SCENARIOS, catalog))
        else:
            view.print_scenarios(SCENARIOS, catalog)
        return
    if name is None and prompt:
        name = "example"
    if name is None or name not in SCENARIOS:
        raise UsageError(_unknown(name, list(SCENARIOS)))
    _check_sampling(temperature, max_tokens)
    _check_prompts(prompt or [])
    _check_outs(out, tp)
    _check_policy(policy)
    _check_device(device)
    options = Options(
        model=model,
        messages=tuple(prompt or ()),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        chat_template_kwargs=template_kwargs(chat_template_kwargs, enable_thinking),
        config=_engine_options(policy, tp, device),
    )
    watch = Watch(catalog, is_on=check)
    answers, place, fault = _record(SCENARIOS[name], options, out, watch, is_quiet=quiet)
    if json:
        view.print_json(view.answers_object(name, str(place), answers))
    else:
        view.print_answers(answers, catalog, is_quiet=quiet)
    if fault is not None:
        raise RunFailedError(fault)
    if not quiet and place.exists():
        is_hidden = not which("nvtrace") and which(sys.argv[0])  # for example .venv/bin/nvtrace
        command = sys.argv[0] if is_hidden else "nvtrace"
        say(
            catalog.ui(
                "run_next",
                trace=place,
                command=shlex.quote(command),
                quoted=shlex.quote(str(place)),
            )
        )
    watch.end(str(place))


def _record(
    scenario: Scenario, options: Options, out: Path, watch: Watch, *, is_quiet: bool
) -> tuple[list[Answer], Path, str | None]:
    """Run and record. Ctrl-C raises KeyboardInterrupt.

    Returns:
        The answers, where the trace is, and what is wrong with it.

    Raises:
        RunFailedError: the run has no answers.
    """
    # Before torch is loaded: threads that wait for each other sleep instead of spinning. On an idle
    # machine it makes no difference; on a busy one a decode step is not 10 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with interrupts_end_it():
        from nanovllm.errors import NanoVLLMError  # noqa: PLC0415 - --help needs no engine
        from nvtrace.scenarios import check_prompts, run_scenario  # noqa: PLC0415 - the same
        from nvtrace_cli.views.live import reporting  # noqa: PLC0415 - the same

    tap: StoppingTap | None = None
    recorder: Recorder | None = None
    catalog = watch.catalog
    try:
        with (
            reporting(catalog, is_quiet=is_quiet) as report,
            stopping_between_steps(watch.beside(report)) as tap,
            recording(out, tap, catalog) as recorder,
            tap.blamed(),
        ):
            try:
                check_prompts(scenario, options)
            except ValueError as error:  # or a broken configuration or tokenizer
                raise RunFailedError(str(error)) from error
            answers = run_scenario(scenario, recorder, options)
    except KeyboardInterrupt:
        if recorder is not None and tap is not None and tap.has_engine:
            place = _place(recorder, out, catalog)
            say(_fault(recorder, place) or catalog.ui("run_interrupted", trace=place))
        raise
    except CommandError:
        raise
    except NanoVLLMError as error:
        raise RunFailedError(str(error)) from error
    except Exception as error:
        if isinstance(error, ValueError) and tap is not None and not tap.has_engine:
            raise UsageError(str(error)) from error  # an option that this model cannot have
        raise RunFailedError(f"the run failed: {type(error).__name__}: {error}") from error
    place = _place(recorder, out, catalog)
    return answers, place, _fault(recorder, place)


def _fault(recorder: Recorder, place: Path) -> str | None:
    """What is wrong with the finished trace, if anything."""
    sink = recorder.trace.sink
    if sink.is_removed:
        return f"{place} was removed while it was written: there is no trace"
    if sink.error is not None:
        return f"{place} is incomplete, {sink.num_lost} lines could not be written: {sink.error}"
    if recorder.failure is not None:
        return f"{place} is incomplete: the recorder's {recorder.failure}"
    error = recorder.trace.tap_error
    if error is not None:
        return f"{place} is complete, but watching it failed: {type(error).__name__}: {error}"
    return None


def _place(recorder: Recorder, out: Path, catalog: Catalog) -> Path:
    """Where the trace is after the run; if it was moved, print where."""
    sink = recorder.trace.sink
    if sink.made is None or sink.is_removed or sink.place == sink.made.path:
        return out
    if sink.place is None:
        say(catalog.ui("run_moved_away", trace=out))
        return out
    say(catalog.ui("run_moved", trace=out, place=sink.place))
    return sink.place


@contextmanager
def recording(out: Path, tap: StoppingTap, catalog: Catalog) -> Iterator[Recorder]:
    """Record a run. If no engine starts, all files are left as they were.

    Args:
        out: where rank 0's trace goes. An older one is renamed once the engine has started.
        tap: called with the events of each step.
        catalog: the words.

    Raises:
        UsageError: the trace cannot be written.
    """
    from nvtrace.recorder import record  # noqa: PLC0415 - --help needs no engine

    with ExitStack() as stack:
        with writing(out, UsageError):
            recorder = stack.enter_context(record(out, tap=tap))
        try:
            yield recorder
        finally:
            kept = recorder.kept if tap.has_engine else recorder.undo()
            own = [] if kept is None else [(out, kept)]
            for older, new in [*own, *recorder.kept_others]:
                say(catalog.ui("run_kept", trace=older, kept=new))


class StoppingTap:
    """Passes the events of a run on, and stops the run between two steps after Ctrl-C.

    Attributes:
        is_asked: was Ctrl-C pressed?
        has_engine: did the engine start?
    """

    def __init__(self, tap: Callable[[list[Event]], None]) -> None:
        self.is_asked = False
        self.has_engine = False
        self._tap = tap
        self._is_stepping = False
        self._is_over = False

    def __call__(self, events: list[Event]) -> None:
        """Pass events on. The run can stop at the end of a step, and before the first one."""
        from nvtrace.events import EngineReady, StepEnd  # noqa: PLC0415 - --help needs no structs

        self.has_engine = self.has_engine or any(isinstance(e, EngineReady) for e in events)
        self._tap(events)
        is_end = any(isinstance(event, StepEnd) for event in events)
        can_stop = is_end or not self._is_stepping
        self._is_stepping = self._is_stepping or is_end
        if self.is_asked and can_stop and not self._is_over:
            raise KeyboardInterrupt

    def on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """Stop after this step; at once if no step has begun, or if Ctrl-C is pressed again."""
        strikes = self.is_asked or not self._is_stepping
        self.is_asked = True  # before raising: library code may swallow the exception
        if strikes:
            raise KeyboardInterrupt

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn any error after Ctrl-C into KeyboardInterrupt: torch may raise another."""
        try:
            yield
        except Exception as error:
            if self.is_asked:
                raise KeyboardInterrupt from error
            raise
        finally:
            self._is_over = True  # from here on, only the trace is closed


@contextmanager
def stopping_between_steps(tap: Callable[[list[Event]], None]) -> Iterator[StoppingTap]:
    """Let Ctrl-C wait for the end of the step, so that the trace is complete up to it.

    Before the first step, and when pressed twice, Ctrl-C ends the run at once.

    Args:
        tap: called with the events of each step.

    Yields:
        The tap to give to the recorder.
    """
    stopping_tap = StoppingTap(tap)
    before = signal.signal(signal.SIGINT, stopping_tap.on_interrupt)
    try:
        yield stopping_tap
    finally:
        signal.signal(signal.SIGINT, before)


def _engine_options(policy: str | None, tp: int, device: str) -> dict[str, str | int]:
    options: dict[str, str | int] = {"tensor_parallel_size": tp, "device": device}
    return options if policy is None else options | {"policy": policy}


def _check_outs(out: Path, num_ranks: int) -> None:
    from nvtrace.reader import rank_path  # noqa: PLC0415 - --help needs no msgspec

    refuse_streams(out, "a trace")
    check_out(out)
    if num_ranks > 1 and out.exists() and not out.is_file():
        raise UsageError(
            f"--out {out} is not a regular file: with --tp, each rank writes a file beside it"
        )
    for rank in range(1, num_ranks):
        path = rank_path(out, rank)
        refuse_streams(path, f"rank {rank}'s trace")
        check_out(path)
        prove_writable(
            path
        )  # for example /dev/fd: there is no place for the files of the other ranks


def _check_sampling(temperature: float | None, max_tokens: int | None) -> None:
    from nanovllm.sampling_params import SamplingParams  # noqa: PLC0415 - --help needs no engine

    if temperature is not None and not math.isfinite(temperature):
        raise UsageError(f"--temperature {temperature}: it must be a finite number")
    for option, given in (
        ("--temperature", {"temperature": temperature}),
        ("--max-tokens", {"max_tokens": max_tokens}),
    ):
        [value] = given.values()
        try:
            if value is not None:
                SamplingParams(**given)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{option} {value}: {error}") from error


def _check_prompts(prompts: list[str]) -> None:
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"--prompt {prompt}: it is not valid UTF-8") from error


def _check_policy(policy: str | None) -> None:
    if policy is not None and policy not in POLICIES:
        raise UsageError(f"--policy {policy}: it must be one of {', '.join(POLICIES)}")


def _check_device(device: str) -> None:
    from nanovllm.utils.devices import resolve_device  # noqa: PLC0415 - --help needs no engine

    if device not in {"auto", "cpu", "cuda"}:
        raise UsageError(f"--device {device}: it must be one of auto, cpu, cuda")
    try:
        resolve_device(device)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _unknown(name: str | None, names: list[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - for errors only

    known = f"the scenarios are {', '.join(names)} (see nvtrace run --list)"
    if name is None:
        return f"no scenario was given: {known}"
    near = get_close_matches(name, names, n=1)
    return f"there is no scenario {name}: " + (f"did you mean {near[0]}?" if near else known)
