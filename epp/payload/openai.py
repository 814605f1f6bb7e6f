"""Requests of the OpenAI APIs: chats, completions, embeddings, responses, conversations, images."""

from msgspec import Raw

from epp.errors import BadRequest
from epp.payload.body import (
    ABSENT,
    Body,
    BodyReader,
    Messages,
    Span,
    count_of,
    is_given,
    is_true,
    text_bytes,
    text_of,
)
from epp.payload.identity import (
    CONTINUES,
    DOCUMENTS,
    TEMPLATE,
    TEMPLATE_ARGUMENTS,
    TOOLS,
    PromptMember,
    add_items,
    add_json,
    add_messages,
    add_system,
    prompt_identities,
    tokens_of,
)
from epp.payload.media import Media
from epp.payload.records import Api, InferenceRequest

UNPARSABLE = "error unmarshaling request bodyMap"
_NO_MESSAGES = "invalid chat completions request: must have valid messages field"
_NO_PROMPT = "invalid completions request: must have prompt field"
_NO_INPUT = "invalid responses request: must have input field"
_NO_ITEMS = "invalid conversations request: must have items field"
_NO_EMBEDDINGS_INPUT = "invalid embeddings request: must have input field"
_NO_IMAGES_PROMPT = "invalid images generations request: must have prompt field"

_PROMPT = PromptMember("completions", "prompt")
_INPUT = PromptMember("embeddings", "input", takes_messages=True)


class _Chat(Messages):
    tools: Raw = ABSENT
    documents: Raw = ABSENT
    chat_template: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT


class _Completions(Body):
    prompt: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    max_tokens: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT


class _Embeddings(Messages):
    input: Raw = ABSENT
    cache_salt: Raw = ABSENT


class _Responses(Body):
    input: Raw = ABSENT
    instructions: Raw = ABSENT
    tools: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    conversation: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT


class _Conversations(Body):
    items: Raw = ABSENT
    cache_salt: Raw = ABSENT


class _Images(Body):
    prompt: Raw = ABSENT
    stream: Raw = ABSENT


_chats = BodyReader(_Chat, UNPARSABLE, _NO_MESSAGES)
_completions = BodyReader(_Completions, UNPARSABLE)
_embeddings = BodyReader(_Embeddings, UNPARSABLE, _NO_EMBEDDINGS_INPUT)
_responses = BodyReader(_Responses, UNPARSABLE)
_conversations = BodyReader(_Conversations, UNPARSABLE)
_images = BodyReader(_Images, UNPARSABLE)


def read_chat(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """A chat, to be answered or only rendered."""
    read = _chats.read(plain)
    chat = read.body
    model, span = _chats.model(read)
    if not chat.messages:
        raise BadRequest(
            f"{_NO_MESSAGES}: it must be a list of at least one object with role and content", "messages"
        )
    identity = chat_identity(chat, media)
    limit = count_of(chat.max_completion_tokens)
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompts=(identity,),
        prompt_tokens=tokens_of(identity),
        max_output_tokens=count_of(chat.max_tokens) if limit is None else limit,
        stream=is_true(chat.stream),
        cache_salt=text_of(chat.cache_salt),
        media=media.found,
    ), span


def chat_identity(chat: _Chat, media: Media) -> bytes:
    """Tools, documents and template, which decide how a prompt begins; then each message in order."""
    identity = bytearray()
    add_json(identity, TOOLS, chat.tools)
    add_json(identity, DOCUMENTS, chat.documents)
    add_json(identity, TEMPLATE, chat.chat_template)
    add_json(identity, TEMPLATE_ARGUMENTS, chat.chat_template_kwargs)
    add_messages(identity, chat.messages, media)
    return bytes(identity)


def read_completions(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """Completions, to be answered or only rendered. Prompts that come as embeddings are not read."""
    read = _completions.read(plain)
    completions = read.body
    model, span = _completions.model(read)
    if is_given(completions.prompt):
        prompts = prompt_identities(completions.prompt, _PROMPT, media)
    elif is_given(completions.prompt_embeds):
        prompts = ()
    else:
        raise BadRequest(f"{_NO_PROMPT}: a text, a list of texts, or token ids", "prompt")
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompts=prompts,
        prompt_tokens=sum(map(tokens_of, prompts)),
        max_output_tokens=count_of(completions.max_tokens),
        stream=is_true(completions.stream),
        cache_salt=text_of(completions.cache_salt),
    ), span


def read_embeddings(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """Embeddings of texts, token ids, or messages: each a prompt of its own; or of one conversation."""
    read = _embeddings.read(plain)
    embeddings = read.body
    model, span = _embeddings.model(read)
    if is_given(embeddings.input):
        prompts = prompt_identities(embeddings.input, _INPUT, media)
    elif embeddings.messages:
        identity = bytearray()
        add_messages(identity, embeddings.messages, media)
        prompts = (bytes(identity),)
    else:
        raise BadRequest(f"{_NO_EMBEDDINGS_INPUT}: a text, a list of texts, or token ids", "input")
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompts=prompts,
        prompt_tokens=sum(map(tokens_of, prompts)),
        cache_salt=text_of(embeddings.cache_salt),
        media=media.found,
    ), span


def read_responses(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """A turn of a conversation: all of its items, or those that follow what the engine keeps."""
    read = _responses.read(plain)
    turn = read.body
    model, span = _responses.model(read)
    if not is_given(turn.input):
        raise BadRequest(f"{_NO_INPUT}: a text or a list of items", "input")
    identity = bytearray()
    add_json(identity, TOOLS, turn.tools)
    add_system(identity, turn.instructions, media)
    add_json(identity, CONTINUES, turn.previous_response_id)
    add_json(identity, CONTINUES, turn.conversation)
    add_items(identity, turn.input, media)
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompts=(bytes(identity),),
        prompt_tokens=tokens_of(identity),
        max_output_tokens=count_of(turn.max_output_tokens),
        stream=is_true(turn.stream),
        cache_salt=text_of(turn.cache_salt),
        media=media.found,
    ), span


def read_conversations(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """A conversation for the engine to keep."""
    read = _conversations.read(plain)
    conversation = read.body
    model, span = _conversations.model(read)
    items = bytes(conversation.items)
    if items[:1] != b"[" or items[1:].lstrip()[:1] == b"]":
        raise BadRequest(f"{_NO_ITEMS}: a list of at least one item", "items")
    identity = bytearray()
    add_items(identity, conversation.items, media)
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompts=(bytes(identity),),
        prompt_tokens=tokens_of(identity),
        cache_salt=text_of(conversation.cache_salt),
        media=media.found,
    ), span


def read_images(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """Pictures to be made. Engines keep nothing of the text, so it counts and has no identity."""
    read = _images.read(plain)
    model, span = _images.model(read)
    text = bytes(read.body.prompt)
    if text[:1] != b'"' or text == b'""':
        raise BadRequest(f"{_NO_IMAGES_PROMPT}: a text", "prompt")
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompt_tokens=tokens_of(text_bytes(text)),
        stream=is_true(read.body.stream),
    ), span
