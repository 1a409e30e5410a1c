"""What an observer of the engine hears, in which order, and that hearing it changes nothing."""

from __future__ import annotations

import gc
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest

from nanovllm import LLM, Observer, SamplingParams
from nanovllm.observer import SILENT
from nanovllm.utils.guard import guarded
from nvtrace import events as ev
from nvtrace.envelope import Footer
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder, record
from support.oracle import HOOKS, Narrator, Oracle, Watcher, greedy_params, make_llm
from support.recording import BUSY
from support.workload import Run

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Oracle.create(tmp_path_factory.mktemp("model")).folder


START_UP = """
engine_init tp_runtime_init model_weights_loaded kv_budget_estimate cudagraph_skip engine_ready
"""
A_RUN = """
generate_start request_enqueue request_enqueue
step_start blocks_allocate state_transition blocks_allocate state_transition
schedule_prefill prepare_prefill_tensors run_eager sample_tokens blocks_hash
blocks_release state_transition step_end request_output
step_start schedule_decode prepare_decode_tensors run_eager sample_tokens blocks_hash step_end
step_start blocks_append schedule_decode prepare_decode_tensors run_eager sample_tokens
blocks_release state_transition step_end request_output
generate_finish
"""
CHUNKS = """
generate_start request_enqueue request_enqueue
step_start blocks_allocate state_transition admission_stop schedule_prefill
prepare_prefill_tensors run_eager blocks_hash step_end
step_start blocks_share blocks_allocate state_transition schedule_prefill
prepare_prefill_tensors run_eager sample_tokens blocks_release state_transition
blocks_release state_transition step_end request_output request_output
generate_finish
"""
NOT_IN_THEM = """
warmup_model cudagraph_capture request_refused request_abort engine_error engine_reset
schedule_mixed preempt blocks_revive blocks_evict cudagraph_replay gpu_time
"""
KNOWN = {*f"{START_UP} {A_RUN} {CHUNKS} {NOT_IN_THEM}".split()}


def heard_by(narrator: Narrator) -> list[str]:
    """The moments since the last call. A moment that these lists do not know may come anywhere."""
    heard = [moment for moment in narrator.moments if moment in KNOWN]
    narrator.moments.clear()
    return heard


def test_an_observer_hears_each_moment_in_its_order(folder: Path) -> None:
    narrator = Narrator()
    llm = make_llm(folder, narrator)
    assert heard_by(narrator) == START_UP.split()

    llm.generate([[5, 6, 7], [8, 9, 10, 11]], [greedy_params(3), greedy_params(1)])

    assert heard_by(narrator) == A_RUN.split()


def test_an_observer_hears_chunks_shared_blocks_preemptions_refusals_and_aborts(
    folder: Path,
) -> None:
    narrator = Narrator()
    llm = make_llm(folder, narrator, max_num_batched_tokens=4, num_kvcache_blocks=4)
    narrator.moments.clear()
    llm.generate([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9]], [greedy_params(1), greedy_params(1)])
    assert heard_by(narrator) == CHUNKS.split()

    llm.generate([[5, 6, 7, 8], [50] * 4, [60] * 99], greedy_params(8))
    heard = heard_by(narrator)
    assert {"preempt", "request_refused", "blocks_evict", "admission_stop"} <= {*heard}
    at = heard.index("preempt")
    assert heard[at - 1 : at + 2] == ["blocks_release", "preempt", "state_transition"]

    llm.abort(llm.add_request([5], greedy_params(2)))
    assert heard_by(narrator) == [
        *("request_enqueue", "request_abort", "state_transition", "request_output")
    ]


def test_an_observer_changes_nothing(folder: Path, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": 5, "num_kvcache_blocks": 9}
    prompts = [*PROMPTS, [77] * 99, PROMPTS[2]]
    params = [
        greedy_params(12),
        *(SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=12),) * 3,
        SamplingParams(max_tokens=7, seed=1),
    ]
    silent = make_llm(folder, None, **options).generate(prompts, params)
    observers: list[Observer] = [Observer(), Narrator(), Watcher()]
    for observer in observers:
        assert make_llm(folder, observer, **options).generate(prompts, params) == silent
    with record(tmp_path / "trace.jsonl") as recorder:
        assert make_llm(folder, recorder, **options).generate(prompts, params) == silent
    assert silent[3]["finish_reason"] == "refused"


