"""What a rank knows of another one: its heartbeat, and when it last changed. Standard library only."""

from __future__ import annotations

from typing import Any, NamedTuple


class Peer:
    """What is known of one rank: its last record and when, by this rank's clock, that changed."""

    def __init__(self, now: float) -> None:
        self.record: dict[str, Any] | None = None
        self.progress_at = self.pulse_at = now
        self.lost_at: float | None = None
        self.why = ""

    def update(self, record: dict[str, Any] | None, now: float) -> None:
        if record is None:   # not there yet, or being written
            return
        before, self.record = self.record or {}, record
        if record["beats"] != before.get("beats"):
            self.progress_at = now
        if record["pulse"] != before.get("pulse"):
            self.pulse_at = now

    @property
    def has_ended(self) -> bool:
        return self.record is not None and self.record["code"] is not None


class Seen(NamedTuple):
    """A rank as this one sees it now."""

    rank: int
    is_waiting: bool
    quiet_s: float   # since its last progress
    limit_s: float
    num_collectives: int
    doing: str
    note: str = ""
