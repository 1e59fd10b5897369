"""What all messages share: the wire version, the base class, the replies that fit any request."""

from enum import StrEnum

from async_grpo.replay_parts import Struct

WIRE_VERSION = 2
"""Raised by every change of a message or of the group codec; peers must agree on it."""


class ErrorCode(StrEnum):
    """Why the server refused a request."""

    HELLO_REQUIRED = "hello_required"
    """the server restarted or never met this peer; say hello and repeat the request"""
    WIRE_MISMATCH = "wire_mismatch"
    CONFIG_MISMATCH = "config_mismatch"
    BAD_REQUEST = "bad_request"
    TRAINER_ALIVE = "trainer_alive"
    """another trainer's heartbeat lives"""
    FENCED = "fenced"
    """the sender's incarnation is not the current one"""
    NOT_FOUND = "not_found"


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all requests and replies; the class name is the tag."""


class Ok(Message, frozen=True, kw_only=True, tag="Ok"):
    """Done; nothing to tell."""


class Error(Message, frozen=True, kw_only=True, tag="Error"):
    """The request was refused."""

    code: ErrorCode
    message: str
