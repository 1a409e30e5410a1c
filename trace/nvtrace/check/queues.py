"""Rules for requests: arrival, statuses, limits, the order of the two queues, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.check.finding import Conflict, Fact, Rule, differ
from nvtrace.check.ledger import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.check.ledger import Ledger

_LEGAL = {
    "admitted": [("WAITING", "RUNNING")],
    "preempted": [("RUNNING", "WAITING")],
    "aborted": [("WAITING", "FINISHED"), ("RUNNING", "FINISHED")],
    "eos": [("RUNNING", "FINISHED")],
    "stop_token": [("RUNNING", "FINISHED")],
    "stop_string": [("RUNNING", "FINISHED")],
    "max_tokens": [("RUNNING", "FINISHED")],
    "max_model_len": [("RUNNING", "FINISHED")],
}


# -- arrival ---------------------------------------------------------------------------------------


def _arrival(ledger: Ledger, event: ev.RequestEnqueue) -> Iterator[Conflict]:
    num_tokens = len(event.prompt_token_ids)
    yield from differ("prompt_len", event.prompt_len, "num_prompt_token_ids", num_tokens)
    if event.seq_id < ledger.next_seq_id or (
        event.seq_id > ledger.next_seq_id and not ledger.is_reset
    ):
        yield Conflict(Fact("seq_id", event.seq_id), Fact("next_seq_id", ledger.next_seq_id))
    yield from in_vocabulary(ledger, "prompt_token_ids", event.prompt_token_ids)
    init = ledger.init
    if init is not None and ledger.ready is not None:
        if num_tokens >= init.max_model_len:
            yield Conflict(
                Fact("prompt_len", num_tokens), Fact("max_model_len", init.max_model_len)
            )
        need = ledger.blocks_for(min(num_tokens + event.max_tokens, init.max_model_len) - 1)
        if need > ledger.state.num_blocks:
            yield Conflict(Fact("pages_at_most", need), Fact("num_blocks", ledger.state.num_blocks))


def in_vocabulary(ledger: Ledger, field: str, token_ids: list[int]) -> Iterator[Conflict]:
    """Each token is in the model's vocabulary."""
    most = ledger.header.model.get("vocab_size", 2**32) if ledger.header else 2**32
    outside = [token_id for token_id in token_ids if not 0 <= token_id < most]
    if outside:
        yield Conflict(Fact(field, outside[0]), Fact("vocab_size", most))


def _refusal(ledger: Ledger, event: ev.RequestRefused) -> Iterator[Conflict]:
    init = ledger.init
    if init is None:
        return
    if event.need <= event.have:
        yield Conflict(Fact("need", event.need), Fact("have", event.have))
    if event.reason == "prompt_too_long":
        yield from differ("need", event.need, "prompt_and_one", event.prompt_len + 1)
        yield from differ("have", event.have, "max_model_len", init.max_model_len)
        return
    yield from differ("have", event.have, "num_blocks", ledger.state.num_blocks)
    least = ledger.blocks_for(event.prompt_len)
    most = ledger.blocks_for(init.max_model_len - 1)
    if not least <= event.need <= most:
        yield Conflict(Fact("need", event.need), Fact("pages_from_to", [least, most]))
    if event.prompt_len >= init.max_model_len:
        yield Conflict(
            Fact("prompt_len", event.prompt_len), Fact("max_model_len", init.max_model_len)
        )


# -- queues ----------------------------------------------------------------------------------------


def _waiting_len(ledger: Ledger, event: ev.RequestEnqueue | ev.StepEnd) -> Iterator[Conflict]:
    waiting, running = len(ledger.state.waiting), len(ledger.state.running)
    yield from differ("waiting_len", event.waiting_len, "waiting_queue", waiting)
    if not isinstance(event, ev.RequestEnqueue | ev.AdmissionStop):
        yield from differ("running_len", event.running_len, "running_queue", running)


def _one_queue(ledger: Ledger, event: ev.RequestEnqueue | ev.StateTransition) -> Iterator[Conflict]:
    """A request is once in the queue of its status, and not in the other."""
    waiting = ledger.state.waiting.count(event.seq_id)
    running = ledger.state.running.count(event.seq_id)
    status = "WAITING" if isinstance(event, ev.RequestEnqueue) else event.status
    expected = [int(status == "WAITING"), int(status == "RUNNING")]
    yield from differ("status", [waiting, running], "places_by_status", expected)


