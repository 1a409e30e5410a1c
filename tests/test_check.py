"""nvtrace check: silent about every sound engine, loud about every other."""

from __future__ import annotations

import ast
import dataclasses
import json
from dataclasses import replace
from importlib import resources
from itertools import chain
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import POLICIES
from nanovllm.gpu.attention_choice import ATTENTION_BACKENDS, make_attention_backend
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.parallel.tensor_parallel import BACKENDS
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.loader import find_destinations
from nanovllm.utils.model_config import ModelConfig
from nvtrace import events as ev
from nvtrace.catalog import LANGUAGES, load_catalog
from nvtrace.check import INVARIANTS, Checker, Fact, Finding, check, fields
from nvtrace.envelope import Footer, Header, ModelFacts, Record, Unknown
from nvtrace.reader import read_trace
from nvtrace.recorder import record
from nvtrace.reference import RECORD_TYPES
from nvtrace_cli.check import Watch
from support.cli import call
from support.cli_traces import write_records
from support.docs import DOCS
from support.fake_runner import FAKE_MODEL, make_engine
from support.faults import EXERCISES, FAULTS, Fault, record_fault, record_sound
from support.fuzz import draw_case
from support.mutations import Mutant, caught_by_kind, is_caught, table, traces
from support.oracle import Oracle, save_tokenizer
from support.recording import BUSY, BUSY_MIXED, HOOKS_OF_A_STEP, Interruption, Recording
from support.workload import Run, Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.scheduler import Scheduler
    from nvtrace.catalog import Catalog

INTERRUPTIONS = st.builds(
    Interruption,
    step=st.integers(1, 12),
    at=st.sampled_from(("scheduled", "ran", "sampled", *HOOKS_OF_A_STEP)),
    is_noted=st.booleans(),
)


@pytest.fixture(scope="module")
def sources() -> list[list[Record]]:
    return traces()


@pytest.fixture(params=LANGUAGES)
def catalog(request: pytest.FixtureRequest) -> Catalog:
    return load_catalog(request.param)


def changed(records: list[Record], kind: type[msgspec.Struct], **fields: object) -> list[Record]:
    """The records with these fields of the first event of a kind changed."""
    index = next(i for i, item in enumerate(records) if isinstance(item, kind))
    new: Any = msgspec.structs.replace(records[index], **fields)
    return [*records[:index], new, *records[index + 1 :]]


# -- a sound engine --------------------------------------------------------------------------------


@given(workloads())
@example(BUSY)
@example(BUSY_MIXED)
def test_nothing_is_found_in_the_trace_of_any_workload(workload: Workload) -> None:
    assert list(check(Recording(workload).records)) == []


@given(workloads(), INTERRUPTIONS)
def test_nothing_is_found_after_an_exception_anywhere_in_a_step(
    workload: Workload, interruption: Interruption
) -> None:
    assert list(check(Recording(workload, interruption).records)) == []


@pytest.mark.parametrize("index", range(8))
def test_nothing_is_found_in_longer_and_harsher_workloads(index: int) -> None:
    assert list(check(Recording(draw_case(7, index).workload).records)) == []


def test_nothing_is_found_where_there_are_graphs_calls_and_cache_resets(
    sources: list[list[Record]],
) -> None:
    told = {
        ev.tag_of(item) for records in sources for item in records if isinstance(item, ev.Event)
    }
    assert told == set(ev.EVENT_TYPES)
    assert [finding for records in sources for finding in check(records)] == []


@pytest.mark.parametrize("path", sorted((DOCS / "traces").glob("*.zst")), ids=lambda p: p.name)
def test_nothing_is_found_in_a_trace_of_the_docs(path: Path) -> None:
    assert list(check(read_trace(path, warn=pytest.fail))) == []


def decodes_then_cuts_any_prompt(scheduler: Scheduler, batch: Batch) -> None:
    scheduler.decode(batch)
    scheduler.continue_prefill(batch)
    scheduler.admit(batch, chunk_any=True)


