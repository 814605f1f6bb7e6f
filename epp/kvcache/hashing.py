"""Chained block keys: one 64-bit key says what a block holds and everything that stands before it."""

from hashlib import blake2b
from struct import iter_unpack, pack

from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN = 4


def root_key(secret: bytes, model: str, salt: str) -> int:
    """The key before the first block: which cache the blocks belong to.

    Secret, model and salt are framed by their lengths, so that no two triples read the same. The block
    hash is no MAC: whoever knows a root key can build collisions. The digest here is one, so the root stays
    unknown as long as `secret` is (random per process, shared only with replicas that exchange keys).

    Args:
        model: the name the engine is asked for (a LoRA adapter has its own cache).
        salt: the request's cache salt, "" for none.
    """
    model_bytes = model.encode("utf-8", "surrogatepass")
    salt_bytes = salt.encode("utf-8", "surrogatepass")
    frame = pack("<3Q", len(secret), len(model_bytes), len(salt_bytes))
    digest = blake2b(b"".join((frame, secret, model_bytes, salt_bytes)), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def chain_keys(root: int, prompt: bytes, block_bytes: int, max_blocks: int) -> list[int]:
    """Keys of the first full blocks of a prompt, `max_blocks` at most.

    Each is the hash of its block, seeded by the key before. A partial block at the end has no key:
    engines cache full blocks only.
    """
    digest = xxh3_64_intdigest
    whole = min(len(prompt) // block_bytes, max_blocks) * block_bytes
    key, keys = root, []
    for (block,) in iter_unpack(f"{block_bytes}s", memoryview(prompt)[:whole]):
        key = digest(block, key)
        keys.append(key)
    return keys


def all_keys(root: int, prompt: bytes, block_bytes: int, max_blocks: int) -> list[int]:
    """As `chain_keys`, and one more for the partial block at the end where `max_blocks` leaves room for it.

    Equal last keys then mean equal prompts, as far as they are looked at.
    """
    keys = chain_keys(root, prompt, block_bytes, max_blocks)
    rest = prompt[len(keys) * block_bytes :]
    if rest and len(keys) < max_blocks:
        keys.append(xxh3_64_intdigest(rest, keys[-1] if keys else root))
    return keys