def _legal(ledger: Ledger, event: ev.StateTransition) -> Iterator[Conflict]:
    move, seq = (event.previous, event.status), ledger.seq(event.seq_id)
    if move not in _LEGAL[event.reason]:
        yield Conflict(Fact("status", [*move]), Fact("legal_for_reason", _LEGAL[event.reason]))
    yield from differ("previous", event.previous, "status_before", seq.status)
    last, expected = ledger.last, None
    match last:
        case ev.BlocksAllocate():
            expected = (last.seq_ids[-1], event.reason == "admitted")
        case ev.Preempt():
            expected = (last.seq_id, event.reason == "preempted")
        case ev.RequestAbort():
            expected = (last.seq_id, event.reason == "aborted")
        case ev.BlocksRelease(step=None):
            expected = (last.seq_ids[-1], event.reason == "aborted")
        case ev.BlocksRelease():
            expected = (last.seq_ids[-1], event.reason not in {"admitted", "preempted", "aborted"})
    if expected is not None:
        yield from differ("seq_id", event.seq_id, "event_before", expected[0])
        if not expected[1] and last is not None:
            yield Conflict(Fact("reason", event.reason), Fact("event_before", ev.tag_of(last)))
    if event.status != "RUNNING" and seq.block_table:
        yield Conflict(Fact("status", event.status), Fact("table", [*seq.block_table]))


def _transition_facts(ledger: Ledger, event: ev.StateTransition) -> Iterator[Conflict]:
    seq = ledger.seq(event.seq_id)
    num_tokens = seq.num_completion_tokens
    yield from differ(
        "num_completion_tokens", event.num_completion_tokens, "num_sampled", num_tokens
    )
    yield from differ("max_tokens", event.max_tokens, "asked_max_tokens", seq.max_tokens)
    token_id = seq.token_ids[-1] if num_tokens else None
    yield from differ("token_id", event.token_id, "last_sampled", token_id)


def _abort_facts(ledger: Ledger, event: ev.RequestAbort) -> Iterator[Conflict]:
    seq = ledger.seq(event.seq_id)
    expected = seq.num_completion_tokens
    yield from differ("num_completion_tokens", event.num_completion_tokens, "num_sampled", expected)
    if seq.status == "FINISHED":
        yield Conflict(Fact("seq_id", event.seq_id), Fact("status_before", seq.status))


def _of_abort(ledger: Ledger, event: ev.BlocksRelease) -> Iterator[Conflict]:
    if isinstance(ledger.last, ev.RequestAbort):
        yield from differ("seq_ids", event.seq_ids, "event_before", [ledger.last.seq_id])


# -- admission and preemption ----------------------------------------------------------------------


def _head_first(ledger: Ledger, event: ev.StateTransition) -> Iterator[Conflict]:
    if event.reason == "admitted":
        yield from differ("seq_id", event.seq_id, "waiting_head", ledger.state.waiting[0])


def _admitted(ledger: Ledger, event: ev.StateTransition) -> Iterator[Conflict]:
    """There was room for it, and budget for its tokens, unless it may compute a chunk."""
    if event.reason != "admitted" or ledger.init is None:
        return
    seq, running = ledger.seq(event.seq_id), ledger.state.running
    if len(running) >= ledger.init.max_num_seqs:
        most = ledger.init.max_num_seqs
        yield Conflict(Fact("running_queue", len(running) + 1), Fact("max_num_seqs", most))
    if ledger.init.policy not in POLICIES:
        return  # another policy has its own rules for that
    need = len(seq.token_ids) - seq.num_computed_tokens
    left, may_cut = _budget(ledger)
    if need > left and not may_cut:
        yield Conflict(Fact("tokens_needed", need), Fact("budget_left", left))


def _budget(ledger: Ledger) -> tuple[int, bool]:
    """The step's tokens that are left for the next prompt, and whether it may be cut."""
    if ledger.init is None:
        return 0, False
    is_mixed = ledger.init.policy == "mixed"
    batch = ledger.batch(ledger.state.running, "mixed" if is_mixed else "prefill")
    left = ledger.init.max_num_batched_tokens - sum(batch.values())
    is_first = not any(map(ledger.is_prefilling, batch))
    return left, left > 0 and (is_mixed or is_first)