# -- an observer that raises -----------------------------------------------------------------------

MAY_RAISE = ("engine_init", "for_workers")
GUARDED = [hook for hook in HOOKS if hook not in (*MAY_RAISE, "failed")]


class Raiser(Observer):
    """Raises in each of these methods, and keeps what failed."""

    def __init__(self, *hooks: str, error: BaseException | None = None) -> None:
        self.failures: list[str] = []
        self.error = LookupError("not today") if error is None else error
        for hook in hooks:
            setattr(self, hook, self._fail)

    def _fail(self, *_args: object, **_kwargs: object) -> None:
        raise self.error

    def failed(self, hook: str, error: Exception) -> None:
        assert error is self.error
        self.failures.append(hook)


def call(observer: Observer, hook: str) -> None:
    """Call a method with anything, each argument as the engine gives it: by place, or by name."""
    parameters = [*signature(getattr(Observer, hook)).parameters.values()][1:]
    named: dict[str, Any] = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    getattr(observer, hook)(*(p for p in parameters if p.name not in named), **named)


@pytest.mark.parametrize("hook", GUARDED)
def test_what_a_hook_raises_goes_no_further_and_is_said_once(
    hook: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raiser = Raiser(hook)
    guard = guarded(raiser)
    for _ in range(2):
        call(guard, hook)
    assert raiser.failures == [hook, hook]
    message = capsys.readouterr().err
    assert message.count("LookupError: not today") == 1
    assert message.count(f"nanovllm: Raiser.{hook}() raised this error. The run goes on") == 1


@pytest.mark.parametrize("hook", GUARDED)
def test_a_guard_passes_everything_on(hook: str) -> None:
    heard: list[tuple[object, ...]] = []
    observer = Raiser()
    setattr(observer, hook, lambda *args, **named: heard.append((*args, *named.values())))
    call(guarded(observer), hook)
    assert [str(argument).split(":")[0] for argument in heard[0]] == [
        *list(signature(getattr(Observer, hook)).parameters)[1:]
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interruption_passes_a_guard(error: BaseException) -> None:
    guard = guarded(Raiser("step_start", error=error))
    with pytest.raises(type(error)):
        guard.step_start(1)


@pytest.mark.parametrize("hook", MAY_RAISE)
def test_an_observer_may_refuse_before_the_engine_starts(hook: str) -> None:
    with pytest.raises(LookupError):
        call(guarded(Raiser(hook)), hook)


def test_silence_is_not_guarded() -> None:
    assert guarded(None) is guarded(SILENT) is SILENT


def test_hooks_of_any_kind_are_called() -> None:
    heard: list[object] = []

    class Static(Observer):
        @staticmethod
        def engine_init(config: object, model_config: object) -> None:
            heard.append((config, model_config))

    guarded(Static()).engine_init(1, 2)  # type: ignore[arg-type]
    plain = Observer()
    setattr(plain, "step_start", heard.append)  # noqa: B010 - mypy refuses an assignment
    guarded(plain).step_start(3)
    assert heard == [(1, 2), 3]


def test_what_is_no_observer_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"a nanovllm\.Observer, not a list: make its class"):
        guarded([])  # type: ignore[arg-type]


def test_an_observer_is_freed_with_its_guard() -> None:
    gc.collect()
    gc.disable()
    try:
        observer = Raiser()
        alive = ref(observer)
        guard = guarded(observer)
        guard.step_start(1)
        del observer, guard
        assert alive() is None
    finally:
        gc.enable()


def test_a_guard_says_what_has_no_message_and_needs_no_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raiser = Raiser("step_start", "failed", error=UnreadableError())
    guarded(raiser).step_start(1)
    assert "UnreadableError" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr", None)
    guarded(raiser).step_start(1)


def test_a_run_whose_observer_always_raises_is_as_if_there_were_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raiser = Raiser(*GUARDED)
    run, silent = Run(BUSY, guarded(raiser)).go(), Run(BUSY).go()
    assert run.num_steps == silent.num_steps
    for seq_id, seq in silent.sequences.items():
        assert run.sequences[seq_id].token_ids == seq.token_ids
    heard = set(raiser.failures)
    assert {"request_abort", "request_refused", "preempt", "blocks_evict", "step_end"} <= heard
    assert capsys.readouterr().err.count("The run goes on") == 1

    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 9, "max_num_batched_tokens": 5}
    expected = make_llm(folder, None, **options).generate(PROMPTS, greedy_params(8))
    llm = LLM(folder, raiser, **options)
    assert llm.generate(PROMPTS, greedy_params(8)) == expected
    llm.abort(llm.add_request([5], greedy_params(2)))
    assert llm.is_finished()
    assert "generate_finish" in raiser.failures
    assert capsys.readouterr().err.count("The run goes on") == 1


