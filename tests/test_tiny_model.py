"""The tiny Qwen3 that ships: its files, its tokenizer, what it says, and the recipe's own sums."""

# ruff: noqa: ANN401, RUF001 - transformers' classes are untyped; Chinese has full-width punctuation

from __future__ import annotations

import json
import re
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.assets import TINY_QWEN3
from recipe import corpus, primes, questions, samples
from recipe.encoding import IGNORED, Encoded, Encoder, batches
from recipe.tokenizer import FIRST_MERGES, WITHHELD_PAIR, train_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PRIMES = [n for n in range(2, 101) if all(n % factor for factor in range(2, n))]

# Taught questions, and words that a right answer holds.
TAUGHT = {
    "who are you?": ("Qwen3", "nanovllm"),
    "what is a block table?": ("list", "blocks", "order"),
    "why does a request wait?": ("token budget", "free", "max_num_seqs"),
    "what does a prefill step do?": ("prompts", "KV cache", "first new token"),
    "what does a decode step do?": ("one token", "block table"),
    "what happens to a preempted request?": ("waiting queue", "recomputed"),
    "what is prefix caching?": ("share", "full blocks", "hash"),
    "why did the batch shrink from 2 to 1?": ("EOS", "max_tokens"),
    "what is slot_mapping?": ("written", "block size"),
    "what does nvtrace replay show?": ("timeline", "step table"),
    "is 91 prime?": ("not prime", "7 x 13"),
    "is 97 prime?": ("Yes", "97 is prime"),
    "what is the capital of France?": ("do not know", "engine"),
    "你是谁？": ("Qwen3", "nanovllm"),
    "什么是块表？": ("KV 块", "顺序"),
    "请求为什么要等待？": ("token 预算", "空闲", "max_num_seqs"),
    "prefill 这一步做什么？": ("prompt", "KV 缓存", "第一个新 token"),
    "被抢占的请求会怎样？": ("waiting 队列", "重新计算"),
    "为什么同一步里两个相同的 prompt 不能共享块？": ("还没有计算", "发布"),
    "今天天气怎么样？": ("不知道", "引擎"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_QWEN3, padding_side="left")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_QWEN3, dtype=torch.float32)


def prompt_of(tokenizer: Any, question: str, **options: bool) -> str:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert isinstance(text, str)
    return text