def _stop(ledger: Ledger, event: ev.AdmissionStop) -> Iterator[Conflict]:
    """The waiting queue's head is stopped by the first limit that it does not fit in."""
    yield from differ("seq_id", event.seq_id, "waiting_head", ledger.state.waiting[0])
    if ledger.step is not None and ledger.step.stop is not None:
        yield Conflict(
            Fact("event", ev.tag_of(event)), Fact("already_stopped", ledger.step.stop.seq_id)
        )
    is_of_every_policy = event.reason in {"max_num_seqs", "no_blocks"}
    if not is_of_every_policy and ledger.init is not None and ledger.init.policy not in POLICIES:
        return
    expected = _limit(ledger, ledger.state.waiting[0])
    recorded = (event.reason, event.need, event.have)
    yield from differ("reason_need_have", recorded, "limit_met", expected)


def _limit(ledger: Ledger, seq_id: int) -> tuple[str, int, int] | None:
    """Why a waiting request cannot be admitted, what it needs, what there is; None if it can."""
    init, state = ledger.init, ledger.state
    if init is None:
        return None
    num_running = len(state.running)
    has_admitted = ledger.step is not None and bool(ledger.step.admitted)
    if init.policy == "static" and num_running and not has_admitted:
        return "static_batch", num_running, 0
    if num_running >= init.max_num_seqs:
        return "max_num_seqs", num_running + 1, init.max_num_seqs
    num_tokens = len(ledger.seq(seq_id).token_ids)
    prefix = ledger.cached_prefix(seq_id)
    need = ledger.blocks_for(num_tokens) - sum(state.ref_counts[block] > 0 for block in prefix)
    if need > len(state.free_blocks):
        return "no_blocks", need, len(state.free_blocks)
    need = num_tokens - len(prefix) * state.block_size
    left, may_cut = _budget(ledger)
    if need > left and not may_cut:
        fits_a_step = init.policy == "mixed" or need <= init.max_num_batched_tokens
        return "token_budget" if fits_a_step else "chunk_not_first", need, left
    return None


