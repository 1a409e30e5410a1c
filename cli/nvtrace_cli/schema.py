"""nvtrace schema: the JSON Schema of a trace's lines.

`nvtrace.reference` makes it from the event structs.
"""

from __future__ import annotations

import sys


def schema() -> None:
    """Print the JSON Schema of a line of a trace, for validators and editors.

    It is made from the event structs of this version; docs/trace.schema.json is the same.
    """
    import msgspec  # noqa: PLC0415 - --help needs no structs

    from nvtrace.reference import trace_schema  # noqa: PLC0415 - the same

    text = msgspec.json.format(msgspec.json.encode(trace_schema()), indent=2)
    sys.stdout.write(text.decode() + "\n")
