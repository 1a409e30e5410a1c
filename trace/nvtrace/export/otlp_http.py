"""OTLP over HTTP: send a trace's spans to a receiver, as protobuf.

    POST http://localhost:4318/v1/traces    Content-Type: application/x-protobuf

What is sent are the lines of `otlp.py`, in requests of some hundred spans. The package
opentelemetry-proto, which knows protobuf's encoding of them, is loaded at the first use.
"""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from typing_extensions import override

from nvtrace.export import ExportError
from nvtrace.export.otlp import lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace.envelope import Record

_PATH = "/v1/traces"
_TIMEOUT_S = 10  # OpenTelemetry's own default
_SPANS_PER_REQUEST = 512  # the same
_MOST_BYTES = 100_000  # of an answer
_MOST_CHARACTERS = 200  # of an error
_IDS = ("traceId", "spanId", "parentSpanId")


class SendError(Exception):
    """The receiver cannot be reached, or does not take the spans."""


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an error: urllib would follow it with a GET, without the spans."""

    @override
    def redirect_request(self, *_: object) -> None:
        return None


def send(records: Iterable[Record], endpoint: str) -> int:
    """Send the spans of a trace.

    Args:
        records: what `read_trace` yields.
        endpoint: the receiver's address, with or without /v1/traces.

    Returns:
        The number of spans.

    Raises:
        ExportError: that is not the address of an HTTP server.
        ModuleNotFoundError: opentelemetry-proto is not installed.
        SendError: the receiver cannot be reached, or does not take the spans.
    """
    # Few install these.
    from google.protobuf.json_format import ParseDict  # noqa: PLC0415
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp  # noqa: PLC0415

    address = _address(endpoint)
    num_spans = 0
    for batch, num_spans_of_batch in _batches(lines(records)):
        request = ParseDict({"resourceSpans": batch}, otlp.ExportTraceServiceRequest())
        answer = otlp.ExportTraceServiceResponse()
        with suppress(DecodeError):  # some receivers answer in JSON
            answer.ParseFromString(_post(address, request.SerializeToString()))
        rejected = answer.partial_success.rejected_spans
        if rejected:
            why = answer.partial_success.error_message
            raise SendError(f"{address} rejected {rejected} spans: {why}")
        num_spans += num_spans_of_batch
    return num_spans


def _address(endpoint: str) -> str:
    """Where an endpoint takes spans: for http://host:4318, http://host:4318/v1/traces."""
    try:
        parts = urlsplit(endpoint)
        is_right = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        is_right = False
    if not is_right or any(not "!" <= character <= "~" for character in endpoint):
        raise ExportError(f"{endpoint} is not an address such as http://localhost:4318")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(_PATH) else path + _PATH).geturl()


def _batches(data: Iterable[str]) -> Iterator[tuple[list[Any], int]]:
    """Yield some requests' resourceSpans, and how many spans they have."""
    batch: list[Any] = []
    num_spans = 0
    for line in data:
        [resource_spans] = json.loads(line)["resourceSpans"]
        [scope_spans] = resource_spans["scopeSpans"]
        for span in scope_spans["spans"]:
            # OTLP's JSON has ids in hexadecimal, that of protobuf has bytes in base64.
            span |= {key: b64encode(bytes.fromhex(span[key])) for key in _IDS if key in span}
        batch.append(resource_spans)
        num_spans += len(scope_spans["spans"])
        if num_spans >= _SPANS_PER_REQUEST:
            yield batch, num_spans
            batch, num_spans = [], 0
    if batch:
        yield batch, num_spans


def _post(address: str, body: bytes) -> bytes:
    """Send one request. Returns the answer's body."""
    headers = {"Content-Type": "application/x-protobuf"}
    request = Request(address, body, headers)  # noqa: S310 - `_address` has checked the scheme
    try:
        with build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read(_MOST_BYTES))
    except HTTPError as error:
        raise SendError(f"{address} answered {error.code} {error.reason}{_said(error)}") from error
    except (OSError, HTTPException) as error:
        why = error.reason if isinstance(error, URLError) else error
        if isinstance(why, TimeoutError):
            raise SendError(f"{address} did not answer within {_TIMEOUT_S} seconds") from error
        said = getattr(why, "strerror", None) or str(why) or type(why).__name__
        raise SendError(f"{address} cannot be reached ({said})") from error


def _said(error: HTTPError) -> str:
    """The text of an error's body, which may be protobuf; empty for none."""
    body = b""
    with suppress(OSError, HTTPException), error:
        body = error.read(_MOST_CHARACTERS)
    text = "".join(filter(str.isprintable, body.decode("utf-8", "ignore"))).strip()
    return f": {text}" if text else ""
