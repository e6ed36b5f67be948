"""Authentication at a replica's wire: both ends prove a key in ZeroMQ's handshake, before any message.

    replica, at its start    draws two key pairs: its own, and one for all of its ingresses
    Ray                      carries the replica's public key and the ingresses' secret key to the ingresses
    ingress ── CURVE handshake: encrypted for the replica, with the ingresses' key ──▶ replica: admitted
    stranger ── anything else ──▶ the connection ends, and none of its bytes becomes a message

CURVE encrypts, and proves the replica to the ingress; by itself it admits every peer that knows the replica's
public key. So the ingress has a key too, and ZeroMQ asks the `Doorkeeper` about it (ZAP, ZeroMQ's RFC 27). For
this reason no hello holds a secret, which would be checked only after a stranger's messages had been received and
decoded. All ingresses of a replica have one key, because they get it from the same place; separate keys would
first have to be made known to every replica.

With `wire.encrypt: false` the handshake is ZeroMQ's PLAIN: the same key is sent as a password, unencrypted, like
all messages after it. It still rejects strangers, unless they can eavesdrop.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import zmq
from zmq.utils import z85

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"raydix"
_USER = b"ingress"
_ANSWERS_PER_TURN = 64


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """The keys that a replica draws at its start, in Z85 (ZeroMQ's RFC 32)."""

    public: bytes
    secret: bytes
    ingress_public: bytes
    ingress_secret: bytes

    @classmethod
    def drawn(cls) -> Keys:
        """Draw new ones."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())


class Doorkeeper:
    """Decides for each connection whether its peer has the ingresses' key. One for each ZeroMQ context.

    After `guard`, everything here belongs to the wire's thread.
    """

    def __init__(self, context: Context, is_encrypted: bool, handshake_s: float) -> None:
        """A connection has `handshake_s` for its handshake.

        Raises RuntimeError when encryption is wanted and this ZeroMQ cannot do it.
        """
        if not zmq.has("curve"):
            raise RuntimeError(
                "the wire's keys need a ZeroMQ with CURVE, which pyzmq's wheels have: "
                "install pyzmq from its wheel, or build libzmq with libsodium"
            )
        self._keys, self._is_encrypted, self._handshake_s = Keys.drawn(), is_encrypted, handshake_s
        self._questions: Socket = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(_ZAP)

    @property
    def secret(self) -> str:
        """The key that an ingress proves, or shows where the wire is not encrypted."""
        return self._keys.ingress_secret.decode()

    @property
    def public_key(self) -> str:
        """The key by which ingresses know this replica; "" where the wire is not encrypted."""
        return self._keys.public.decode() if self._is_encrypted else ""

    @property
    def socket(self) -> Socket:
        """The socket on which ZeroMQ asks; call `answer` when it is readable."""
        return self._questions

    def guard(self, socket: Socket) -> None:
        """Let only ingresses connect to a socket. Call it before the socket is bound."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, round(self._handshake_s * 1000)))
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # admit no peer without an answer
        if self._is_encrypted:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        else:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def answer(self) -> None:
        """Answer ZeroMQ's questions, up to a limit; the others wait for the next call."""
        for _ in range(_ANSWERS_PER_TURN):
            try:
                version, number, _domain, _address, _identity, mechanism, *proof = self._questions.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            status = b"200" if self._admits(mechanism, proof) else b"400"
            self._questions.send_multipart([version, number, status, b"", b"", b""])

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._questions.close()

    def _admits(self, mechanism: bytes, proof: list[bytes]) -> bool:
        keys = self._keys
        if mechanism == b"CURVE" and self._is_encrypted:
            return hmac.compare_digest(proof[0], z85.decode(keys.ingress_public))
        if mechanism == b"PLAIN" and not self._is_encrypted:
            return hmac.compare_digest(proof[-1], keys.ingress_secret)
        return False


def prove(socket: Socket, secret_key: str, public_key: str) -> None:
    """Make a socket prove to a replica with that public key ("": not encrypted) that it may connect. Call it
    before the socket connects.
    """
    secret = secret_key.encode()
    if public_key:
        socket.setsockopt(zmq.CURVE_SERVERKEY, public_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    else:
        socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
        socket.setsockopt(zmq.PLAIN_PASSWORD, secret)