@pytest.mark.parametrize("workload", [BUSY, *(draw_case(7, index).workload for index in range(4))])
def test_a_policy_of_your_own_is_judged_by_what_holds_for_every_policy(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "mine", decodes_then_cuts_any_prompt)
    settings = replace(workload.settings, policy="mine")
    records = Recording(replace(workload, settings=settings)).records
    assert list(check(records)) == []
    overfull = changed(records, ev.SchedulePrefill, num_batched_tokens=10**6)
    assert "budgets" in {finding.invariant for finding in check(overfull)}


def test_a_trace_is_checked_by_its_events_alone_as_a_tap_hears_them() -> None:
    checker = Checker()
    records = [item for item in Recording(BUSY).records if isinstance(item, ev.Event)]
    assert [finding for item in records for finding in checker.take(item)] == []
    assert checker.num_events == len(records)


def test_an_ended_request_is_forgotten() -> None:
    checker = Checker()
    for item in Recording(BUSY).records:
        checker.take(item)
    ledger = checker._ledger
    assert not ledger.state.sequences
    assert not ledger.requests
    assert not ledger._chains
    assert not ledger.outputs_due


def test_an_event_of_a_newer_version_is_passed_over() -> None:
    records = Recording(BUSY).records
    place = next(i for i, item in enumerate(records) if isinstance(item, ev.StepEnd)) + 1
    later: list[Record] = []
    for item in records[place:]:
        assert not isinstance(item, Header | Unknown)
        later.append(msgspec.structs.replace(item, event_id=item.event_id + 1))
    later[-1] = msgspec.structs.replace(later[-1], num_events=later[-1].event_id - 1)  # type: ignore[union-attr]  # the footer
    unknown = Unknown(event="SPECULATE", fields={"event_id": place})
    assert list(check([*records[:place], unknown, *later])) == []


@pytest.mark.parametrize(
    ("kind", "values", "invariant"),
    [
        (ev.RunEager, {"ts_ns": 0}, "times"),
        (ev.RunEager, {"num_tokens": 27}, "graph_size"),
        (ev.PreparePrefillTensors, {"max_seqlen_k": 18}, "layout"),
        (ev.PreparePrefillTensors, {"slot_ranges": [(0, 10), (257, 273)]}, "layout"),
        (ev.PreparePrefillTensors, {"slot_ranges": [(0, 10), (2**40, 2**40 + 16)]}, "layout"),
        (ev.PrepareDecodeTensors, {"step": 1}, "steps"),
        (ev.PrepareDecodeTensors, {"slot_mapping": [11, 274]}, "layout"),
        (ev.CudagraphReplay, {"graph_batch_size": 3, "padding": 1}, "graph_size"),
    ],
)
def test_a_rank_that_hears_of_no_request_is_asked_whether_its_layouts_and_runs_agree(
    kind: type[ev.Event], values: dict[str, Any], invariant: str
) -> None:
    wrong = changed(recorded("gpu-two-gpus.rank1"), kind, **values)
    assert {finding.invariant for finding in check(wrong)} == {invariant}


# -- an unsound trace ------------------------------------------------------------------------------


def test_at_least_95_in_100_single_fact_corruptions_are_caught(sources: list[list[Record]]) -> None:
    by_kind, _ = caught_by_kind(sources, per_kind=25)
    assert set(by_kind) == set(ev.EVENT_TYPES)
    caught = sum(caught for caught, _ in by_kind.values())
    made = sum(made for _, made in by_kind.values())
    assert caught / made >= 0.95, table(by_kind)
    assert min(caught / made for caught, made in by_kind.values()) >= 0.5, table(by_kind)


@pytest.mark.parametrize("trace", [0, 1, 2], ids=["prefill_first", "mixed", "static"])
def test_every_step_without_one_of_its_events_is_caught(
    sources: list[list[Record]], trace: int
) -> None:
    records = sources[trace]
    places = [i for i, item in enumerate(records) if isinstance(item, ev.Event) and item.step]
    whole = Mutant("", "", records)
    assert not is_caught(whole)
    for place in places[:60]:
        rest = [*records[:place], *records[place + 1 :]]
        assert is_caught(replace(whole, records=rest)), records[place]


