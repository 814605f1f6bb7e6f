"""Block keys against their definition, and what may never share one."""

import random
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from epp.kvcache import hashing
from epp.kvcache.hashing import chain_keys, root_key

ChainKeys = Callable[[int, bytes, int, int], list[int]]


def by_definition(root: int, prompt: bytes, block_bytes: int, max_blocks: int) -> list[int]:
    keys: list[int] = []
    for start in range(0, len(prompt), block_bytes):
        block = prompt[start : start + block_bytes]
        if len(block) == block_bytes and len(keys) < max_blocks:
            keys.append(xxhash.xxh3_64(block, seed=keys[-1] if keys else root).intdigest())
    return keys


def check_definition(chain: ChainKeys) -> None:
    draw = random.Random(1)
    for _ in range(400):
        root, prompt = draw.getrandbits(64), draw.randbytes(draw.randint(0, 600))
        block_bytes, most = 4 * draw.randint(1, 40), draw.randint(0, 100)
        assert chain(root, prompt, block_bytes, most) == by_definition(root, prompt, block_bytes, most)


def check_prefixes(chain: ChainKeys) -> None:
    """Two prompts that differ in one byte: equal keys for the full blocks before it, and none after."""
    draw = random.Random(2)
    for _ in range(400):
        root, prompt = draw.getrandbits(64), draw.randbytes(draw.randint(1, 300))
        where = draw.randrange(len(prompt))
        other = bytearray(prompt)
        other[where] ^= draw.randint(1, 255)
        keys, changed = chain(root, prompt, 16, 1000), chain(root, bytes(other), 16, 1000)
        assert [a == b for a, b in zip(keys, changed, strict=True)] == [
            n < where // 16 for n in range(len(prompt) // 16)
        ]


@given(root=st.integers(0, (1 << 64) - 1), start=st.binary(max_size=300), more=st.binary(max_size=300))
def test_a_longer_prompt_continues_the_chain(root: int, start: bytes, more: bytes) -> None:
    short, long = chain_keys(root, start, 16, 1000), chain_keys(root, start + more, 16, 1000)
    assert long[: len(short)] == short
    if short:
        rest = (start + more)[len(short) * 16 :]
        assert long[len(short) :] == chain_keys(short[-1], rest, 16, 1000)


def test_keys_are_what_the_definition_says() -> None:
    check_definition(chain_keys)


def test_keys_are_equal_just_as_long_as_the_prompts_are() -> None:
    check_prefixes(chain_keys)


def unchained(root: int, prompt: bytes, block_bytes: int, most: int) -> list[int]:
    whole = len(prompt) // block_bytes * block_bytes
    starts = range(0, whole, block_bytes)
    return [xxhash.xxh3_64_intdigest(prompt[at : at + block_bytes], root) for at in starts][:most]


def with_the_rest(root: int, prompt: bytes, block_bytes: int, most: int) -> list[int]:
    padded = prompt + bytes(-len(prompt) % block_bytes)
    return chain_keys(root, padded, block_bytes, most)


def without_limit(root: int, prompt: bytes, block_bytes: int, most: int) -> list[int]:
    return chain_keys(root, prompt, block_bytes, 1 << 30)


def rootless(root: int, prompt: bytes, block_bytes: int, most: int) -> list[int]:
    return chain_keys(0, prompt, block_bytes, most)


@pytest.mark.parametrize("fault", [unchained, with_the_rest, without_limit, rootless])
def test_faults_are_seen(fault: ChainKeys) -> None:
    with pytest.raises(AssertionError):
        check_definition(fault)


@pytest.mark.parametrize("fault", [unchained, with_the_rest])
def test_faults_of_sharing_are_seen(fault: ChainKeys) -> None:
    with pytest.raises(AssertionError):
        check_prefixes(fault)


def distinct_roots(root: Callable[[bytes, str, str], int]) -> bool:
    words = ["", "a", "b", "aa", "ab", "ba", "aab", "\x00", "a\x00"]
    triples = [(secret.encode(), model, salt) for secret in words for model in words for salt in words]
    return len({root(*triple) for triple in triples}) == len(triples)


def test_another_secret_model_or_salt_is_another_root() -> None:
    assert distinct_roots(root_key)
    assert root_key(b"secret", "llama", "salt") == root_key(b"secret", "llama", "salt")


def test_roots_without_frames_are_seen_to_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "pack", lambda *_: b"")
    assert not distinct_roots(root_key)


@pytest.mark.parametrize(
    "fault",
    [
        lambda secret, model, salt: root_key(b"", model, salt),
        lambda secret, model, salt: root_key(secret, "", salt),
        lambda secret, model, salt: root_key(secret, model, ""),
    ],
)
def test_roots_that_leave_something_out_are_seen(fault: Callable[[bytes, str, str], int]) -> None:
    assert not distinct_roots(fault)


def test_different_roots_share_no_key() -> None:
    prompt = bytes(range(256)) * 8
    chains = [
        chain_keys(root_key(secret, model, salt), prompt, 64, 1000)
        for secret in (b"one", b"two")
        for model in ("llama", "llama-lora")
        for salt in ("", "tenant")
    ]
    keys = [key for chain in chains for key in chain]
    assert len(keys) == len(set(keys)) == 8 * 32


def test_lone_surrogates_in_a_model_name_are_no_error() -> None:
    assert root_key(b"", "\ud800", "\udfff") != root_key(b"", "\ud801", "\udfff")


def test_keys_fit_64_bits() -> None:
    assert all(0 <= key < 1 << 64 for key in chain_keys((1 << 64) - 1, bytes(4096), 4, 5000))
