"""An answer of vLLM's gRPC API followed as it passes: first token and token counts out of its messages."""

from google.protobuf.message import DecodeError

from epp.payload.framed import FramedAnswer
from epp.payload.kept import Account
from epp.payload.records import Api, Usage
from epp.wire.vllm_engine_pb2 import EmbedResponse, GenerateComplete, GenerateResponse, GenerateStreamChunk


class GrpcAnswerReader(FramedAnswer):
    """Follows the answer of one request of vLLM. Changes no byte."""

    __slots__ = ("_counts", "_embeds")

    def __init__(self, api: Api, streaming: bool, account: Account | None = None) -> None:
        super().__init__(streaming, account)
        self._embeds = api is Api.VLLM_GRPC_EMBED
        self._counts: GenerateStreamChunk | GenerateComplete | EmbedResponse | None = None

    @property
    def usage(self) -> Usage | None:
        match self._counts:
            case None:
                return None
            case EmbedResponse(prompt_tokens=prompt):
                return Usage(prompt, 0)
            case counts:
                return Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)

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

    def _pass(self, unread: bytes) -> None:
        """It tells nothing."""

    def _note(self, counts: GenerateStreamChunk | GenerateComplete) -> None:
        """Keep counts that say something: in the midst of a stream they may be left out."""
        if counts.prompt_tokens or counts.completion_tokens:
            self._counts = counts