def test_an_event_that_cannot_be_built_is_missing_by_its_number(tmp_path: Path) -> None:
    def slip(self: Recorder, *_args: object) -> None:
        self.trace.add(ev.new(ev.AdmissionStop)(reson="no_blocks"))  # type: ignore[call-arg]

    path = tmp_path / "trace.jsonl"
    with record(path) as whole:
        Run(BUSY, whole).go()
    lines = [record for record in read_trace(path) if isinstance(record, ev.Event)]
    num_lost = sum(isinstance(event, ev.AdmissionStop) for event in lines)
    assert num_lost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "admission_stop", slip)
        with record(path, existing="replace") as recorder:
            Run(BUSY, guarded(recorder)).go()
    warnings: list[str] = []
    *_, footer = read_trace(path, warn=warnings.append)
    assert isinstance(footer, Footer)
    assert footer.num_events == len(lines)
    assert (footer.exit, footer.error_type) == ("error", "TypeError")
    assert warnings == [f"{path}: {num_lost} events are missing, according to the event ids"]
    assert recorder.failure is not None
    assert recorder.failure.startswith("admission_stop() raised TypeError: ")


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        *[("request_enqueue", 2), ("request_output", 2), ("step_start", 1), ("step_start", 3)],
        *[("step_end", 2), ("schedule_decode", 2), ("schedule_prefill", 1), ("blocks_append", 1)],
    ],
)
def test_a_method_that_raises_leaves_the_other_events_as_they_are(
    hook: str, call: int, tmp_path: Path
) -> None:
    """Only its own event is missing: all others are of the same step and phase."""
    num_calls = 0
    real = getattr(Recorder, hook)

    def slip(*args: object, **named: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise LookupError
        real(*args, **named)

    def run(name: str) -> tuple[list[tuple[str, int | None, str]], list[str]]:
        warnings: list[str] = []
        with record(tmp_path / name) as recorder:
            Run(BUSY, guarded(recorder)).go()
        records = read_trace(tmp_path / name, warn=warnings.append)
        events = [(ev.tag_of(e), e.step, e.phase) for e in records if isinstance(e, ev.Event)]
        return events, warnings

    whole, _ = run("whole.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, hook, slip)
        events, warnings = run("trace.jsonl")
    tag = hook.upper()
    assert [e for e in events if e[0] != tag] == [e for e in whole if e[0] != tag]
    if tag in ev.EVENT_TYPES:
        assert len(events) == len(whole) - 1
        assert [w.partition(": ")[2].split()[0] for w in warnings] == ["1"], warnings


def test_a_tap_that_raises_leaves_the_trace_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tap(_events: list[ev.Event]) -> None:
        raise LookupError

    path = tmp_path / "trace.jsonl"
    with record(path) as whole:
        Run(BUSY, whole).go()
    shapes = [(ev.tag_of(e), e.step) for e in read_trace(path) if isinstance(e, ev.Event)]
    with record(path, tap=tap, existing="replace") as recorder:
        Run(BUSY, guarded(recorder)).go()
    assert isinstance(recorder.trace.tap_error, LookupError)
    assert recorder.failure is None
    assert capsys.readouterr().err.count("what watches the trace raised LookupError") == 1
    records = read_trace(path, warn=pytest.fail)
    assert [(ev.tag_of(e), e.step) for e in records if isinstance(e, ev.Event)] == shapes
