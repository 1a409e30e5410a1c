"""Rules for a step: its batch, budget, layout, slots, run, sums and times."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.check.finding import Conflict, Fact, Rule, differ
from nvtrace.check.ledger import PHASES, POLICIES
from nvtrace.check.queues import in_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.check.ledger import Ledger, StepNotes

    Lengths = ev.SchedulePrefill | ev.ScheduleMixed

# -- schedule --------------------------------------------------------------------------------------


def _batch(ledger: Ledger, event: ev.Schedule) -> Iterator[Conflict]:
    """Decodes in the running queue's order, then prompts; only the budget leaves requests out."""
    if ledger.init is None or ledger.step is None:
        return
    policy = ledger.init.policy
    by_event = {ev.SchedulePrefill: "prefill", ev.ScheduleDecode: "decode"}
    kind = policy if policy in POLICIES else by_event.get(type(event), "mixed")
    expected = ledger.batch(ledger.state.running, kind)
    yield from differ("seq_ids", event.seq_ids, "running_in_order", [*expected])
    yield from differ("scheduled", event.scheduled, "num_seq_ids", len(event.seq_ids))
    phase = _phase_of(ledger, event.seq_ids)
    recorded = {ev.SchedulePrefill: "prefill", ev.ScheduleDecode: "decode"}.get(
        type(event), "mixed"
    )
    yield from differ("event", recorded, "phase_by_requests", phase)
    yield from differ("engine_step", event.engine_step, "step_under_way", ledger.step.index)
    budget = ledger.init.max_num_batched_tokens
    yield from differ("token_budget", event.token_budget, "max_num_batched_tokens", budget)


def _phase_of(ledger: Ledger, seq_ids: list[int]) -> str:
    kinds = {ledger.is_prefilling(seq_id) for seq_id in seq_ids}
    return "mixed" if len(kinds) > 1 else "prefill" if True in kinds else "decode"


def _reason(ledger: Ledger, event: ev.SchedulePrefill | ev.ScheduleDecode) -> Iterator[Conflict]:
    if isinstance(event, ev.SchedulePrefill):
        first = ledger.seq(event.seq_ids[0])
        is_chunk = first.num_computed_tokens > first.num_cached_tokens
        expected = "chunk_continues" if is_chunk else "waiting_admissible"
    else:
        policy = ledger.init.policy if ledger.init else ""
        others = {"mixed": "decodes_first", "static": "static_batch"}
        expected = others.get(policy, "no_prefill_admissible")
    yield from differ("reason", event.reason, "reason_by_state", expected)


def _decode_index(ledger: Ledger, event: ev.ScheduleDecode) -> Iterator[Conflict]:
    expected = ledger.total.steps["decode"]
    yield from differ("decode_step_index", event.decode_step_index, "decode_steps_before", expected)


def _budget(ledger: Ledger, event: ev.Schedule) -> Iterator[Conflict]:
    num_tokens = event.scheduled
    if not isinstance(event, ev.ScheduleDecode):
        num_tokens = sum(event.num_scheduled_tokens)
        yield from differ("num_batched_tokens", event.num_batched_tokens, "sum", num_tokens)
    most = ledger.init.max_num_batched_tokens if ledger.init else num_tokens
    if num_tokens > most:
        yield Conflict(Fact("num_batched_tokens", num_tokens), Fact("max_num_batched_tokens", most))


def _covered_once(ledger: Ledger, event: Lengths) -> Iterator[Conflict]:
    """Each prompt continues where it stopped: no token twice, none left out."""
    for seq_id, computed, cached in zip(
        event.seq_ids, event.num_computed_tokens, event.num_cached_tokens, strict=True
    ):
        seq = ledger.seq(seq_id)
        yield from differ(
            "num_computed_tokens",
            [seq_id, computed],
            "num_computed",
            [seq_id, seq.num_computed_tokens],
        )
        yield from differ(
            "num_cached_tokens", [seq_id, cached], "num_cached", [seq_id, seq.num_cached_tokens]
        )
    policy = ledger.init.policy if ledger.init else ""
    kind = "mixed" if policy == "mixed" or isinstance(event, ev.ScheduleMixed) else "prefill"
    expected = ledger.batch(ledger.state.running, kind)
    recorded = dict(zip(event.seq_ids, event.num_scheduled_tokens, strict=True))
    yield from differ("num_scheduled_tokens", recorded, "to_compute_within_budget", expected)