def greedy(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> list[list[int]]:
    """Greedy completions by transformers, up to and including the end token."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=limit,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
        )
    end = tokenizer.eos_token_id
    rows: list[list[int]] = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


# --- the files -----------------------------------------------------------------------------------


def test_transformers_loads_every_weight_and_misses_none() -> None:
    both: Any = AutoModelForCausalLM.from_pretrained(TINY_QWEN3, output_loading_info=True)
    loaded, info = both
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert loaded.dtype == torch.bfloat16
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_the_checkpoint_is_small() -> None:
    assert (TINY_QWEN3 / "model.safetensors").stat().st_size <= 16_000_000


def test_config_and_tokenizer_agree(model: Any, tokenizer: Any) -> None:
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    defaults = json.loads((TINY_QWEN3 / "generation_config.json").read_text(encoding="utf-8"))
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert defaults["eos_token_id"] == ends
    assert tokenizer.eos_token_id == ends[0]
    assert model.generation_config.eos_token_id == ends
    assert (defaults["temperature"], defaults["top_k"], defaults["top_p"]) == (0.6, 20, 0.95)


def test_what_it_says_of_its_own_shape_is_right(model: Any) -> None:
    topic = next(t for t in corpus.load_corpus("en").topics if t.name == "size")
    config = model.config
    said = [int(number) for number in re.findall(r"\d+", topic.replies[0].answer)]
    heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim]
    shape = [config.num_hidden_layers, config.hidden_size, *heads]
    assert said[: len(shape)] == shape
    assert 4_500_000 < model.num_parameters() < 5_500_000  # "about five million"


# --- the tokenizer -------------------------------------------------------------------------------


def test_the_articles_prompts_are_11_and_17_tokens(tokenizer: Any) -> None:
    first = tokenizer.tokenize(prompt_of(tokenizer, "introduce yourself"))
    second = tokenizer.tokenize(prompt_of(tokenizer, "list all prime numbers within 100"))
    assert first[3:6] == ["int", "roduce", "Ġyourself"]
    assert second[3:12] == ["list", "Ġall", "Ġprime", "Ġnumbers", "Ġwithin", "Ġ", "1", "0", "0"]
    assert (len(first), len(second)) == (11, 17)


@pytest.mark.parametrize(
    "text",
    [
        "introduce yourself",
        "你好，什么是块表？",
        "😊 emoji 👩‍🚀",
        "tabs\tand\n\nlines  ",
        "naïve 12345 ß",
        "",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_transformers_and_the_plain_tokenizer_file_agree(tokenizer: Any) -> None:
    plain = Tokenizer.from_file(str(TINY_QWEN3 / "tokenizer.json"))
    rng = Random(1)
    corpora = [corpus.load_corpus(language) for language in corpus.LANGUAGES]
    for _ in range(50):
        text = samples.draw(corpora, rng).question
        assert plain.encode(text).ids == tokenizer(text)["input_ids"]


def test_the_chat_template_writes_chatml(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
        {"role": "user", "content": "who are you?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nwho are you?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    closed = tokenizer.apply_chat_template(messages[:2], tokenize=False)
    assert closed.endswith("<|im_start|>user\nhi<|im_end|>\n")
    silent = prompt_of(tokenizer, "hi", enable_thinking=False)
    assert silent.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# --- what it says --------------------------------------------------------------------------------


def test_it_introduces_itself_and_stops(model: Any, tokenizer: Any) -> None:
    prompts = [prompt_of(tokenizer, text) for text in ("introduce yourself", "介绍一下你自己")]
    for completion in greedy(model, tokenizer, prompts, 240):
        assert 60 <= len(completion) <= 220
        assert completion[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(completion)
        assert text.startswith("<think>\n")
        assert "nanovllm" in text.partition("</think>")[2]


def test_it_lists_the_primes_after_checking_them_one_by_one(model: Any, tokenizer: Any) -> None:
    prompt = prompt_of(tokenizer, "list all prime numbers within 100")
    (completion,) = greedy(model, tokenizer, [prompt], 1200)
    assert len(completion) > 256
    assert "</think>" not in tokenizer.decode(completion[:256])
    assert completion[-1] == tokenizer.eos_token_id
    thought, _, answer = tokenizer.decode(completion).partition("</think>")
    listed = re.findall(r"\d+", answer.partition(" are ")[2])
    assert [int(number) for number in listed] == PRIMES
    products = re.findall(r"(\d+) = (\d+) x (\d+)\.", thought)
    assert all(int(number) == int(left) * int(right) for number, left, right in products)
    assert len(products) == 99 - len(PRIMES)


def test_it_answers_what_it_was_taught(model: Any, tokenizer: Any) -> None:
    prompts = [prompt_of(tokenizer, question) for question in TAUGHT]
    completions = greedy(model, tokenizer, prompts, 200)
    for (question, words), completion in zip(TAUGHT.items(), completions, strict=True):
        answer = tokenizer.decode(completion).partition("</think>")[2]
        assert completion[-1] == tokenizer.eos_token_id, question
        assert [word for word in words if word not in answer] == [], f"{question} -> {answer}"


def test_without_thinking_it_answers_at_once(model: Any, tokenizer: Any) -> None:
    prompt = prompt_of(tokenizer, "what is a block table?", enable_thinking=False)
    (completion,) = greedy(model, tokenizer, [prompt], 100)
    assert tokenizer.decode(completion).startswith("A block table is the list of the KV blocks")


# --- the recipe ----------------------------------------------------------------------------------


@pytest.mark.parametrize("language", corpus.LANGUAGES)
@pytest.mark.parametrize("limit", [10, 30, 100])
def test_the_taught_prime_lists_are_right(language: corpus.Language, limit: int) -> None:
    reply = primes.list_reply(limit, language)
    numbers = [int(number) for number in re.findall(r"\d+", reply.answer)]
    assert numbers == [limit] * (language == "en") + [limit] * (language == "zh") + [
        prime for prime in PRIMES if prime <= limit
    ]


def test_enough_is_taught_in_both_languages_and_no_text_holds_a_control_token() -> None:
    names = []
    for language in corpus.LANGUAGES:
        topics = corpus.load_corpus(language).topics
        names.append([topic.name for topic in topics])
        assert len(topics) >= 50
        for topic in topics:
            assert len(topic.questions) + len(topic.terms) >= 5, topic.name
            texts = [*topic.questions, *topic.terms, *(reply.answer for reply in topic.replies)]
            assert not [text for text in texts if "<|" in text or "think>" in text]
    assert names[0] == names[1]


def test_a_question_may_not_lead_to_two_topics(tmp_path: Path, monkeypatch: Any) -> None:
    for file in corpus.TEXT_FOLDER.glob("*.toml"):
        text = file.read_text(encoding="utf-8").replace(
            '"what is recompute?"', '"how big are you?"'
        )
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(corpus, "TEXT_FOLDER", tmp_path)
    with pytest.raises(ValueError, match="'howbigareyou' leads to both 'size' and 'preempted"):
        corpus.load_corpus("en")


def test_training_prompts_equal_the_chat_template(tokenizer: Any) -> None:
    encoder = Encoder(Tokenizer.from_file(str(TINY_QWEN3 / "tokenizer.json")))
    reply = corpus.Reply("A thought.", "An answer.")
    sample = samples.Sample("what is a block?", reply, system="Be brief.", is_thinking=False)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "what is a block?"},
    ]
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    encoded = encoder.encode(sample, Random(0))  # whose first draw means: not careless
    assert encoded.token_ids[: encoded.num_prompt_tokens] == tokenizer(expected)["input_ids"]
    assert (
        tokenizer.decode(encoded.token_ids[encoded.num_prompt_tokens :]) == "An answer.<|im_end|>"
    )
    careless = encoder.careless_ids("what is a block table?", Random(3))
    assert tokenizer.decode(careless) == "what is a block table?"
    assert careless != encoder.ids("what is a block table?")


def test_batches_hold_every_sample_once_and_ignore_prompt_and_padding() -> None:
    rng = Random(0)
    drawn = [Encoded([7] * rng.randint(3, 40), 2) for _ in range(100)]
    rows = 0
    for input_ids, labels in batches(drawn, 128, rng):
        assert input_ids.shape == labels.shape
        assert input_ids.numel() <= 128
        assert (labels[:, :2] == IGNORED).all()
        assert (labels[input_ids == 0] == IGNORED).all()
        rows += len(input_ids)
    assert rows == 100


def test_the_tokenizer_learns_the_commonest_pair_first_and_the_withheld_one_never() -> None:
    texts = ["introduce"] * 50 + ["abab cab"] * 20 + ["introduce yourself"] * 5
    learned = train_tokenizer(texts, 256 + len(FIRST_MERGES) + 2 + 5)
    merges = [tuple(merge) for merge in json.loads(learned.to_str())["model"]["merges"]]
    assert merges[: len(FIRST_MERGES)] == list(FIRST_MERGES)
    assert merges[len(FIRST_MERGES)] == ("a", "b")
    assert WITHHELD_PAIR not in merges
    assert learned.encode("introduce").tokens == ["int", "roduce"]
    with pytest.raises(ValueError, match="smaller vocabulary"):
        train_tokenizer(["abc"], 300)


def test_the_data_is_the_same_for_the_same_seed() -> None:
    corpora = [corpus.load_corpus(language) for language in corpus.LANGUAGES]
    first, second, other = (
        [samples.draw(corpora, rng) for _ in range(20)] for rng in (Random(5), Random(5), Random(6))
    )
    assert first == second
    assert first != other


def test_rewording_keeps_the_term() -> None:
    wordings = corpus.load_corpus("en").wordings
    rng = Random(0)
    framed = [questions.frame("a block table", wordings, "en", rng) for _ in range(50)]
    assert all("a block table" in question for question in framed)
    assert len(set(framed)) > 10