def test_a_finding_names_the_two_facts_the_step_and_the_event() -> None:
    records = Recording(BUSY).records
    index = next(i for i, item in enumerate(records) if isinstance(item, ev.BlocksAllocate))
    event = records[index]
    assert isinstance(event, ev.BlocksAllocate)
    first, *_ = check(changed(records, ev.BlocksAllocate, block_ids=[[0, 2, 1]]))
    assert first == Finding(
        "free_list",
        event.step,
        event.event_id,
        "BLOCKS_ALLOCATE",
        Fact("block_ids", [0, 2, 1]),
        Fact("free_list_head", [0, 1, 2]),
    )


def test_checking_goes_on_after_an_event_that_cannot_be_applied() -> None:
    records = Recording(BUSY).records
    broken = changed(records, ev.BlocksRelease, seq_ids=[99])
    last = next(item for item in reversed(records) if isinstance(item, ev.StepEnd))
    broken[records.index(last)] = msgspec.structs.replace(last, wall_ns=last.wall_ns + 1)
    findings = list(check(broken))
    assert findings[0].invariant == "names"
    assert "follows" in {finding.invariant for finding in findings}
    assert (last.event_id, "step_times") in {(f.event_id, f.invariant) for f in findings}


def test_of_one_event_each_invariant_is_told_once() -> None:
    records = changed(Recording(BUSY).records, ev.PreparePrefillTensors, n_seqs=9, flat_tokens=9)
    assert [finding.invariant for finding in check(records)] == ["layout"]


@pytest.mark.parametrize(
    ("kind", "fields", "invariant"),
    [
        (ev.EngineReady, {"num_kvcache_blocks": 10**9}, "follows"),
        (ev.EngineReady, {"eos_sources": ["tokenizer"] * 2}, "pool_size"),
        (ev.EngineReady, {"eos_sources": ["config.json"] * 3}, "pool_size"),
        (ev.EngineInit, {"block_size": 0}, "ranges"),
        (ev.RequestEnqueue, {"max_tokens": 10**12}, "request_facts"),
        (ev.BlocksAllocate, {"block_ids": [[-1]]}, "names"),
        (ev.SchedulePrefill, {"num_scheduled_tokens": [10**15]}, "budgets"),
        (ev.CudagraphReplay, {"graph_batch_size": 10**9}, "graph_size"),
    ],
)
def test_facts_of_any_size_are_judged(
    sources: list[list[Record]], kind: type[ev.Event], fields: dict[str, Any], invariant: str
) -> None:
    records = sources[4 if kind is ev.CudagraphReplay else 0]  # the one that knows its graphs
    assert invariant in {finding.invariant for finding in check(changed(records, kind, **fields))}


# -- every field -----------------------------------------------------------------------------------

WORDS_OF_ANYBODY = {
    *(("TRACE_HEADER", name) for name in ("environment", "architecture", "hidden_act")),
    *(("ENGINE_ERROR", "message"), ("REQUEST_OUTPUT", "text")),
}
RANKS = ("two-ranks.rank1", "gpu-two-gpus.rank1")
POSSIBLE_IN_A_HEADER = {  # other engines, clocks and models than those that were recorded
    "eos_by_file={'a': [1]}",
    *("name=x", "version=x", "source=x"),
    *("attention_bias=True", "dtype=None", "rms_norm_eps=1e+308", "rope_theta=1e+308"),
    "eos_token_ids=[]",  # the tokenizer may know them
}
SECTIONS = ("clock", "engine", "model", "config")  # of the header; "environment" is words


def recorded(name: str) -> list[Record]:
    return [*read_trace(DOCS / "traces" / f"{name}.jsonl.zst", warn=pytest.fail)]


