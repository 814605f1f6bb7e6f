"""An answer of vLLM's gRPC API followed as it passes: first token and token counts out of its messages."""

from google.protobuf.message import DecodeError

from epp.payload.grpc import FRAME_HEADER_BYTES
from epp.payload.kept import Account, Kept
from epp.payload.records import Api, Usage
from epp.payload.shapes import EXACT_BYTES
from epp.wire.vllm_engine_pb2 import EmbedResponse, GenerateComplete, GenerateResponse, GenerateStreamChunk


class GrpcAnswerReader:
    """Follows the answer of one gRPC request. Takes any bytes; never raises; changes none.

    Messages may come in pieces and several at a time; what is kept of one that is not whole is charged to an
    account, and given back by `finish` or `release`. A message longer than `EXACT_BYTES` is not read.

    Attributes:
        streaming: the client asked for a stream of tokens.
        first_token: the first output token has passed; of an answer whose messages cannot be read (compressed
            ones, long ones, of another API) its first byte. Never true of an error.
        events: messages that have passed, as far as they are read.
    """

    __slots__ = (
        "_counts",
        "_embeds",
        "_is_error",
        "_partial",
        "_reads",
        "_skip",
        "events",
        "first_token",
        "streaming",
    )

    def __init__(self, api: Api, streaming: bool, account: Account | None = None) -> None:
        self._embeds = api is Api.VLLM_GRPC_EMBED
        self._partial = Kept(account)
        self._skip = 0
        self._counts: GenerateStreamChunk | GenerateComplete | EmbedResponse | None = None
        self._is_error = False
        self._reads = False
        self.streaming = streaming
        self.first_token = False
        self.events = 0

    def begin(self, status: int, content_type: str, content_encoding: str) -> bool:
        """Take note of the answer's headers. Always False: no byte changes."""
        self._is_error = status >= 400
        self._reads = not self._is_error and content_type.lower().startswith("application/grpc")
        return False

    @property
    def usage(self) -> Usage | None:
        """The last counts that have passed."""
        match self._counts:
            case None:
                return None
            case EmbedResponse(prompt_tokens=prompt):
                return Usage(prompt, 0)
            case counts:
                return Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)

    def feed(self, chunk: bytes, last: bool) -> bytes:
        """Follow a piece of the body. Returns `chunk`."""
        if not self._reads:
            self.first_token |= bool(chunk) and not self._is_error
            return chunk
        if (
            self._partial
            or self._skip
            or len(chunk) != FRAME_HEADER_BYTES + int.from_bytes(chunk[1:FRAME_HEADER_BYTES])
        ):
            self._follow(chunk)
        else:
            self._read(chunk[0], chunk[FRAME_HEADER_BYTES:])
        if last:
            self.release()
        return chunk

    def finish(self) -> bytes:
        """The body has ended; nothing of it is held back."""
        self.release()
        return b""

    def release(self) -> None:
        """Let go of what is kept: the answer is over, however it ended."""
        self._partial.release()

    def _follow(self, chunk: bytes) -> None:
        """A piece that is not one whole message."""
        skipped = min(self._skip, len(chunk))
        self._skip -= skipped
        partial = self._partial
        partial += chunk[skipped:] if skipped else chunk
        at = 0
        while len(partial) - at >= FRAME_HEADER_BYTES:
            begin = at + FRAME_HEADER_BYTES
            size = int.from_bytes(partial[at + 1 : begin])
            if begin + size > len(partial):
                if size > EXACT_BYTES:
                    self._skip = begin + size - len(partial)
                    self.events += 1
                    self.first_token = True
                    at = len(partial)
                break
            self._read(partial[at], bytes(partial[begin : begin + size]))
            at = begin + size
        del partial[:at]
        self._partial.settle()

    def _read(self, compressed: int, message: bytes) -> None:
        self.events += 1
        if compressed:
            self.first_token = True
            return
        try:
            if self._embeds:
                embedded = EmbedResponse.FromString(message)
                self._counts = embedded if embedded.prompt_tokens else self._counts
                self.first_token = True
                return
            answer = GenerateResponse.FromString(message)
        except DecodeError:
            self.first_token = True
            return
        if self.first_token:  # in the midst of a stream there is only this to see
            counts = answer.chunk
            if counts.prompt_tokens:
                self._counts = counts
                return
        match answer.WhichOneof("response"):
            case "chunk":
                self.first_token = self.first_token or len(answer.chunk.token_ids) > 0
                self._note(answer.chunk)
            case "complete":
                self.first_token = True
                self._note(answer.complete)

    def _note(self, counts: GenerateStreamChunk | GenerateComplete) -> None:
        """Keep counts that say something: in the midst of a stream they may be left out."""
        if counts.prompt_tokens or counts.completion_tokens:
            self._counts = counts
