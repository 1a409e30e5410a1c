"""The recorder of a re-run: a Recorder with a simulated clock.

Nothing is started, so of an engine's start only the settings are recorded.
"""

from __future__ import annotations

from copy import copy
from dataclasses import asdict
from typing import TYPE_CHECKING

from msgspec import structs

from nvtrace.recorder import Recorder
from nvtrace.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from structlog.typing import Processor

    from nvtrace import events as ev
    from nvtrace.envelope import Header
    from nvtrace.pipeline import Sink
    from nvtrace.whatif.recording import Recording
    from nvtrace.whatif.settings import Settings


class Clock:
    """Simulated time, in nanoseconds. It stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        """The time now."""
        return self.now_ns

    def advance(self, duration_ns: int) -> None:
        """Let time pass."""
        self.now_ns += duration_ns


class _Writer(TraceWriter):
    """Writes what happens in simulated time."""

    def write_simulated_header(
        self, recorded: Header, settings: Settings, num_untimed: int
    ) -> None:
        """The recorded run's header, saying that this one is simulated."""
        self.has_header = True
        config = recorded.config | asdict(settings) | {"tensor_parallel_size": 1}
        self._emit(
            structs.replace(
                recorded,
                run_id=self.run_id,
                mode="simulated",
                world_size=1,
                clock={
                    "unit": "ns",
                    "source": "simulated",
                    "recorded_run_id": recorded.run_id,
                    "num_untimed_steps": num_untimed,
                },
                config=config,
            )
        )


class SimulatedRecorder(Recorder):
    """Records a re-run.

    Args:
        clock: the simulated clock.
        sink, processors, tap: see `Recorder`.
    """

    def __init__(
        self,
        clock: Clock,
        sink: Sink,
        *,
        processors: Iterable[Processor] = (),
        tap: Callable[[list[ev.Event]], None] | None = None,
    ) -> None:
        super().__init__(sink, processors=processors, tap=tap)
        self._writer = _Writer(sink, processors, tap, clock)
        self.trace = self._writer

    def begin(self, recording: Recording, settings: Settings, num_untimed: int = 0) -> None:
        """Record the engine's start: as in the recorded run, but with `settings`.

        Args:
            recording: the recorded run.
            settings: those of this one.
            num_untimed: steps of unknown time, which take none here; for the header.
        """
        init = recording.init
        self._writer.write_simulated_header(recording.header, settings, num_untimed)
        self._policy = settings.policy
        changes = asdict(settings) | {"block_size": settings.kvcache_block_size, "tp_size": 1}
        known = {name: changes[name] for name in init.__struct_fields__ if name in changes}
        self.trace.add(structs.replace(init, **known), "bootstrap")
        ready = recording.ready
        self.engine_ready(settings.num_kvcache_blocks, ready.eos_token_ids, ready.eos_sources or ())

    def refused_as_recorded(self, event: ev.RequestRefused) -> None:
        """Record a request that was refused in the recorded run; its prompt is not in the trace."""
        self.trace.add(copy(event), "ingress")
