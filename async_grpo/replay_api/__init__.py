"""Messages between the roles and the replay server: the protocol.

`base` holds what all share; `peers`, `generator`, `trainer` and `publishing` the messages by who
sends them; `protocol` the union of all.

Every request is a tagged msgspec struct, sent as `Request.body`; every request names its reply
class as `reply`. The replay core consumes the same structs as events. Unknown fields and unknown
tags are refused. A request marked *idempotent* may be sent again after a lost reply; all of them
are, by the key that its docstring names. *Long poll*: the server answers when it can say
something, at the latest after `wait_s`.

Control and bulk travel on two connections to one address; only `Insert` (request) and `Fetch`
(reply) carry payload frames, and only they use the bulk connection.
"""