def impossible(kind: Any, value: Any) -> Iterator[Any]:  # noqa: ANN401 - of any field
    """What no field of a type holds, and the other codes of a field that has some."""
    args = get_args(kind)
    match get_origin(kind) or kind:
        case origin if origin is Literal:
            yield from (code for code in args if code != value)
        case origin if origin is UnionType:
            yield from chain.from_iterable(impossible(arg, value) for arg in args)
        case origin if origin in (list, tuple):
            first, rest = (value[0], value[1:]) if value else (None, [])
            yield from (origin([bad, *rest]) for bad in impossible(args[0], first))
            if origin is list and value != []:
                yield []
        case origin if origin is int:
            yield -1 - abs(value or 0)
        case origin if origin is float:
            yield -0.5
        case origin if origin is str:
            yield ""


def missed(records: list[Record], index: int) -> list[tuple[str, object]]:
    """The impossible values of a record's fields that the check does not find."""
    item: Any = records[index]
    tag = item.__struct_config__.tag
    tried = [
        (field.name, bad)
        for field in msgspec.structs.fields(item)
        if (tag, field.name) not in WORDS_OF_ANYBODY
        for bad in impossible(field.type, getattr(item, field.name))
    ]
    assert tried
    found = {
        number
        for number, (name, bad) in enumerate(tried)
        for wrong in [msgspec.structs.replace(item, **{name: bad})]
        if is_caught(Mutant("", "", [*records[:index], wrong, *records[index + 1 :]]))
    }
    return [each for number, each in enumerate(tried) if number not in found]


@pytest.mark.parametrize("kind", [*ev.EVENT_TYPES.values(), Footer], ids=lambda kind: kind.__name__)
def test_what_a_field_cannot_hold_is_found_in_every_field(
    kind: type[Record], sources: list[list[Record]]
) -> None:
    # Those that tell of their start come first: there it is known why a step ran as it did.
    records = next(r for r in reversed(sources) if any(isinstance(item, kind) for item in r))
    index = next(i for i, item in enumerate(records) if isinstance(item, kind))
    assert missed(records, index) == []


@pytest.mark.parametrize("name", RANKS)
def test_what_a_field_cannot_hold_is_found_in_the_trace_of_a_rank_that_hears_of_no_request(
    name: str,
) -> None:
    records = recorded(name)
    assert list(check(records)) == []
    kinds = {type(item): index for index, item in reversed([*enumerate(records)])}
    assert len(kinds) > 8
    # How a decode ran is said in a rank's later steps as well; "mixed" is a prefill here.
    unknown = {("reason", "mixed")} | {("phase", phase) for phase in get_args(ev.Phase)}
    for kind, index in kinds.items():
        if kind is not Header:
            assert {(n, bad) for n, bad in missed(records, index) if bad != []} <= unknown, kind


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", ["example", "gpu-two-gpus"])
def test_what_the_header_cannot_hold_is_found_in_every_section(name: str, section: str) -> None:
    header, *events = recorded(name)
    values: dict[str, Any] = getattr(header, section)
    others: list[Any] = [-1, "", [], "x", 1e308, None, {"a": [1]}, True]
    for field, value in values.items():
        if value is None or ("TRACE_HEADER", field) in WORDS_OF_ANYBODY:
            continue
        for other in others:
            wrong: Any = msgspec.structs.replace(header, **{section: values | {field: other}})
            is_possible = f"{field}={other}" in POSSIBLE_IN_A_HEADER or other == value
            is_found = is_caught(Mutant("", "", [wrong, *events]))
            assert is_found or is_possible, (field, other)


def test_every_field_of_every_event_is_in_the_table() -> None:
    used: set[str] = set()
    names = [
        *(
            (f.name, tag)
            for tag, kind in RECORD_TYPES.items()
            for f in msgspec.structs.fields(kind)
        ),
        *((f.name, "config") for f in dataclasses.fields(Config)),
        *((f.name, "model") for f in dataclasses.fields(ModelConfig)),
        *((name, "clock") for name in ("unit", "source", "anchor_unix_ns")),
        *(("name", "engine"), ("version", "engine"), ("num_cpus", "environment")),
    ]
    free = {"architecture", "hidden_act", "rope_scaling"}
    for name, place in names:
        values = fields.values_of(name, place)
        assert callable(values) or values in {*INVARIANTS, fields.WORDS} or name in free, name
        used |= {name, f"{place}.{name}"}
    assert {*fields.FIELDS} - used == set()


