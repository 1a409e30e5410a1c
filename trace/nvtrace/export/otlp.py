"""OTLP: a request as a span, and its phases as spans inside it, for OpenTelemetry collectors.

Each line is one TracesData object in OTLP's JSON encoding, as its file format wants it
(opentelemetry.io/docs/specs/otel/protocol/file-exporter): a collector's `otlpjsonfile` receiver
reads it. `otlp_http.py` sends the same to a collector.

Attributes are the GenAI semantic conventions' (`gen_ai.*`), and `nvtrace.*` where these have no
name. As the conventions ask, no text of prompts or answers is exported. A number beyond an
`intValue`, as every other request's seed is, becomes a `stringValue` of its digits.

    request 3   |----------------------------------------------|   a trace of its own
                   admitted    PREEMPT    resumed   first_token     events of the span
                |queue||prefill||prefill||decode||preempted|...     spans inside it

A prefill has a span for each chunk, from the decision to compute it to the end of its step. A
request that has not ended gets a span up to the last event, marked as unfinished.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from nvtrace import events as ev
from nvtrace.envelope import Header
from nvtrace.export import json_text
from nvtrace.measure import Measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvtrace.envelope import Record
    from nvtrace.metrics import RequestMetrics

_INTERNAL = 1  # SPAN_KIND_INTERNAL: the model runs in the caller's process
_STATUS_ERROR = 2
_NS_PER_S = 1_000_000_000
_OPERATION = "text_completion"
FINISH_REASONS = {  # our reasons -> vLLM's and OpenAI's
    "eos": "stop",
    "stop_token": "stop",
    "stop_string": "stop",
    "max_tokens": "length",
    "max_model_len": "length",
    "aborted": "abort",
}


def lines(records: Iterable[Record]) -> Iterator[str]:
    """One line a request, in the order in which they end.

    Args:
        records: what `read_trace` yields.
    """
    spans = Spans()
    for record in records:
        yield from spans.take(record)
    yield from spans.finish()


@dataclass(slots=True)
class _Phase:
    """A phase of a request. `end_ns` is None while it lasts."""

    name: str
    start_ns: int
    facts: dict[str, Any]
    end_ns: int | None = None


@dataclass(slots=True)
class _Request:
    """The attributes, events and phases of a span, besides the metrics.

    Attributes:
        num_tokens: its length; all of it is to be prefilled.
        is_prefilled: is its last chunk computed in this step?
        is_ending: does it end with this step?
    """

    arrival_ns: int
    attributes: dict[str, Any]
    num_tokens: int
    has_token: bool = False
    has_run: bool = False
    is_prefilled: bool = False
    is_ending: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    phases: list[_Phase] = field(default_factory=list)

    @property
    def phase(self) -> _Phase | None:
        """The phase that lasts; None between two."""
        return self.phases[-1] if self.phases and self.phases[-1].end_ns is None else None

    def end_phase(self, now: int) -> None:
        """The phase that lasts ends."""
        if self.phase is not None:
            self.phase.end_ns = now

    def begin_phase(self, now: int, name: str, facts: dict[str, Any]) -> None:
        """A phase begins where the one before it ends."""
        self.end_phase(now)
        self.phases.append(_Phase(name, now, facts))


class Spans:
    """Makes spans, record by record."""

    def __init__(self) -> None:
        self._measure = Measure()
        self._requests: dict[int, _Request] = {}
        self._resource: dict[str, Any] = {}
        self._scope: dict[str, Any] = {}
        self._run_id = self._model = ""
        self._anchor_unix_ns = self._now = 0
        self._drawn: list[int] = []
        self._computing: list[_Request] = []  # the step under way computes a chunk of theirs
        self._error: ev.EngineError | None = None

    def take(self, record: Record) -> Iterator[str]:
        """Take in one record. Yields a line for each request that ended with it.

        Raises:
            InconsistentTraceError: it is about a request that never arrived.
        """
        if isinstance(record, Header):
            self._begin(record)
        if isinstance(record, ev.Event):
            self._now = max(self._now, record.ts_ns)
        ended = self._measure.apply(record)
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(self, record)
        for metrics in ended:
            request = self._requests.pop(metrics.seq_id)
            attributes = request.attributes | _answer(metrics)
            failure = self._error if metrics.finish_reason == "aborted" else None
            yield self._line(metrics.seq_id, request, attributes, metrics.finished_ns, failure)

    def finish(self) -> Iterator[str]:
        """The lines of the requests that have not ended, at the end of the trace."""
        for seq_id, request in self._requests.items():
            attributes = request.attributes | {"nvtrace.is_unfinished": True}
            yield self._line(seq_id, request, attributes, self._now, None)

    # -- events ----------------------------------------------------------------------------------

    def _begin(self, header: Header) -> None:
        self._run_id, self._anchor_unix_ns = header.run_id, anchor_unix_ns(header)
        name, version = (getattr(header.facts.engine, key) or "" for key in ("name", "version"))
        self._scope = {"name": "nvtrace", "version": version}
        self._resource = {
            "service.name": name,
            "service.version": version,
            "service.instance.id": header.run_id,
            "nvtrace.rank": header.rank,
        }

    def _engine_init(self, event: ev.EngineInit) -> None:
        self._model = event.model

    def _request_enqueue(self, event: ev.RequestEnqueue) -> None:
        self._error = None
        request = self._requests[event.seq_id] = _Request(
            event.ts_ns,
            {
                "gen_ai.operation.name": _OPERATION,
                "gen_ai.provider.name": self._resource.get("service.name", ""),
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": event.max_tokens,
                "gen_ai.request.temperature": float(event.temperature),
                "gen_ai.request.top_p": float(event.top_p),
                "gen_ai.request.top_k": None if event.top_k is None else float(event.top_k),
                "gen_ai.request.seed": event.seed,
                "gen_ai.request.stop_sequences": event.stop,
                "gen_ai.usage.input_tokens": event.prompt_len,
                "nvtrace.seq_id": event.seq_id,
            },
            event.prompt_len,
        )
        request.begin_phase(event.ts_ns, "queue", {})

    def _state_transition(self, event: ev.StateTransition) -> None:
        request = self._requests.get(event.seq_id)
        if request is None:
            return
        match event.status:
            case "RUNNING":
                self._note(request, event.ts_ns, "resumed" if request.has_run else "admitted", {})
                request.has_run = True
                request.end_phase(event.ts_ns)
            case "WAITING":
                request.begin_phase(event.ts_ns, "preempted", {"nvtrace.step": event.step})
            case "FINISHED":
                request.is_ending = True
            case status:
                request.begin_phase(event.ts_ns, status, {"nvtrace.step": event.step})

    def _schedule(self, event: ev.SchedulePrefill | ev.ScheduleMixed) -> None:
        for seq_id, num_tokens, num_computed in zip(
            event.seq_ids, event.num_scheduled_tokens, event.num_computed_tokens, strict=False
        ):
            request = self._requests.get(seq_id)
            if request is None or request.phase is not None:  # it decodes
                continue
            request.is_prefilled = num_computed + num_tokens >= request.num_tokens
            facts = {"step": event.step, "num_tokens": num_tokens, "num_computed": num_computed}
            named = {f"nvtrace.{name}": value for name, value in facts.items()}
            request.begin_phase(event.ts_ns, "prefill", named)
            self._computing.append(request)

    def _preempt(self, event: ev.Preempt) -> None:
        facts = {f"nvtrace.{name}": getattr(event, name) for name in event.log_fields}
        facts["nvtrace.step"] = event.step
        if event.seq_id in self._requests:
            self._note(self._requests[event.seq_id], event.ts_ns, "PREEMPT", facts)

    def _sample_tokens(self, event: ev.SampleTokens) -> None:
        self._drawn = event.seq_ids
        for seq_id in event.seq_ids:
            if seq_id in self._requests:
                self._requests[seq_id].num_tokens += 1

    def _step_end(self, event: ev.StepEnd) -> None:
        for computed in self._computing:
            computed.end_phase(event.ts_ns)
            if computed.is_prefilled and not computed.is_ending:
                computed.begin_phase(event.ts_ns, "decode", {})
        self._computing = []
        for seq_id in self._drawn:
            request = self._requests.get(seq_id)
            if request is not None and not request.has_token:
                request.has_token = True
                self._note(request, event.ts_ns, "first_token", {"nvtrace.step": event.step})
        self._drawn = []

    def _engine_error(self, event: ev.EngineError) -> None:
        self._error, self._drawn, self._computing = event, [], []

    _handlers: ClassVar[dict[type, Callable[[Spans, Any], None]]] = {
        ev.EngineInit: _engine_init,
        ev.RequestEnqueue: _request_enqueue,
        ev.StateTransition: _state_transition,
        ev.Preempt: _preempt,
        ev.SchedulePrefill: _schedule,
        ev.ScheduleMixed: _schedule,
        ev.SampleTokens: _sample_tokens,
        ev.StepEnd: _step_end,
        ev.EngineError: _engine_error,
    }

    # -- spans -----------------------------------------------------------------------------------

    def _note(self, request: _Request, ts_ns: int, name: str, facts: dict[str, Any]) -> None:
        event = {"timeUnixNano": self._unix(ts_ns), "name": name, "attributes": _key_values(facts)}
        request.events.append(event)

    def _line(
        self,
        seq_id: int,
        request: _Request,
        attributes: dict[str, Any],
        end_ns: int,
        failure: ev.EngineError | None,
    ) -> str:
        if failure is not None:
            attributes = attributes | {"error.type": failure.error_type}
        trace_id, span_id = self._ids(seq_id)
        end_ns = max(end_ns, request.arrival_ns)
        span = {
            "traceId": trace_id,
            "spanId": span_id,
            "name": f"{_OPERATION} {self._model}",
            "kind": _INTERNAL,
            "startTimeUnixNano": self._unix(request.arrival_ns),
            "endTimeUnixNano": self._unix(end_ns),
            "attributes": _key_values(attributes),
            "events": request.events,
            "status": {}
            if failure is None
            else {"code": _STATUS_ERROR, "message": failure.message},
        }
        spans = [span]
        for number, phase in enumerate(request.phases):
            last = end_ns if phase.end_ns is None else phase.end_ns
            start, last = (
                min(max(ts_ns, request.arrival_ns), end_ns) for ts_ns in (phase.start_ns, last)
            )
            inner = {
                "traceId": trace_id,
                "spanId": self._ids(seq_id, number)[1],
                "parentSpanId": span_id,
                "name": phase.name,
                "kind": _INTERNAL,
                "startTimeUnixNano": self._unix(start),
                "endTimeUnixNano": self._unix(max(start, last)),
                "attributes": _key_values({"nvtrace.seq_id": seq_id, **phase.facts}),
                "status": {},
            }
            spans.append(inner)
        scoped = {"scope": self._scope, "spans": spans}
        resource = {"attributes": _key_values(self._resource)}
        return json_text({"resourceSpans": [{"resource": resource, "scopeSpans": [scoped]}]})

    def _ids(self, seq_id: int, *phase: int) -> tuple[str, str]:
        """A trace's id and a span's, the same at every export; both are random numbers to OTLP."""
        digest = hashlib.sha256(json_text([self._run_id, seq_id, *phase]).encode()).hexdigest()
        return digest[:32], digest[32:48]

    def _unix(self, ts_ns: int) -> str:
        """Nanoseconds since 1970: 64 bits without a sign, which OTLP's JSON writes as text."""
        return str(min(max(self._anchor_unix_ns + ts_ns, 0), 2**64 - 1))


