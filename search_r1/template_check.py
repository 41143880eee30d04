"""What a tokenizer and its chat template do to an episode's form, found by rendering small conversations.

Model ids are carried as sampled, so a template cannot change what is trained. It decides where turns begin and end,
and it decides what other programs, which render a finished conversation anew, will show the model.
"""

from __future__ import annotations

import re
from typing import Any

from search_r1.codec import Codec
from search_r1.tags import KNOWN_TAGS
from verl.types import Finding, Level, Tokenizer

_USER, _REPLY, _NEXT = "first question", "first reply", "second question"
_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>")
_PROBE = "Who , then ? It 's <search> Zürich 東京 </search>\n\n<answer> a  b </answer>"


def check_template(codec: Codec, tokenizer: Tokenizer) -> list[Finding]:
    """Return one finding per check; without a chat template only the tokenizer is looked at."""
    findings = [_decoding(codec)]
    if not codec.has_chat_template:
        plain = "no chat template: prompts are plain text, hints stand between blank lines"
        return [*findings, Finding("chat template", Level.NOTE, plain)]
    checks = [_markers(codec), _turns_kept(codec)]
    if checks[-1].level is not Level.FAIL:
        checks += [_turn_end(codec, tokenizer), _generation_prompt(codec), _append_only(codec), _spaces(codec)]
    if all(check.level is Level.OK for check in checks[:5]):
        checks.append(_hint(codec, tokenizer))
    return [*findings, *checks, _thinking(codec), _date(tokenizer)]


def _messages(reply: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": _NEXT},
    ]


def _decoding(codec: Codec) -> Finding:
    text = codec.decode(codec.encode(_PROBE))
    if text == _PROBE:
        return Finding("decoding", Level.OK, "text and tags survive encoding and decoding")
    return Finding(
        "decoding",
        Level.FAIL,
        f"{_PROBE!r} comes back as {text!r}: actions would be read from altered text",
        "set clean_up_tokenization_spaces=false in tokenizer_config.json, or repair its decoder",
    )


def _markers(codec: Codec) -> Finding:
    markers = sorted(set(_MARKER.findall(codec.render(_messages(_REPLY)))))
    spelled = [f"{marker} ({n} tokens)" for marker in markers if (n := len(codec.encode(marker))) != 1]
    if spelled:
        return Finding(
            "turn markers",
            Level.FAIL,
            f"the template writes markers that the tokenizer spells out: {', '.join(spelled)}",
            "use the chat template that belongs to this tokenizer, or add the markers as special tokens",
        )
    return Finding("turn markers", Level.OK, f"each is one token: {' '.join(markers) or 'none of the <|...|> form'}")


def _turns_kept(codec: Codec) -> Finding:
    text = codec.render(_messages(_REPLY))
    lost = [content for content in (_USER, _REPLY, _NEXT) if content not in text]
    if lost:
        return Finding(
            "turns kept",
            Level.FAIL,
            f"the template drops {' and '.join(map(repr, lost))} of question, reply, question",
            "use a template that renders whole conversations: a hint could not be placed after a turn",
        )
    return Finding("turns kept", Level.OK, "question, reply and second question are all rendered")


def _turn_end(codec: Codec, tokenizer: Tokenizer) -> Finding:
    behind = codec.render(_messages(_REPLY)).split(_REPLY, 1)[1]
    end = getattr(tokenizer, "eos_token", None)
    if end and behind.startswith(end):
        return Finding("turn end", Level.OK, f"the template ends the model's turn with {end!r}, where generation stops")
    return Finding(
        "turn end",
        Level.FAIL,
        f"generation stops at {end!r}, the template ends the model's turn with {behind[:20]!r}",
        "set eos_token (tokenizer_config.json) and eos_token_id (generation_config.json) to the template's turn end",
    )


def _generation_prompt(codec: Codec) -> Finding:
    def header(messages: list[dict[str, str]]) -> str:
        return codec.render(messages).removeprefix(codec.render(messages, generation_prompt=False))

    first, later = header(_messages(_REPLY)[:1]), header(_messages(_REPLY))
    if first and first == later:
        return Finding("generation prompt", Level.OK, f"every turn of the model begins with {first!r}")
    return Finding(
        "generation prompt",
        Level.FAIL,
        f"the model's first turn begins with {first!r}, its later ones with {later!r}",
        "the template must add the same header whenever add_generation_prompt is set",
    )


def _append_only(codec: Codec) -> Finding:
    messages = _messages(_REPLY)
    carried, whole = codec.render(messages[:1]) + _REPLY, codec.render(messages)
    if whole.startswith(carried):
        return Finding("append-only", Level.OK, "a later rendering begins with the earlier one and the reply")
    at = next(
        (i for i, (a, b) in enumerate(zip(carried, whole, strict=False)) if a != b), min(len(carried), len(whole))
    )
    return Finding(
        "append-only",
        Level.NOTE,
        f"once there is a reply the template writes {whole[at : at + 30]!r} where the model had seen "
        f"{carried[at : at + 30]!r}; episodes keep what it had seen",
        "serve the model token by token as it was trained, or do not render finished turns anew",
    )


def _hint(codec: Codec, tokenizer: Any) -> Finding:
    """Put an episode together as ``run_episode`` does after an end-of-sequence token, and compare the whole text."""
    messages = _messages(_REPLY)
    ids = (
        *codec.encode_messages(messages[:1]),
        *codec.encode(_REPLY),
        tokenizer.eos_token_id,
        *codec.encode_user_turn(_NEXT),
    )
    got, wanted = codec.decode(ids), codec.render(messages)
    if got == wanted:
        return Finding("hint", Level.OK, "after an ended turn the next one begins exactly as the template writes it")
    return Finding(
        "hint",
        Level.FAIL,
        f"after an ended turn the context reads {got[-60:]!r}, the template writes {wanted[-60:]!r}",
        "use a template whose turns do not depend on what follows them",
    )


def _spaces(codec: Codec) -> Finding:
    reply = f"\n {_REPLY} \n"
    if reply in codec.render(_messages(reply)):
        return Finding("white space", Level.OK, "a reply is rendered with its own white space")
    return Finding(
        "white space",
        Level.NOTE,
        "the template trims replies, so a conversation that is rendered anew differs from what was sampled",
        "nothing to do here: episodes keep what was sampled",
    )


def _thinking(codec: Codec) -> Finding:
    own = [tag for tag in (f"<{KNOWN_TAGS[0]}>", f"</{KNOWN_TAGS[0]}>") if len(codec.encode(tag)) == 1]
    shape = "tags are single tokens" if len(own) == 2 else "tags are spelled"
    if codec.thinking_is_forbidden:
        return Finding("native thinking", Level.OK, f"forbid: turns begin with the template's closed block; {shape}")
    if "<think>why" in codec.render(_messages(f"<think>why</think>{_REPLY}")):
        return Finding("native thinking", Level.OK, f"keep: the template renders earlier thinking as it is; {shape}")
    return Finding(
        "native thinking",
        Level.NOTE,
        f"keep: the template strips thinking from earlier turns, episodes never do, so that what is trained is what "
        f"was sampled; {shape}",
        "serve the model with its thinking left in the context, or train with data.native_thinking=forbid",
    )


def _date(tokenizer: Tokenizer) -> Finding:
    template: Any = getattr(tokenizer, "chat_template", "")
    if "strftime_now" in str(template):
        return Finding(
            "date",
            Level.NOTE,
            "the template writes today's date: prompts, and so training, differ from day to day",
            "put a fixed date_string into the model folder's template",
        )
    return Finding("date", Level.OK, "the template does not look at the clock")