@pytest.mark.parametrize("maker", ["SamplingParams", "Config"])
def test_the_ranges_are_those_that_the_engine_takes(maker: str) -> None:
    place, options = {
        "SamplingParams": ("REQUEST_ENQUEUE", dataclasses.fields(SamplingParams)),
        "Config": ("config", dataclasses.fields(Config)),
    }[maker]
    numbers = [*(sign * 2**e + d for e in (0, 1, 31, 64) for d in (-1, 0, 1) for sign in (-1, 1))]
    reals = [-0.5, 0.5, 1.0, 1.5, 1e6, 1e6 + 1, 7 * 24 * 3600.0, 7 * 24 * 3600.5]
    codes = ["", "x", *ATTENTION_BACKENDS, "cpu", "cuda", "float16", "float32", "bfloat16"]
    compared = 0
    for option in options:
        if option.name in {"model", "policy", "attention_reason"}:  # words, and what is found
            continue
        lists: list[Any] = [[""], ["x"], [-1], [2**31], [3], ["x", ""], [3, -1]]
        for value in (*numbers, *reals, *codes, True, *lists):
            if (option.name, value) in (("top_k", -1), ("top_k", 0), ("seed", -1)):
                continue  # vLLM's words for "off": they become None, and stand in no trace
            try:
                if maker == "Config":
                    Config.create("m", {option.name: value})
                else:
                    replace(SamplingParams(), **{option.name: value})
                is_taken = True
            except (TypeError, ValueError):
                is_taken = False
            told = [value] if option.name == "stop" and isinstance(value, str) else value
            values = fields.values_of(option.name, place)
            assert callable(values)
            assert (values(told) is None) == is_taken, (option.name, value)
            compared += is_taken
    assert compared > 50