def _answer(metrics: RequestMetrics) -> dict[str, Any]:
    """The attributes of a request that has ended."""
    seconds = {
        "time_to_first_token": metrics.time_to_first_token_ns,
        "time_per_output_token": metrics.time_per_output_token_ns,
        "request_queue_time": metrics.request_queue_time_ns,
        "request_prefill_time": metrics.request_prefill_time_ns,
        "request_decode_time": metrics.request_decode_time_ns,
        "request_preempted_time": metrics.request_preempted_time_ns,
    }
    reason = metrics.finish_reason
    return {
        "gen_ai.response.finish_reasons": [FINISH_REASONS.get(reason, reason)],
        "gen_ai.usage.output_tokens": metrics.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens,
        "nvtrace.finish_reason": reason,
        "nvtrace.num_preemptions": metrics.num_preemptions,
        "nvtrace.num_recomputed_tokens": metrics.num_recomputed_tokens,
        **{
            f"nvtrace.{name}_seconds": None if value is None else value / _NS_PER_S
            for name, value in seconds.items()
        },
    }


def anchor_unix_ns(header: Header) -> int:
    """The Unix time of ts_ns = 0; 0 if the header does not have it."""
    anchor = header.facts.clock.anchor_unix_ns
    if anchor is not None:
        return anchor
    try:
        return round(datetime.fromisoformat(header.created).timestamp() * _NS_PER_S)
    except (ValueError, OverflowError, OSError):
        return 0


def _key_values(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """OTLP's list of pairs; what is None is left out."""
    return [
        {"key": key, "value": _any_value(value)}
        for key, value in attributes.items()
        if value is not None
    ]


def _any_value(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int() if -(2**63) <= value < 2**63:
            return {"intValue": str(value)}  # a collector reads 64 bits with a sign
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_any_value(item) for item in value]}}
        case _:
            return {"stringValue": str(value)}
