"""What is taken out of a recording before it is written: keys, tokens and values named like secrets.

By rule, not by understanding: key-like strings of well-known services, JWTs, bearer tokens, private keys,
passwords in URLs, and texts that stand behind a name such as `password` or `api_key` in JSON, YAML, shell
or Python text, or in the schema of a tool. Names, addresses and other personal details are **not** found, nor
are secrets that are numbers; whoever records other people's data brings a `redact` function.

Equal secrets get equal stand-ins within one recorder (the repetition is what a replay measures), and a
stand-in says nothing about the secret: it is a keyed digest with a key that is never written.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["Redactor", "without_surrogates"]

_SECRETS: Final = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | \b(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}                        # OpenAI, Anthropic, Stripe and their like
    | \b(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}
    | \b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,} | \bgithub_pat_[A-Za-z0-9_]{30,} | \bglpat-[A-Za-z0-9_-]{16,}
    | \bhf_[A-Za-z0-9]{20,} | \bxox[abprs]-[A-Za-z0-9-]{10,} | \bAIza[A-Za-z0-9_-]{30,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*  # JWT
    """,
    re.VERBOSE | re.DOTALL,
)
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)(\s+)([A-Za-z0-9._~+/=-]{12,})")
# Lengths are bounded everywhere: a 5 MB line of base64 must not take quadratic time.
_URL_PASSWORD: Final = re.compile(r"(://[^\s:/@\"']{0,256}:)([^\s@/\"']{1,1024})(@)")
_NAME: Final = (
    r"(?:password|passwd|passphrase|secret|api[_-]?key|apikey|access[_-]?key|private[_-]?key"
    r"|auth[_-]?token|access[_-]?token|refresh[_-]?token|client[_-]?secret|credentials?)[A-Za-z0-9_]{0,64}"
)
# The quote may itself be escaped, where JSON stands inside JSON.
_QUOTED: Final = re.compile(
    r"(?i)(" + _NAME + r"\\{0,8}[\"']?\s{0,8}[:=]\s{0,8})(\\{0,8}[\"'])((?:(?!\2).){1,4096}?)(\2)"
)
_BARE: Final = re.compile(r"(?i)(" + _NAME + r"=)([^\s\"'\\&;,)}\]]{4,1024})")

_NAMED: Final = re.compile("(?i)" + _NAME)
_SCHEMA_VALUES: Final = frozenset({"default", "const", "enum", "example", "examples"})

# What a text must hold for a rule to apply: a search for a word is a hundred times faster than the rule.
_SECRET_WORDS: Final = (
    *("PRIVATE KEY", "sk-", "rk-", "pk-", "sk_", "rk_", "pk_", "gh", "glpat-", "hf_", "xox", "AIza"),
    *("AKIA", "ASIA", "eyJ"),
)
_NAME_WORDS: Final = ("pass", "secret", "api", "access", "private", "token", "credential")


def without_surrogates(text: str) -> str:
    """Text that can be encoded: halves of a pair are joined, lone ones become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class Redactor:
    """Replaces secrets by stand-ins; see the module docstring for the rules."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def stand_in(self, secret: str) -> str:
        """What is written in place of a secret."""
        digest = hmac.digest(self._key, secret.encode("utf-8", "surrogatepass"), "sha256")
        return f"[redacted:{digest.hex()[:6]}]"

    def clean(self, text: str) -> str:
        """The text without what the rules find."""
        lower = text.lower()
        if any(word in text for word in _SECRET_WORDS):
            text = _SECRETS.sub(lambda found: self.stand_in(found[0]), text)
        if "bearer" in lower or "basic" in lower:
            text = _BEARER.sub(lambda found: f"{found[1]}{found[2]}{self.stand_in(found[3])}", text)
        if "://" in text:
            text = _URL_PASSWORD.sub(lambda found: f"{found[1]}{self.stand_in(found[2])}{found[3]}", text)
        if any(word in lower for word in _NAME_WORDS):
            text = _BARE.sub(self._bare, _QUOTED.sub(self._quoted, text))
        return text

    def clean_json(self, value: object, clean: Callable[[str], str], *, named: bool = False) -> object:
        """Decoded JSON with `clean` applied to every text in it.

        Texts that stand under a name like `password` are replaced whole, and where a JSON schema stands
        there, its defaults and examples are (`named`: such a name has been met).
        """
        if isinstance(value, str):
            return self.stand_in(value) if named else clean(value)
        if isinstance(value, Mapping):
            return {
                name: self.clean_json(
                    item, clean, named=bool(_NAMED.search(str(name))) or (named and name in _SCHEMA_VALUES)
                )
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.clean_json(item, clean, named=named) for item in value]
        return value

    def _quoted(self, found: re.Match[str]) -> str:
        value = found[3]
        return found[0] if _is_stand_in(value) else f"{found[1]}{found[2]}{self.stand_in(value)}{found[4]}"

    def _bare(self, found: re.Match[str]) -> str:
        return found[0] if _is_stand_in(found[2]) else f"{found[1]}{self.stand_in(found[2])}"


def _is_stand_in(value: str) -> bool:
    return value.startswith("[redacted:")