def _kinds(ledger: Ledger, event: ev.ScheduleMixed) -> Iterator[Conflict]:
    num_prefills = sum(map(ledger.is_prefilling, event.seq_ids))
    num_decodes = len(event.seq_ids) - num_prefills
    yield from differ("num_prefills", event.num_prefills, "num_prefilling", num_prefills)
    yield from differ("num_decodes", event.num_decodes, "num_decoding", num_decodes)


# -- layout ----------------------------------------------------------------------------------------


def _spans(step: StepNotes) -> dict[int, tuple[int, int]]:
    """seq_id -> the [start, stop) of positions that it computes in this step."""
    return {s: (start, start + step.num_scheduled[s]) for s, start in step.num_computed.items()}


def _flat_layout(ledger: Ledger, event: ev.PreparePrefillTensors) -> Iterator[Conflict]:
    if ledger.step is not None and ledger.step.num_scheduled:
        yield from flat_layout(event, [*_spans(ledger.step).values()])


def flat_layout(
    event: ev.PreparePrefillTensors, spans: list[tuple[int, int]]
) -> Iterator[Conflict]:
    """The tensors are those of sequences that compute these [start, stop) positions."""
    lengths = [stop - start for start, stop in spans]
    contexts = [stop for _, stop in spans]
    has_context = any(start for start, _ in spans)
    ranges = [(start, stop - 1) for start, stop in spans]
    for field, expected in (
        ("flat_tokens", sum(lengths)),
        ("n_seqs", len(spans)),
        ("max_seqlen_q", max(lengths)),
        ("max_seqlen_k", max(contexts)),
        ("has_block_tables", has_context),
        ("cu_seqlens_q", [*accumulate(lengths, initial=0)]),
        ("cu_seqlens_k", [*accumulate(contexts, initial=0)]),
        ("position_ranges", ranges),
    ):
        yield from differ(field, getattr(event, field), "layout_of_batch", expected)


def _decode_layout(ledger: Ledger, event: ev.PrepareDecodeTensors) -> Iterator[Conflict]:
    if ledger.step is None or not ledger.step.num_computed:
        return
    num_computed = ledger.step.num_computed
    width = max(len(ledger.seq(seq_id).block_table) for seq_id in num_computed)
    batch_size = len(num_computed)
    shape = (batch_size, width)
    yield from differ("batch_size", event.batch_size, "layout_of_batch", batch_size)
    context_lens = [start + 1 for start in num_computed.values()]
    yield from differ("context_lens", event.context_lens, "layout_of_batch", context_lens)
    yield from differ("block_tables_shape", event.block_tables_shape, "layout_of_batch", shape)


