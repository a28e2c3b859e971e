"""Why a server on Ray does not come up."""

from __future__ import annotations


class PlacementError(Exception):
    """The cluster has no room for what was asked; the message has both."""


class RoomError(Exception):
    """A room cannot start as it is configured. `status` is its exit status."""

    def __init__(self, room: str, status: int) -> None:
        super().__init__(f"{room} ended with status {status}; its last lines in the log say why")
        self.status = status