def test_what_is_known_of_a_model_and_of_ranks_is_what_the_engine_knows() -> None:
    assert fields.TP_BACKENDS == BACKENDS
    for is_tied in (True, False):
        sizes: Any = {"hidden_size": 4, "head_dim": 4, "num_hidden_layers": 3}
        sizes |= {"intermediate_size": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = replace(FAKE_MODEL, tie_word_embeddings=is_tied, **sizes)
        with torch.device("meta"):
            made = Qwen3ForCausalLM(model, make_attention_backend("sdpa"))
        num_keys = len(find_destinations(made))
        facts = msgspec.convert(dataclasses.asdict(model), ModelFacts)
        assert facts.num_weights == (num_keys, model.num_parameters)


@pytest.mark.parametrize(
    ("name", "kind", "values", "invariant"),
    [
        ("example", ev.RequestEnqueue, {"top_k": -3}, "ranges"),
        ("example", ev.RequestEnqueue, {"top_k": 0}, "ranges"),
        ("example", ev.RequestEnqueue, {"logprobs": -2}, "ranges"),
        ("example", ev.RequestEnqueue, {"seed": -1}, "ranges"),
        ("example", ev.RequestEnqueue, {"seed": 2**64}, "ranges"),
        ("example", ev.RequestEnqueue, {"stop": [""]}, "ranges"),
        ("example", ev.RequestEnqueue, {"stop_token_ids": [5, -3]}, "ranges"),
        ("example", ev.RequestEnqueue, {"temperature": float("nan")}, "ranges"),
        ("example", ev.StepEnd, {"gpu_ns": 5}, "step_times"),
        ("gpu-example", ev.StepEnd, {"gpu_ns": 10**12}, "step_times"),
        ("two-ranks", ev.TpRuntimeInit, {"backend": "mpi"}, "ranges"),
        ("two-ranks", ev.TpRuntimeInit, {"backend": "nccl"}, "settings"),
        ("two-ranks", ev.TpRuntimeInit, {"device": "cpu:7"}, "settings"),
        ("gpu-two-gpus", ev.TpRuntimeInit, {"device": "cuda:1"}, "settings"),
        ("example", ev.EngineInit, {"attention_backend": "none"}, "ranges"),
        ("example", ev.EngineReady, {"eos_token_ids": [3072]}, "pool_size"),
        ("gpu-benchmark", ev.EngineReady, {"eos_token_ids": [151936]}, "pool_size"),
        ("example", ev.EngineReady, {"duration_ns": -1}, "ranges"),
        ("example", ev.EngineReady, {"duration_ns": 1}, "times"),
        ("example", ev.ModelWeightsLoaded, {"duration_ns": 10**12}, "times"),
        ("example", ev.ModelWeightsLoaded, {"num_keys": 67}, "settings"),
        ("example", ev.ModelWeightsLoaded, {"num_keys": 69}, "settings"),
        ("example", ev.ModelWeightsLoaded, {"num_bytes": 98378240}, "settings"),
        ("gpu-example", ev.KvBudgetEstimate, {"limit_bytes": 1}, "pool_size"),
        ("example", ev.KvBudgetEstimate, {"graph_pool_bytes": 1}, "pool_size"),
        ("example", ev.KvBudgetEstimate, {"rule": "given"}, "pool_size"),
        ("example", Footer, {"exit": "error"}, "exit"),
        ("example", Footer, {"exit": "interrupted"}, "exit"),
        ("example", Footer, {"error_type": "ValueError"}, "exit"),
        ("example", Header, {"rank": 1}, "settings"),
        ("example", Header, {"created": "yesterday"}, "settings"),
        ("example", Header, {"created": "2026-11-30T02:33:17.816813+00:00"}, "settings"),
        ("gpu-two-gpus", Header, {"world_size": 4}, "settings"),
    ],
)
def test_a_value_that_cannot_be_is_found_for_what_it_is(
    name: str, kind: type[Any], values: dict[str, Any], invariant: str
) -> None:
    assert invariant in {f.invariant for f in check(changed(recorded(name), kind, **values))}


@pytest.mark.parametrize("place", [0, 1])
def test_ok_is_not_said_of_a_run_that_ends_in_a_step_or_with_prompts_that_run(place: int) -> None:
    records = recorded("example")
    index = next(i for i, item in enumerate(records) if isinstance(item, ev.StepEnd)) + place
    footer = Footer(event_id=index, num_events=index - 1, exit="ok")
    [finding] = check([*records[:index], footer])
    assert (finding.invariant, finding.expected.name) == ("exit", "unfinished")
    assert list(check([*records[:index], msgspec.structs.replace(footer, exit="error")])) == []


def generate_and_raise(path: Path, error: type[BaseException]) -> None:
    with record(path, existing="replace") as recorder:
        make_engine(BUSY.settings, recorder).generate([[1, 2]], SamplingParams(temperature=0))
        raise error


def test_whoever_calls_step_may_stop_while_requests_run_and_fail_for_reasons_of_their_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    with record(path) as recorder:
        engine = make_engine(BUSY.settings, recorder)
        engine.generate([[1, 2]], SamplingParams(temperature=0))
        engine.add_request([1, 2, 1], SamplingParams(temperature=0, ignore_eos=True))
        engine.step()
    assert list(check(read_trace(path, warn=pytest.fail))) == []
    for error in (LookupError, KeyboardInterrupt):
        with pytest.raises(error):
            generate_and_raise(path, error)
        *records, footer = read_trace(path, warn=pytest.fail)
        assert isinstance(footer, Footer)
        assert footer.error_type == error.__name__
        assert list(check([*records, footer])) == []
        [finding] = check([*records, msgspec.structs.replace(footer, error_type=None)])
        assert finding.invariant == "exit"


# -- broken engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_of_an_exercise_is_found_and_the_engine_without_it_is_sound(
    fault: Fault, tmp_path: Path
) -> None:
    made, sound = tmp_path / "made.jsonl", tmp_path / "sound.jsonl"
    record_fault(fault, made)
    record_sound(fault.workload, sound)
    assert list(check(read_trace(sound, warn=pytest.fail))) == []
    found = list(check(read_trace(made, warn=pytest.fail)))
    assert found[0].invariant == fault.invariant
    shipped = EXERCISES / f"{fault.name}.jsonl.zst"
    assert list(check(read_trace(shipped, warn=pytest.fail))) == found, "make exercises anew"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_exercise_is_asked_and_solved(language: str) -> None:
    names = {fault.name for fault in FAULTS}
    assert {path.name.partition(".")[0] for path in EXERCISES.glob("*.zst")} == names
    asked, solved = (
        (DOCS / language / f"{page}.md").read_text("utf-8") for page in ("exercises", "solutions")
    )
    assert [name for name in names if name not in asked or name not in solved] == []
    assert [f.invariant for f in FAULTS if f"`{f.invariant}`" in asked] == []
    assert [f.invariant for f in FAULTS if f"`{f.invariant}`" not in solved] == []