def _prefill_slots(ledger: Ledger, event: ev.PreparePrefillTensors) -> Iterator[Conflict]:
    """Each token's K and V go to its slot in its own block; one range for each block."""
    if ledger.step is None:
        return
    size = ledger.state.block_size
    expected: list[tuple[int, int]] = []
    for seq_id, (start, stop) in _spans(ledger.step).items():
        position = start
        while position < stop:
            last = min(stop, (position // size + 1) * size) - 1
            expected.append((ledger.slot(seq_id, position), ledger.slot(seq_id, last)))
            position = last + 1
    yield from differ("slot_ranges", event.slot_ranges, "slots_by_table", expected)


def _decode_slots(ledger: Ledger, event: ev.PrepareDecodeTensors) -> Iterator[Conflict]:
    if ledger.step is None:
        return
    expected = [ledger.slot(seq_id, start) for seq_id, start in ledger.step.num_computed.items()]
    yield from differ("slot_mapping", event.slot_mapping, "slots_by_table", expected)
    if len(set(event.slot_mapping)) < len(event.slot_mapping):
        once = sorted(set(event.slot_mapping))
        yield Conflict(Fact("slot_mapping", event.slot_mapping), Fact("each_once", once))


# -- run -------------------------------------------------------------------------------------------


def _eager(ledger: Ledger, event: ev.RunEager) -> Iterator[Conflict]:
    if ledger.step is None:
        return
    step = ledger.step
    num_tokens = sum(step.num_scheduled.values())
    yield from differ("num_tokens", event.num_tokens, "sum", num_tokens)
    expected: str = event.reason
    if step.phase != "decode":
        expected = step.phase
    elif ledger.skip is not None:
        expected = ledger.skip.reason
    elif ledger.graphs is not None:
        is_beyond = len(step.num_scheduled) > max(ledger.graphs, default=0)
        expected = "batch_beyond_graphs" if is_beyond else "CUDAGRAPH_REPLAY"
    elif event.reason in {"prefill", "mixed"}:
        expected = step.phase
    yield from differ("reason", event.reason, "reason_by_state", expected)


def _smallest(ledger: Ledger, event: ev.CudagraphReplay) -> Iterator[Conflict]:
    if ledger.step is None:
        return
    batch_size = len(ledger.step.num_scheduled)
    yield from differ("batch_size", event.batch_size, "layout_of_batch", batch_size)
    rest = event.graph_batch_size - event.batch_size
    yield from differ("padding", event.padding, "rows_left_over", rest)
    if ledger.step.phase != "decode":
        yield Conflict(Fact("event", ev.tag_of(event)), Fact("phase_of_step", ledger.step.phase))
    if ledger.graphs is not None and not event.is_ahead:
        fit = [size for size in ledger.graphs if size >= batch_size]
        expected = min(fit, default=None)
        yield from differ("graph_batch_size", event.graph_batch_size, "smallest_graph", expected)
    elif ledger.skip is not None:
        yield Conflict(Fact("event", ev.tag_of(event)), Fact("no_graphs", ledger.skip.reason))


def _ahead(ledger: Ledger, event: ev.CudagraphReplay) -> Iterator[Conflict]:
    """A step that was run ahead has the batch of the step before, without the ended requests.

    It has the same graph: rows of requests that ended are padding.
    """
    step, before = ledger.step, ledger.step_before
    if not event.is_ahead or step is None:
        return
    batch = [*step.num_scheduled]
    if before is None or not isinstance(before.schedule, ev.ScheduleDecode):
        yield Conflict(Fact("is_ahead", value=True), Fact("step_before", None))
        return
    expected = [
        seq_id
        for seq_id in before.num_scheduled
        if seq_id not in before.finished and seq_id in ledger.requests
    ]
    yield from differ("is_ahead", batch, "step_before", expected)
    run = before.run
    if ledger.graphs is not None and isinstance(run, ev.CudagraphReplay):
        yield from differ(
            "graph_batch_size", event.graph_batch_size, "graph_before", run.graph_batch_size
        )
    elif ledger.graphs is not None:
        yield Conflict(Fact("is_ahead", value=True), Fact("graph_before", None))


def _sampled(ledger: Ledger, event: ev.SampleTokens) -> Iterator[Conflict]:
    """One token for each request whose last token was computed, at its own temperature."""
    if ledger.step is None:
        return
    yield from differ("seq_ids", event.seq_ids, "wholly_computed", ledger.step.sampled)
    expected = [ledger.requests[seq_id].temperature for seq_id in event.seq_ids]
    yield from differ("temperatures", event.temperatures, "asked_temperatures", expected)
    yield from in_vocabulary(ledger, "token_ids", event.token_ids)


# -- sums ------------------------------------------------------------------------------------------


def _totals(ledger: Ledger, event: ev.StepEnd) -> Iterator[Conflict]:
    if ledger.step is None:
        return
    step = ledger.step
    num_seqs, num_tokens = len(step.num_scheduled), sum(step.num_scheduled.values())
    yield from differ("batch_phase", event.batch_phase, "phase_of_step", step.phase)
    yield from differ("num_seqs", event.num_seqs, "layout_of_batch", num_seqs)
    yield from differ("num_batched_tokens", event.num_batched_tokens, "sum", num_tokens)
    total_len = sum(len(ledger.seq(seq_id).token_ids) for seq_id in step.num_scheduled)
    expected = -num_seqs if step.phase == "decode" else total_len
    yield from differ("num_tokens_stat", event.num_tokens_stat, "lengths_or_batch", expected)


def _parts_of_time(_ledger: Ledger, event: ev.StepEnd) -> Iterator[Conflict]:
    """The parts of a step's time add up to the whole."""
    parts = [event.schedule_ns, event.prepare_ns, event.forward_ns]
    parts += [event.sample_ns, event.postprocess_ns]
    yield from differ("wall_ns", event.wall_ns, "sum_of_parts", sum(parts))


def _gpu_time(ledger: Ledger, event: ev.StepEnd) -> Iterator[Conflict]:
    """Only a GPU has GPU time; its work began in the step before at the earliest."""
    if event.gpu_ns is None or ledger.step is None or ledger.init is None:
        return
    if ledger.init.device == "cpu":
        yield Conflict(Fact("gpu_ns", event.gpu_ns), Fact("engine_device", ledger.init.device))
    most = event.ts_ns - (ledger.step_before or ledger.step).first.ts_ns
    if event.gpu_ns > most:
        yield Conflict(Fact("gpu_ns", event.gpu_ns), Fact("time_between_events", most))


def _times_between(ledger: Ledger, event: ev.StepEnd) -> Iterator[Conflict]:
    """Each part is the time between two of the step's events."""
    step = ledger.step
    if step is None or step.schedule is None or step.prepare is None or step.run is None:
        return
    schedule, prepare, run = step.schedule.ts_ns, step.prepare.ts_ns, step.run.ts_ns
    sample = step.sample.ts_ns if step.sample else run
    for field, expected in (
        ("prepare_ns", prepare - schedule),
        ("forward_ns", run - prepare),
        ("sample_ns", sample - run),
    ):
        yield from differ(field, getattr(event, field), "time_between_events", expected)
    # A step begins and ends between two events: its STEP_END is recorded after it.
    last = ledger.last.ts_ns if ledger.last else sample
    for field, least, most in (
        ("schedule_ns", schedule - step.first.ts_ns, schedule - step.before_ns),
        ("postprocess_ns", last - sample, event.ts_ns - sample),
    ):
        recorded = getattr(event, field)
        if not least <= recorded <= most:
            yield Conflict(Fact(field, recorded), Fact("time_from_to", [least, most]))


def _call(ledger: Ledger, event: ev.GenerateFinish) -> Iterator[Conflict]:
    """The steps of a call, by phase; one output for each prompt; no request is left."""
    call = ledger.call
    if call is None:
        yield Conflict(Fact("event", ev.tag_of(event)), Fact("must_precede", ["GENERATE_START"]))
        return
    for phase in PHASES:
        field = f"{phase}_steps"
        yield from differ(field, getattr(event, field), "steps_of_call", call.steps[phase])
    yield from differ("total_steps", event.total_steps, "sum", sum(call.steps.values()))
    # A refused prompt has an output too; a request refused while others run has none.
    num_outputs = call.num_outputs + call.num_refused_prompts
    yield from differ("n_outputs", event.n_outputs, "num_outputs", num_outputs)
    unfinished = [*ledger.state.waiting, *ledger.state.running]
    if unfinished:
        yield Conflict(Fact("reason", event.reason), Fact("unfinished", unfinished))


def _prompts(ledger: Ledger, _event: ev.Event) -> Iterator[Conflict]:
    """A call queues (or refuses) each of its prompts, before its first step."""
    call = ledger.call
    if call is None or ledger.is_reset or any(call.steps.values()):
        return
    expected = call.num_enqueued + call.num_refused
    if expected < call.num_prompts or (expected > call.num_prompts and not call.num_refused):
        yield Conflict(Fact("n_prompts", call.num_prompts), Fact("num_queued_or_refused", expected))


def _not_within(ledger: Ledger, event: ev.GenerateStart) -> Iterator[Conflict]:
    unfinished = [*ledger.state.waiting, *ledger.state.running]
    if unfinished:
        yield Conflict(Fact("event", ev.tag_of(event)), Fact("unfinished", unfinished))


RULES = (
    Rule("batch", "after", ev.SCHEDULES, _batch),
    Rule("batch", "before", (ev.SchedulePrefill, ev.ScheduleDecode), _reason),
    Rule("batch", "before", (ev.ScheduleMixed,), _kinds),
    Rule("sums", "before", (ev.ScheduleDecode,), _decode_index),
    Rule("budgets", "before", ev.SCHEDULES, _budget),
    Rule("covered_once", "before", (ev.SchedulePrefill, ev.ScheduleMixed), _covered_once),
    Rule("layout", "before", (ev.PreparePrefillTensors,), _flat_layout),
    Rule("layout", "before", (ev.PrepareDecodeTensors,), _decode_layout),
    Rule("slots", "before", (ev.PreparePrefillTensors,), _prefill_slots),
    Rule("slots", "before", (ev.PrepareDecodeTensors,), _decode_slots),
    Rule("graph_size", "before", (ev.RunEager,), _eager),
    Rule("graph_size", "before", (ev.CudagraphReplay,), _smallest),
    Rule("graph_size", "before", (ev.CudagraphReplay,), _ahead),
    Rule("sampled", "before", (ev.SampleTokens,), _sampled),
    Rule("sums", "before", (ev.StepEnd,), _totals),
    Rule("step_times", "before", (ev.StepEnd,), _parts_of_time),
    Rule("step_times", "before", (ev.StepEnd,), _times_between),
    Rule("step_times", "before", (ev.StepEnd,), _gpu_time),
    Rule("sums", "before", (ev.GenerateFinish,), _call),
    Rule("sums", "before", (*ev.SCHEDULES, ev.GenerateStart, ev.GenerateFinish), _prompts),
    Rule("sums", "before", (ev.GenerateStart,), _not_within),
)
