"""Four bytes a token: prompts, block keys, answers, and turns that extend each other."""

import pytest

from epp.lab import tokens


def test_four_bytes_of_utf8_are_one_token() -> None:
    assert [tokens.token_count(tokens.from_text(text)) for text in ("", "a", "abcd", "abcde", "äöü")] == [
        0,
        1,
        1,
        2,
        2,
    ]


def test_token_ids_are_little_endian() -> None:
    assert tokens.from_token_ids([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    with pytest.raises(OverflowError):
        tokens.from_token_ids([2**32])


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("question", ["", "a", "four", "a longer question, in äöü"])
def test_the_next_turn_extends_prompt_and_answer(turns: int, question: str) -> None:
    messages = [("system", "You are terse.")]
    for turn in range(turns):
        messages.append(("user", f"{question}{turn}"))
        prompt = tokens.from_chat(messages)
        words = tokens.answer_words(prompt, 9)
        answer = b"".join(words).decode()
        messages.append(("assistant", answer))
        following = tokens.from_chat([*messages, ("user", "next")])
        assert following.startswith(prompt + answer.encode())
        assert len(prompt) % 4 == 0


def test_the_chat_is_told_by_roles_and_contents() -> None:
    chats = [
        [("user", "a")],
        [("system", "a")],
        [("user", "ab")],
        [("user", "a"), ("user", "b")],
        [("user", "a"), ("assistant", "b")],
        [],
    ]
    assert len({tokens.from_chat(chat) for chat in chats}) == len(chats)


def test_keys_are_of_full_blocks_and_chained() -> None:
    text = tokens.from_text("the quick brown fox jumps over the lazy dog")
    keys = tokens.block_keys(text, block_size=2, parent=0)
    assert len(keys) == tokens.token_count(text) // 2 == 5
    changed = tokens.block_keys(b"T" + text[1:], block_size=2, parent=0)
    assert not set(keys) & set(changed)
    later = tokens.block_keys(text[:20] + b"XXXX" + text[24:], block_size=2, parent=0)
    assert later[:2] == keys[:2]
    assert not set(later[2:]) & set(keys)
    assert tokens.block_keys(text[8:], block_size=2, parent=keys[0]) == keys[1:]
    assert not set(tokens.block_keys(text, block_size=2, parent=1)) & set(keys)


def test_answers_are_words_of_one_token_and_prefixes_of_longer_ones() -> None:
    prompt = tokens.from_text("hello")
    words = tokens.answer_words(prompt, 300)
    assert len(words) == 300
    assert words[:7] == tokens.answer_words(prompt, 7)
    assert words != tokens.answer_words(tokens.from_text("hallo"), 300)
    assert len(set(words)) > 40


def test_the_vocabulary_needs_no_escaping() -> None:
    assert len(set(tokens.WORDS)) == 64
    for word in tokens.WORDS:
        assert len(word) == tokens.TOKEN_BYTES
        assert word[:3].isalpha()
        assert word.islower()
        assert word.endswith(b" ")