def _stop_recorded(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    """There is an ADMISSION_STOP if requests wait that were not preempted in this step."""
    step, init = ledger.step, ledger.init
    if step is None or init is None:
        return
    comes_back = init.policy == "mixed"  # it may admit a preempted request again in the same step
    waiting = [s for s in ledger.state.waiting if comes_back or s not in step.preempted]
    if waiting and step.stop is None:
        yield Conflict(Fact("event", ev.tag_of(event)), Fact("nobody_asked", waiting))


def _youngest(ledger: Ledger, event: ev.Preempt) -> Iterator[Conflict]:
    yield from differ("seq_id", event.seq_id, "running_tail", ledger.state.running[-1])
    seq_id, num_computed, num_freed = ledger.released
    yield from differ("seq_id", event.seq_id, "event_before", seq_id)
    yield from differ("num_blocks_freed", event.num_blocks_freed, "pages_freed", num_freed)
    yield from differ(
        "num_tokens_to_recompute", event.num_tokens_to_recompute, "num_computed", num_computed
    )
    in_need = (
        other
        for other in ledger.state.running[:-1]
        if not ledger.is_prefilling(other) and ledger.needs_block(other)
    )
    expected = next(in_need, ledger.state.running[-1])
    yield from differ("for_seq_id", event.for_seq_id, "in_need_of_page", expected)


def _last_resort(ledger: Ledger, event: ev.BlocksRelease) -> Iterator[Conflict]:
    """No request is preempted while there are free blocks."""
    is_preemption = ledger.step is not None and ledger.step.schedule is None
    num_free = len(ledger.state.free_blocks)
    if is_preemption and event.step is not None and num_free:
        yield Conflict(Fact("seq_ids", event.seq_ids), Fact("free_pages", num_free))


# -- ends ------------------------------------------------------------------------------------------


def _reason_to_end(ledger: Ledger, seq_id: int) -> str | None:
    """Why a request ends with its last token, as far as a trace can show."""
    request, seq = ledger.requests[seq_id], ledger.seq(seq_id)
    token_id = seq.token_ids[-1]
    eos_token_ids = ledger.ready.eos_token_ids if ledger.ready else []
    if token_id in eos_token_ids and not request.ignore_eos:
        return "eos"
    if token_id in (request.stop_token_ids or ()):
        return "stop_token"
    if seq.num_completion_tokens >= request.max_tokens:
        return "max_tokens"
    if ledger.init is not None and len(seq.token_ids) >= ledger.init.max_model_len:
        return "max_model_len"
    return None


def _end(ledger: Ledger, event: ev.StateTransition) -> Iterator[Conflict]:
    if event.status != "FINISHED" or event.reason == "aborted":
        return
    if event.reason == "stop_string":
        if not ledger.requests[event.seq_id].stop:
            yield Conflict(Fact("reason", event.reason), Fact("asked_stop", None))
        return
    yield from differ("reason", event.reason, "reason_to_end", _reason_to_end(ledger, event.seq_id))


def _due(ledger: Ledger, event: ev.StepEnd) -> Iterator[Conflict]:
    """Each request that must end ends; `finished` has the order of the batch."""
    step = ledger.step
    if step is None:
        return
    for seq_id in step.sampled:
        if seq_id not in step.finished and (reason := _reason_to_end(ledger, seq_id)):
            yield Conflict(Fact("running", seq_id), Fact("reason_to_end", reason))
    yield from differ("finished", event.finished, "ended_in_step", step.finished)
    in_order = [seq_id for seq_id in step.sampled if seq_id in step.finished]
    yield from differ("finished", step.finished, "order_of_batch", in_order)


def _output(ledger: Ledger, event: ev.RequestOutput) -> Iterator[Conflict]:
    seq = ledger.seq(event.seq_id)
    due = ledger.outputs_due[0] if ledger.outputs_due else None
    yield from differ("seq_id", event.seq_id, "output_due", due)
    yield from differ("reason", event.reason, "reason_of_end", seq.finish_reason)
    yield from differ(
        "num_prompt_tokens", event.num_prompt_tokens, "num_prompt_token_ids", seq.prompt_len
    )
    yield from differ(
        "num_completion_tokens",
        event.num_completion_tokens,
        "num_sampled",
        seq.num_completion_tokens,
    )


def _reset(ledger: Ledger, event: ev.EngineReset) -> Iterator[Conflict]:
    """A reset ends all requests, each with its tokens (the newest may not be appended)."""
    living = sorted({*ledger.state.waiting, *ledger.state.running, *ledger.outputs_due})
    # It may end a request whose arrival was interrupted, or whose output was just recorded.
    missing = [seq_id for seq_id in living if seq_id not in event.seq_ids]
    if missing:
        yield Conflict(Fact("seq_ids", event.seq_ids), Fact("unfinished", living))
    unknown = [s for s in event.seq_ids if s not in ledger.requests and s < ledger.next_seq_id]
    yield from differ("seq_ids", event.seq_ids, "ascending", sorted({*event.seq_ids, *unknown}))
    if unknown:
        yield Conflict(Fact("seq_ids", unknown), Fact("unfinished", living))
    for seq_id, num_tokens in zip(event.seq_ids, event.num_tokens, strict=True):
        if seq_id in ledger.requests:
            most = len(ledger.seq(seq_id).token_ids)
            is_sampled = isinstance(ledger.step and ledger.step.sample, ev.SampleTokens)
            if not most - is_sampled <= num_tokens <= most:
                yield Conflict(
                    Fact("num_tokens", [seq_id, num_tokens]), Fact("num_tokens_known", most)
                )


RULES = (
    Rule("arrival", "before", (ev.RequestEnqueue,), _arrival),
    Rule("arrival", "before", (ev.RequestRefused,), _refusal),
    Rule(
        "queue_lengths",
        "after",
        (*(ev.RequestEnqueue, ev.AdmissionStop, ev.StepEnd), *ev.SCHEDULES),
        _waiting_len,
    ),
    Rule("one_queue", "after", (ev.RequestEnqueue, ev.StateTransition), _one_queue),
    Rule("transitions", "before", (ev.StateTransition,), _legal),
    Rule("request_facts", "before", (ev.StateTransition,), _transition_facts),
    Rule("request_facts", "before", (ev.RequestAbort,), _abort_facts),
    Rule("transitions", "before", (ev.BlocksRelease,), _of_abort),
    Rule("head_first", "before", (ev.StateTransition,), _head_first),
    Rule("budgets", "before", (ev.StateTransition,), _admitted),
    Rule("admission_stop", "before", (ev.AdmissionStop,), _stop),
    Rule("admission_stop", "after", ev.SCHEDULES, _stop_recorded),
    Rule("youngest_first", "before", (ev.Preempt,), _youngest),
    Rule("youngest_first", "before", (ev.BlocksRelease,), _last_resort),
    Rule("ends", "before", (ev.StateTransition,), _end),
    Rule("ends", "before", (ev.StepEnd,), _due),
    Rule("request_facts", "before", (ev.RequestOutput,), _output),
    Rule("transitions", "before", (ev.EngineReset,), _reset),
)