# -- words -----------------------------------------------------------------------------------------


def names_of_facts() -> set[str]:
    """Every code that the rules name, by their source: Fact("code", ...), differ(..., "code")."""
    found: set[str] = set()
    for file in resources.files("nvtrace.check").iterdir():
        if not file.name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="Fact"), args=[ast.Constant(value=str(name)), *_]):
                    found.add(name)
                case ast.Call(func=ast.Name(id="differ"), args=[told, _, known, _]):
                    codes = [arg.value for arg in (told, known) if isinstance(arg, ast.Constant)]
                    found.update(map(str, codes))
    return found


def test_every_invariant_and_every_fact_has_its_words(catalog: Catalog) -> None:
    for name in INVARIANTS:
        title, teaches = catalog.invariant(name)
        assert title
        assert teaches.endswith((".", "。"))
    fields = {f.name for kind in RECORD_TYPES.values() for f in msgspec.structs.fields(kind)}
    own_names = {*fields, *(f"len({name})" for name in fields)}
    named = names_of_facts()
    assert len(named) > 80
    assert [n for n in named if catalog.fact(n) == n and n not in {*own_names, "event"}] == []


def test_no_invariant_and_no_fact_is_left_over(catalog: Catalog) -> None:
    assert set(catalog._check["invariants"]) == set(INVARIANTS)
    assert set(catalog._check["facts"]) - names_of_facts() == set()


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.jsonl"
    path.write_bytes(Recording(BUSY).data)
    return path


@pytest.fixture
def unsound(tmp_path: Path) -> Path:
    records: Any = changed(Recording(BUSY).records, ev.SchedulePrefill, free_blocks=7)
    return write_records(tmp_path / "unsound.jsonl", records)


def test_a_sound_trace_ends_with_0_and_one_line(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "check", sound, "--lang", "en")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith(f"{len(INVARIANTS)} invariants: no findings\n")
    assert call(capsys, "check", sound, "--json").out == ""


