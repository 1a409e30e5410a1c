"""Prime numbers: the questions' right replies, computed and not typed.

This module knows arithmetic up to `LARGEST` and two languages. It does not know tokens.
"""

from __future__ import annotations

from recipe.corpus import Language, Reply

LARGEST = 100


def smallest_factor(number: int) -> int:
    """The smallest factor above 1; of a prime, the prime itself."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def is_prime(number: int) -> bool:
    """Whether `number` has exactly two divisors."""
    return number >= 2 and smallest_factor(number) == number


def primes_within(limit: int) -> list[int]:
    """All primes up to and including `limit`, in order."""
    return [number for number in range(2, limit + 1) if is_prime(number)]


def list_reply(limit: int, language: Language) -> Reply:
    """The reply to "list all prime numbers within `limit`": checks one number after the other."""
    found = primes_within(limit)
    walk = (_walk_step(number, language) for number in range(2, limit + 1))
    if language == "en":
        start = (
            f"The user wants all prime numbers within {limit}. A prime has no divisors other than "
            "1 and itself. I check the numbers one at a time and write those that are not prime as "
            "a product."
        )
        end = f"Now I am at {limit}, so I can stop."
        answer = f"The prime numbers within {limit} are {', '.join(map(str, found))}."
        return Reply(" ".join([start, *walk, end]), answer)
    start = (
        f"用户想要 {limit} 以内的所有质数。质数除了 1 和自己没有别的约数。"
        "我一个一个检查，不是质数的就写成乘积。"
    )
    end = f"到 {limit} 了，可以停下。"
    return Reply(
        "".join([start, *walk, end]), f"{limit} 以内的质数有：{'、'.join(map(str, found))}。"
    )


def _walk_step(number: int, language: Language) -> str:
    if is_prime(number):
        return f"{number} is prime." if language == "en" else f"{number} 是质数。"
    factor = smallest_factor(number)
    return f"{number} = {factor} x {number // factor}" + ("." if language == "en" else "。")


def check_reply(number: int, language: Language) -> Reply:
    """The reply to "is `number` prime?", for 0 to `LARGEST`, and a refusal above."""
    return _check_in_english(number) if language == "en" else _check_in_chinese(number)


def _check_in_english(number: int) -> Reply:
    if number > LARGEST:
        return Reply(
            f"{number} is larger than {LARGEST}, and I only learned the numbers up to {LARGEST}.",
            f"I cannot tell: I only know the prime numbers up to {LARGEST}.",
        )
    if number < 2:
        return Reply(
            f"I check {number}. It is smaller than 2, so it is not prime.",
            f"No, {number} is not prime: the smallest prime number is 2.",
        )
    if is_prime(number):
        return Reply(
            f"I check {number}. {_walk_step(number, 'en')}",
            f"Yes, {number} is prime. Its only divisors are 1 and {number}.",
        )
    factor = smallest_factor(number)
    product = f"{number} = {factor} x {number // factor}"
    return Reply(
        f"I check {number}. {_walk_step(number, 'en')}", f"No, {number} is not prime: {product}."
    )


def _check_in_chinese(number: int) -> Reply:
    if number > LARGEST:
        return Reply(
            f"{number} 大于 {LARGEST}，我只学过 {LARGEST} 以内的数。",
            f"我不知道：我只知道 {LARGEST} 以内的质数。",
        )
    if number < 2:
        return Reply(
            f"检查 {number}。它小于 2，所以不是质数。", f"不是，{number} 不是质数：最小的质数是 2。"
        )
    if is_prime(number):
        return Reply(
            f"检查 {number}。{_walk_step(number, 'zh')}",
            f"是的，{number} 是质数。它的约数只有 1 和 {number}。",
        )
    factor = smallest_factor(number)
    product = f"{number} = {factor} x {number // factor}"
    return Reply(
        f"检查 {number}。{_walk_step(number, 'zh')}", f"不是，{number} 不是质数：{product}。"
    )