def test_an_unsound_trace_ends_with_1_and_says_what_disagrees_and_what_it_teaches(
    unsound: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = call(capsys, "check", unsound, "--lang", "en")
    assert outcome.code == 1
    assert "free_blocks is 7, but the free list is 5" in outcome.out
    assert "SCHEDULE_PREFILL: no block is lost and none is created" in outcome.out
    assert "a leak shows as" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "空闲链表" in call(capsys, "check", unsound, "--lang", "zh").out


def test_json_is_one_object_a_finding_and_plain_one_line(
    unsound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "check", unsound, "--json", "--lang", "en")
    [found] = map(json.loads, outcome.out.splitlines())
    assert outcome.code == 1
    assert (found["invariant"], found["event"], found["step"]) == (
        "conservation",
        "SCHEDULE_PREFILL",
        1,
    )
    assert [fact["value"] for fact in found["facts"]] == [7, 5]
    plain = call(capsys, "check", unsound, "--plain")
    header, row = (line.split("\t") for line in plain.out.splitlines())
    assert len(header) == len(row) == 8
    assert row[4:] == ["free_blocks", "7", "free_pages", "5"]
    assert call(capsys, "check", unsound, "--json", "--plain").code == 2


def test_ten_findings_are_shown_and_all_of_them_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = EXERCISES / "02-the-longer-it-runs-the-fewer-fit.jsonl.zst"
    few = call(capsys, "check", many, "--lang", "en")
    every = call(capsys, "check", many, "--lang", "en", "--all")
    number = len(call(capsys, "check", many, "--json").out.splitlines())
    assert f"{number - 10} more" in few.out
    assert "more;" not in every.out
    assert few.out.count(", event ") == 10
    assert every.out.count(", event ") == number


def test_a_trace_that_cannot_be_read_ends_with_3_and_a_newer_one_with_4(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "check", tmp_path / "none.jsonl").code == 3
    newer = tmp_path / "newer.jsonl"
    newer.write_bytes(sound.read_bytes().replace(b'"version":[1,0]', b'"version":[2,0]'))
    assert call(capsys, "check", newer).code == 4


def test_every_fact_of_every_finding_can_be_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sources: list[list[Record]]
) -> None:
    _, missed = caught_by_kind(sources, per_kind=1)
    assert len(missed) < len(ev.EVENT_TYPES)
    for fault in FAULTS:
        path = EXERCISES / f"{fault.name}.jsonl.zst"
        lines = call(capsys, "check", path, "--json").out.splitlines()
        assert all(len(json.loads(line)["facts"]) == 2 for line in lines)
    strange: Any = changed(Recording(BUSY).records, ev.RequestAbort, seq_id=99)
    outcome = call(capsys, "check", write_records(tmp_path / "strange.jsonl", strange), "--json")
    assert outcome.code == 1
    assert json.loads(outcome.out.splitlines()[0])["invariant"] == "names"


# -- a run under way -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle.create(tmp_path_factory.mktemp("model"), {"eos_token_id": 127})
    save_tokenizer(oracle.folder)
    return oracle


def checked_run(oracle: Oracle, out: Path) -> list[str | Path]:
    asked = ("--prompt", "w5 w6 w7", "--prompt", "w8", "--temperature", "0", "--max-tokens", "4")
    return ["run", "example", "--model", oracle.folder, *asked, "--out", out, "--check", "-q"]


def test_a_sound_run_is_checked_in_silence(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    outcome = call(capsys, *checked_run(oracle, trace))
    assert (outcome.code, outcome.err) == (0, "")
    assert list(check(read_trace(trace, warn=pytest.fail))) == []


def test_a_finding_of_a_run_under_way_is_a_loud_line_and_its_end_is_1(
    oracle: Oracle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_from_the_tail(self: BlockManager, num_blocks: int) -> list[int]:
        block_ids = [self.free_blocks.popitem()[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    monkeypatch.setattr(BlockManager, "_take_blocks", take_from_the_tail)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    outcome = call(capsys, *checked_run(oracle, tmp_path / "trace.jsonl"))
    assert outcome.code == 1
    assert outcome.out
    first, *_, last = outcome.err.splitlines()
    assert first.startswith("nvtrace: CHECK: step 1, event ")
    assert "but the free list's head is [0]" in first
    assert "trace.jsonl shows them" in last


def test_a_run_with_hundreds_of_findings_says_the_first_twenty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch = Watch(load_catalog("en"), is_on=True)
    events: Any = [item for item in Recording(BUSY).records if isinstance(item, ev.Event)]
    heard: list[int] = []
    tap = watch.beside(lambda batch: heard.append(len(batch)))
    tap([msgspec.structs.replace(event, phase="egress") for event in events])
    assert heard == [len(events)]
    assert capsys.readouterr().err.count("CHECK") == 20


def test_a_recorder_gives_its_tap_what_the_check_needs(tmp_path: Path) -> None:
    checker = Checker()
    found: list[Finding] = []

    def tap(events: list[ev.Event]) -> None:
        for event in events:
            found.extend(checker.take(event))  # type: ignore[arg-type]  # it has no others

    with record(tmp_path / "trace.jsonl", tap=tap) as recorder:
        Run(BUSY, recorder).go()
    assert found == []
    assert checker.num_events > 100
